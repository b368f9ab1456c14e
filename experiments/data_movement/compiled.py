"""The plain layer as JAX writes it and as XLA compiles it, against the counter."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from experiments.data_movement import layer
from hpcjax import ir, perf, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A layer, small enough to compile on a CPU.

    Attributes:
      count: what is counted: the primitives that JAX writes, these fused by the rules,
        or the program that XLA compiles, by its own analysis.
      batch: sequences.
      length: tokens of each.
      heads: of the attention.
      width: of the layer.
      seed: not used; nothing is run.
    """

    smoke: ClassVar[Mapping[str, str]] = {"length": "8", "width": "16"}
    figures: ClassVar[Mapping[str, str]] = {
        "words": ": read and written, in Mi",
        "flops": ": operations over those of the list's contractions",
        "transposes": ": instructions that only change a layout",
    }

    count: Literal["primitives", "fused", "xla"] = "primitives"
    batch: config.Size = 2
    length: config.Size = 128
    heads: config.Size = 4
    width: config.Size = 256
    seed: config.Seed = 0


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Counts a forward and backward pass in float32."""
    import jax

    sizes = ir.encoder_sizes(
        batch=cfg.batch, length=cfg.length, heads=cfg.heads, width=cfg.width
    )
    params, masks, inputs = (
        layer.shapes(axes, sizes, "float32")
        for axes in (layer.PARAMETERS, layer.MASKS, {"x": layer.INPUT})
    )
    args = params, inputs["x"], masks, inputs["x"]
    listed = ir.encoder_layer(sizes).by_kind()["contraction"].flops
    if cfg.count == "xla":
        compiled = jax.jit(layer.with_gradients).lower(*args).compile()
        transposes = perf.count_ops(compiled, "transpose")
        transposes += perf.count_ops(compiled, "copy")
        words, flops = perf.bytes_accessed(compiled) / 4, perf.flops(compiled)
    else:
        flow = ir.dataflow(layer.with_gradients, *args)
        if cfg.count == "fused":
            groups = ir.fusion_groups(flow)
            flow = ir.fuse(flow, {" + ".join(group): group for group in groups})
        moved = flow.total()
        words, flops = moved.words, moved.flops
        transposes = sum(o.name.startswith("transpose") for o in flow.operators)
    return runs.analytical(
        {"words": words / 2**20, "flops": flops / listed, "transposes": transposes}
    )
