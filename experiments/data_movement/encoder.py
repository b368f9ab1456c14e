"""How long fused operations and the fused layer take on a GPU; not run yet."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from experiments.data_movement import layer
from hpcjax import ir, kernels, perf, runs
from hpcjax.core import config

_RATE, _SEED = 0.1, 73
# Arrays that both passes of an operation, or a norm's forward one, read and write at
# least; a copy has two.
MOVED = {
    **{"softmax": 6, "BDRLN": 8, "BAD": 5, "copy": 2},
    **{"norm, one program": 3, "norm, four programs": 3},
}
_BLOCKS = ("block, XLA", "block, dot_product_attention", "block, kernels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Sizes, and how they are measured.

    Attributes:
      rows: of an operation's arrays, in bfloat16.
      width: of these, and of the layer.
      batch: sequences of the layer.
      length: tokens of each.
      heads: of the attention.
      repetitions: rounds of the measurement.
      implementation: of the operations.
      seed: not used; all numbers are one.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "rows": "4",
        "width": "8",
        "batch": "1",
        "length": "2",
        "heads": "2",
        "repetitions": "2",
        "implementation": "reference",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of one call",
        "bytes": "candidate: that it has to move; 0 of a block",
    }

    rows: config.Size = 131072
    width: config.Size = 1024
    batch: config.Size = 96
    length: config.Size = 512
    heads: config.Size = 16
    repetitions: config.Size = 30
    implementation: Literal["triton", "reference"] = "triton"
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        names = (*MOVED, *_BLOCKS)
        return {"candidate": names, "repetition": range(self.repetitions)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times all in turns in one process."""
    thunks = _operations(cfg) | _blocks(cfg)
    found = perf.compare(thunks, "copy", repetitions=cfg.repetitions, warmup=2)
    size = 2 * cfg.rows * cfg.width
    moved = [size * MOVED.get(name, 0) for name in found["candidate"].values.tolist()]
    return runs.measured({"seconds": found["seconds"], "bytes": ("candidate", moved)})


def _operations(cfg: Config) -> dict[str, Callable[[], Any]]:
    """Returns both passes of each operation, a copy, and the norm in four programs."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((cfg.rows, cfg.width), "bfloat16")
    row, seed = jnp.ones(cfg.width, "bfloat16"), jnp.uint32(_SEED)
    options = {"rate": _RATE, "implementation": cfg.implementation}

    def softmax(x: Any) -> Any:
        return kernels.softmax_dropout(x, seed, **options)

    def norm(x: Any) -> Any:
        return kernels.dropout_residual_norm(x, row, x, row, row, seed, **options)

    def activation(x: Any) -> Any:
        return kernels.bias_activation_dropout(x, row, seed, **options)

    def both(function: Callable[[Any], Any]) -> Callable[[], Any]:
        run = jax.jit(lambda x, g: jax.vjp(function, x)[1](g))
        return lambda: run(x, x)

    def kept(x: Any) -> Any:
        mask = kernels.keep_mask(seed, x.shape, _RATE)
        return jnp.where(mask, x / (1 - _RATE), 0)

    parts = [
        jax.jit(lambda x: x + row),
        jax.jit(kept),
        jax.jit(lambda y: y + x),
        jax.jit(lambda y: layer.normalise(y, row, row)),
    ]

    def four() -> Any:
        y = x
        for part in parts:
            y = part(y)
        return y

    one, copy = jax.jit(norm), jax.jit(lambda x: -x)
    return {
        "softmax": both(softmax),
        "BDRLN": both(norm),
        "BAD": both(activation),
        "copy": lambda: copy(x),
        "norm, one program": lambda: one(x),
        "norm, four programs": four,
    }


def _blocks(cfg: Config) -> dict[str, Callable[[], Any]]:
    """Returns both passes of a layer, as XLA fuses it and with kernels."""
    import jax
    import jax.numpy as jnp

    sizes = ir.encoder_sizes(
        batch=cfg.batch, length=cfg.length, heads=cfg.heads, width=cfg.width
    )

    def ones(axes: Mapping[str, str]) -> dict[str, Any]:
        made = layer.shapes(axes, sizes, "bfloat16")
        return {name: jnp.ones(each.shape, each.dtype) for name, each in made.items()}

    params, x = ones(layer.PARAMETERS), ones({"x": layer.INPUT})["x"]
    rates = dict.fromkeys(layer.MASKS, _RATE)
    seeds = {name: jnp.uint32(n) for n, name in enumerate(layer.MASKS)}

    def plain(params: Any, x: Any, **options: Any) -> Any:
        masks = {
            name: kernels.keep_mask(seeds[name], [sizes[a] for a in axes], _RATE)
            / jnp.bfloat16(1 - _RATE)
            for name, axes in layer.MASKS.items()
        }
        return layer.plain_layer(params, x, masks, **options)

    def flash(params: Any, x: Any) -> Any:
        return plain(params, x, attend=jax.nn.dot_product_attention)

    def fused(params: Any, x: Any) -> Any:
        options = {"rate": rates, "implementation": cfg.implementation}
        return layer.fused_layer(params, x, seeds, **options)

    def both(function: Callable[..., Any]) -> Callable[[], Any]:
        run = jax.jit(lambda params, x, g: jax.vjp(function, params, x)[1](g))
        return lambda: run(params, x, x)

    return dict(zip(_BLOCKS, map(both, (plain, flash, fused)), strict=True))
