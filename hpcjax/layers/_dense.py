"""The affine map over the last axis."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import kernels
from hpcjax.core import shards
from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary_like, varying_axes
from hpcjax.kernels import QuantizedMatrix
from hpcjax.layers import _precision


def dense(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"] | QuantizedMatrix | shards.Part,
    bias: Float[Array, " outputs"] | shards.Part | None = None,
    *,
    compute: str = "float32",
    output: str | None = None,
) -> Float[Array, "*batch outputs"]:
    """Computes y = x W + b over the last axis.

    The product runs in `compute` with float32 accumulation; the bias is added in
    float32 and the sum is then rounded once.

    Of a `core.shards.Part`, inside `shard_map`, x has this device's part of the inputs,
    or all of them; the product is summed over the mesh axes that cut the inputs, and y
    is this device's part of the outputs. A codec of the part compresses what is sent.
    In the backward pass dx is summed over the axes that cut the outputs, once for each
    use: see `share_inputs`.

    Args:
      x: `[..., inputs]`.
      kernel: W, `[inputs, outputs]`, or a quantized one, whose product runs as
        `kernels.quantized_matmul` chooses.
      bias: b, `[outputs]`, or None.
      compute: dtype of the product's operands.
      output: dtype of the result; None means `compute`.

    Returns:
      `[..., outputs]`.

    Raises:
      ConfigError: x is no part of the inputs as the kernel is cut.

    Examples:
      >>> dense(jnp.ones((2, 3)), jnp.ones((3, 1)), jnp.ones(1)).tolist()
      [[4.0], [4.0]]
    """
    bias, _ = shards.open_part(bias, -1)
    if isinstance(kernel, QuantizedMatrix):
        y = kernels.quantized_matmul(x.astype(compute), kernel, output="float32")
        y = y if bias is None else y + bias.astype(y.dtype)
        return y.astype(output or compute)
    return multiply(_matmul, x, kernel, bias, compute=compute, output=output)


def _matmul(x: jax.Array, kernel: jax.Array, accumulate: str | None) -> jax.Array:
    return jnp.matmul(x, kernel, preferred_element_type=accumulate)


def multiply(
    product: _precision.Bilinear,
    x: jax.Array,
    kernel: jax.Array | shards.Part,
    bias: jax.Array | None,
    *integers: jax.Array,
    compute: str,
    output: str | None = None,
) -> jax.Array:
    """Returns a product with a kernel, of which devices may have parts, plus a bias.

    Args:
      product: as the operation of `_precision.accumulate_float32`.
      x: `[..., inputs]`, as for `dense`.
      kernel: `[..., inputs, outputs]`.
      bias: what is added, of the outputs that this device has.
      *integers: further operands of `product`.
      compute: as for `dense`.
      output: as for `dense`.
    """
    part: Any = kernel
    kernel, of_inputs, _ = shards.open_part(part, -2, -1)
    if of_inputs:
        x = _take_inputs(x, kernel, of_inputs)
    x = vary_like(x, kernel)
    y = _precision.accumulate_float32(product, x, kernel, compute, *integers)
    if of_inputs:
        y = part.sum(y, of_inputs)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    y = y.astype(output or compute)
    return shards.received(y) if of_inputs else y


def share_inputs(
    x: Float[Array, "*batch inputs"], kernels: Sequence[Any]
) -> Float[Array, "*batch inputs"]:
    """Returns x as several kernels take it, whose parts devices may share out.

    Then slopes that come back from them are added up before they are summed over
    devices, once, and not after. Nothing changes for kernels that are whole.

    Args:
      x: `[..., inputs]`, as for `dense`.
      kernels: of the layers, arrays or `core.shards.Part`.

    Raises:
      ConfigError: as `dense`.
    """
    opened = [shards.open_part(kernel, -2) for kernel in kernels]
    for kernel, of_inputs in opened:
        if of_inputs:
            x = _take_inputs(x, kernel, of_inputs)
    return vary_like(x, [kernel for kernel, _ in opened])


def _take_inputs(x: jax.Array, kernel: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's part of x, which may be whole."""
    parts = jax.lax.axis_size(axes)
    if parts == 1:
        return x
    if x.shape[-1] == parts * kernel.shape[-2]:
        return shards.take_part(x, tuple((-1, axis) for axis in axes))
    if x.shape[-1] != kernel.shape[-2] or not set(axes) <= varying_axes(x):
        raise ConfigError(
            f"x must be cut over {', '.join(axes)}, as the kernel's {kernel.shape[-2]} "
            f"inputs of a device are: got {x.shape[-1]} that differ along "
            f"{sorted(varying_axes(x))}, inside shard_map with check_vma=True"
        )
    return x
