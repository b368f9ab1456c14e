"""What an encoder layer of interpreted kernels reads and writes, counted as it runs."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from experiments.data_movement import controls, layer, movement
from hpcjax import ir, perf, runs
from hpcjax.core import config

# What is smaller, such as biases and partial sums of columns, is counted apart.
WHOLE = 1024
_RATES = {"attention": 0.1, "out": 0.1, "up": 0.1, "down": 0.1}
# Operators that are no kernel of ours, by their operands as in the list.
_PLAIN = ("QKV bias", "QKV dbias", "residual 1 dX", "residual 2 dX")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A layer and how it is executed; its tensors are 1/1024 of BERT-large's.

    Attributes:
      execution: "kernels", counted; "kernels, x twice", whose norms read their input
        twice; "list" and "fused list", by the sizes of what operators read and write.
      masks: whether dropout masks are stored or drawn again.
      batch: sequences.
      length: tokens of each.
      heads: of the attention.
      width: of the layer.
      seed: of the arrays.
    """

    smoke: ClassVar[Mapping[str, str]] = {"batch": "1", "length": "2", "width": "4"}
    figures: ClassVar[Mapping[str, str]] = {
        "contraction statistical elementwise": ": Ki words of a class of operators",
        "small": ": Ki words of operands below 1 Ki",
        "most": ": how often a whole operand of a kernel is read or written, at most",
    }

    execution: Literal["kernels", "kernels, x twice", "list", "fused list"] = "kernels"
    masks: Literal["stored", "recomputed"] = "stored"
    batch: config.Size = 2
    length: config.Size = 64
    heads: config.Size = 4
    width: config.Size = 32
    seed: config.Seed = 0

    def listed(self, kernels: Literal["none", "paper"]) -> "ir.Dataflow":
        """Returns the operators of the list."""
        sizes = {"batch": self.batch, "length": self.length, "heads": self.heads}
        listed = movement.Config(kernels=kernels, width=self.width, **sizes)
        return movement.layer(listed)


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Runs the layer forward and backward, or adds up the list."""
    flow = cfg.listed("paper" if cfg.execution == "fused list" else "none")
    by_kind = flow.by_kind(cfg.masks)
    kinds = ("contraction", "statistical", "elementwise")
    words = {kind: by_kind[kind].words for kind in kinds}
    small, most = 0, float("nan")
    if cfg.execution.startswith("kernels"):
        plain = sum(flow.moved(name, cfg.masks).words for name in _PLAIN)
        words |= {"statistical": 0, "elementwise": plain}
        most = 0.0
        for kernel in _count(cfg):
            kind = "elementwise" if "activation" in kernel.kernel else "statistical"
            for done in (kernel.loaded, kernel.stored):
                for name, count in done.items():
                    if kernel.sizes[name] < WHOLE:
                        small += count
                        continue
                    words[kind] += count
                    most = max(most, count / kernel.sizes[name])
    found = {kind: count / 2**10 for kind, count in words.items()}
    return runs.analytical({**found, "small": small / 2**10, "most": most})


def _count(cfg: Config) -> tuple[Any, ...]:
    import jax
    import numpy as np

    sizes = ir.encoder_sizes(
        batch=cfg.batch, length=cfg.length, heads=cfg.heads, width=cfg.width
    )
    rng = np.random.default_rng(cfg.seed)

    def draw(axes: str) -> "jax.Array":
        shape = [sizes[axis] for axis in axes]
        return jax.numpy.asarray(rng.normal(size=shape), "float32")

    params = {name: draw(axes) for name, axes in layer.PARAMETERS.items()}
    seeds = {name: jax.numpy.uint32(number) for number, name in enumerate(_RATES)}
    options = {"masks": cfg.masks, "implementation": "interpreted"}

    def both(params: Any, x: "jax.Array") -> Any:
        def forward(params: Any, x: "jax.Array") -> "jax.Array":
            return layer.fused_layer(params, x, seeds, rate=_RATES, **options)

        y, pull = jax.vjp(forward, params, x)
        return pull(y)

    twice = cfg.execution.endswith("twice")
    with controls.loaded_twice() if twice else contextlib.nullcontext():
        return perf.count_accesses(both, params, draw(layer.INPUT))
