"""The published algorithm in PyTorch on the CPU, written anew: the baseline of times.

One column after another in lazy blocks of 128, with the upper Cholesky factor of the
inverse Hessian, true-sequential through a block of LLaMA's architecture. What has the
same inputs shares its Hessian and its factor here too, which the published code does
not do. Weights are `[outputs, inputs]`, as there.

References:
  Frantar, Ashkboos, Hoefler and Alistarh, GPTQ, ICLR 2023, Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError

try:
    import torch
except ImportError as error:
    raise ConfigError(
        "the baseline is written in PyTorch, which is not installed: "
        "pip install 'hpcjax[oracles]'"
    ) from error

Weights = Mapping[str, "torch.Tensor"]


class Shape(NamedTuple):
    """Of a block.

    Attributes:
      heads: of the queries.
      kv_heads: of keys and values.
      theta: base of the rotary wavelengths.
      eps: of the norms.
    """

    heads: int
    kv_heads: int
    theta: float
    eps: float


def weights_of(flat: Mapping[str, Any]) -> dict[str, "torch.Tensor"]:
    """Returns our parameters of a block, by path, as tensors; kernels transposed."""
    return {
        path: torch.from_numpy(np.array(np.asarray(leaf, np.float32).T, order="C"))
        for path, leaf in flat.items()
    }


def factor_of(hessian: "torch.Tensor", damping: float) -> "torch.Tensor":
    """Returns U with (H + damping · mean diagonal · I)⁻¹ = UᵀU."""
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def quantize(
    weight: "torch.Tensor", factor: "torch.Tensor", bits: int, block: int = 128
) -> "torch.Tensor":
    """Returns the values of a matrix on a grid for each row.

    Args:
      weight: W, `[outputs, inputs]`.
      factor: U.
      bits: of the grid, between least and largest weight of a row.
      block: columns whose updates reach the rest at once.
    """
    levels = 2**bits - 1
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    scale = (high - low) / levels
    zero = torch.round(-low / scale)
    left, made = weight.clone(), torch.empty_like(weight)
    for start in range(0, weight.shape[1], block):
        end = min(start + block, weight.shape[1])
        own, square = left[:, start:end].clone(), factor[start:end, start:end]
        errors = torch.empty_like(own)
        for column in range(end - start):
            w = own[:, column]
            q = torch.clamp(torch.round(w / scale) + zero, 0, levels)
            value = scale * (q - zero)
            made[:, start + column] = value
            error = (w - value) / square[column, column]
            own[:, column:] -= torch.outer(error, square[column, column:])
            errors[:, column] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    return made


def apply(
    weights: Weights,
    x: "torch.Tensor",
    shape: Shape,
    seen: Mapping[str, list] | None = None,
) -> "torch.Tensor":
    """Runs a block on `[batch, time, width]`.

    Args:
      weights: by path, see `weights_of`.
      x: what the block is given.
      shape: of the block.
      seen: lists by path of a matrix, to which its inputs are added.
    """

    def dense(path: str, y: "torch.Tensor") -> "torch.Tensor":
        if seen and path in seen:
            seen[path].append(y)
        return y @ weights[f"{path}/kernel"].T

    def norm(path: str, y: "torch.Tensor") -> "torch.Tensor":
        mean = y.square().mean(-1, keepdim=True)
        return y * torch.rsqrt(mean + shape.eps) * weights[f"{path}/scale"]

    batch, time, _ = x.shape
    y = norm("attention_norm", x)
    query, key, value = (
        dense(f"attention/{name}", y).view(batch, time, heads, -1).transpose(1, 2)
        for name, heads in (
            ("query", shape.heads),
            ("key", shape.kv_heads),
            ("value", shape.kv_heads),
        )
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(
        _turned(query, shape.theta),
        _turned(key, shape.theta),
        value,
        is_causal=True,
        enable_gqa=shape.kv_heads != shape.heads,
    )
    x = x + dense("attention/output", mixed.transpose(1, 2).reshape(batch, time, -1))
    y = norm("mlp_norm", x)
    gate = torch.nn.functional.silu(dense("mlp/gate", y))
    return x + dense("mlp/down", gate * dense("mlp/up", y))


def _turned(x: "torch.Tensor", theta: float) -> "torch.Tensor":
    """Rotates `[batch, heads, time, head_dim]`, halves paired."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * frequency
    cosine, sine = angle.cos(), angle.sin()
    first, second = x.split(half, dim=-1)
    return torch.cat(
        [first * cosine - second * sine, second * cosine + first * sine], dim=-1
    )


@torch.no_grad()
def quantize_block(
    weights: Weights,
    inputs: "torch.Tensor",
    shape: Shape,
    groups: Sequence[Sequence[str]],
    bits: int,
    *,
    damping: float = 0.01,
    batch: int = 8,
) -> tuple[dict[str, "torch.Tensor"], dict[str, "torch.Tensor"], "torch.Tensor"]:
    """Quantizes a block's matrices, group after group, and runs it once more.

    Args:
      weights: of the block, see `weights_of`.
      inputs: of the calibration, `[sequences, time, width]`.
      shape: of the block.
      groups: paths of matrices with the same inputs.
      bits: of the grid.
      damping: share of the Hessian's mean diagonal that is added.
      batch: sequences at once.

    Returns:
      Weights with the matrices replaced, the Hessian of each group by its first path,
      and what the block gives for the inputs.
    """
    made, hessians = dict(weights), {}
    for group in groups:
        first = group[0]
        hessian = torch.zeros((made[f"{first}/kernel"].shape[1],) * 2)
        for part in inputs.split(batch):
            seen: dict[str, list] = {first: []}
            apply(made, part, shape, seen)
            rows = seen[first][0].reshape(-1, len(hessian))
            hessian += 2 / len(inputs) * (rows.T @ rows)
        factor = factor_of(hessian, damping)
        for path in group:
            kernel = made[f"{path}/kernel"]
            made[f"{path}/kernel"] = quantize(kernel, factor, bits)
        hessians[first] = hessian
    outputs = torch.cat([apply(made, part, shape) for part in inputs.split(batch)])
    return made, hessians, outputs


def lost(
    weight: "torch.Tensor", made: "torch.Tensor", hessian: "torch.Tensor"
) -> float:
    """Returns tr((W − Ŵ) H (W − Ŵ)ᵀ), in float64."""
    off = (weight - made).double()
    return float(torch.sum(off @ hessian.double() * off))
