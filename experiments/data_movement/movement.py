"""What an encoder layer moves, from its sizes: a list of operators, fused or not."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax import ir, runs
from hpcjax.core import config

MI, GI = 2**20, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A layer and how it is executed; the sizes are BERT-large's.

    Attributes:
      softmax: "joint" if the softmax and the dropout behind it are one operator of the
        list, "apart" if two.
      kernels: "none" for the list itself, "paper" for the paper's fused kernels.
      masks: whether dropout masks are stored as words or drawn again.
      batch: sequences.
      length: tokens of each.
      heads: of the attention.
      width: of the layer.
      seed: not used; nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {"batch": "1", "length": "4", "width": "16"}
    figures: ClassVar[Mapping[str, str]] = {
        "forward total": ": Mi words",
        "words": "kind: Mi words of a class of operators",
        "flops": "kind: share in percent",
        "operator_flops": "operator: Gi operations",
        "read written": "operator: Mi words",
    }

    softmax: Literal["joint", "apart"] = "joint"
    kernels: Literal["none", "paper"] = "none"
    masks: Literal["stored", "recomputed"] = "stored"
    batch: config.Size = 8
    length: config.Size = 512
    heads: config.Size = 16
    width: config.Size = 1024
    seed: config.Seed = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all axes."""
        return ir.encoder_sizes(
            batch=self.batch, length=self.length, heads=self.heads, width=self.width
        )

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        kinds, rows = moving(self, layer(self))
        return {"kind": list(kinds), "operator": list(rows)}


def layer(cfg: Config, *, backward: bool = True) -> "ir.Dataflow":
    """Returns the operators that a config describes."""
    apart = cfg.softmax == "apart"
    flow = ir.encoder_layer(cfg.sizes, backward=backward, softmax_apart=apart)
    return flow if cfg.kernels == "none" else ir.fuse(flow, ir.fused_kernels(flow))


def moving(cfg: Config, flow: "ir.Dataflow") -> "tuple[dict[str, ir.Moved], ...]":
    """Returns what the classes and the operators move, of those that move words."""
    rows = {o.name: flow.moved(o.name, cfg.masks) for o in flow.operators}
    return tuple(
        {name: moved for name, moved in found.items() if moved.words}
        for found in (flow.by_kind(cfg.masks), rows)
    )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Counts operations and words."""
    flow = layer(cfg)
    kinds, rows = moving(cfg, flow)
    every = sum(moved.flops for moved in kinds.values())
    return runs.analytical(
        {
            "forward": ir.movement(layer(cfg, backward=False), cfg.masks) / MI,
            "total": ir.movement(flow, cfg.masks) / MI,
            "words": ("kind", [moved.words / MI for moved in kinds.values()]),
            "flops": ("kind", [100 * moved.flops / every for moved in kinds.values()]),
            "operator_flops": ("operator", [m.flops / GI for m in rows.values()]),
            "read": ("operator", [moved.read / MI for moved in rows.values()]),
            "written": ("operator", [moved.written / MI for moved in rows.values()]),
        },
        coords={"kind": list(kinds), "operator": list(rows)},
    )
