"""Layouts of a fused encoder layer's tensors, selected with a roofline's times."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import ClassVar, Literal

from experiments.data_movement import movement
from hpcjax import cost, ir, runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A layer, a device and a way to select.

    Attributes:
      method: "exact", or the paper's shortest paths through forward and backward
        operators, in either order.
      passes: "both", or only the forward pass.
      layer: the sizes.
      device: the roofline.
      seed: not used; nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {"passes": "forward"}
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": ": of all kernels; infinite if no layouts are left for some",
        "over_fastest": ": over the sum of each one's fastest time",
        "gap": ": to the bound that was proved; infinite without one",
        "worst": ": the most that a kernel takes over its fastest time",
    }

    method: Literal["exact", "fp_first", "bp_first"] = "exact"
    passes: Literal["forward", "both"] = "both"
    layer: movement.Config = movement.Config(kernels="paper")
    device: cost.Roofline = cost.Roofline()
    seed: config.Seed = 0


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Selects layouts."""
    backward = cfg.passes == "both"
    times = cost.layout_times(movement.layer(cfg.layer, backward=backward), cfg.device)
    tensors = {name for rows in times.values() for name in rows[0].layouts}
    same = [pair for pair in ir.SAME if set(pair) <= tensors]
    first = [o.name for o in movement.layer(cfg.layer, backward=False).operators]
    parts = [[n for n in times if n in first], [n for n in times if n not in first]]
    parts = [part for part in parts if part]
    try:
        if cfg.method == "exact":
            found = ir.select_layouts(times, same)
        else:
            order = parts if cfg.method == "fp_first" else parts[::-1]
            found = ir.select_by_paths(times, same, parts=order)
    except ConfigError as error:
        log.warning("%s", error)
        return runs.analytical(dict.fromkeys(cfg.figures, float("inf")))
    ratios = [
        chosen.seconds / min(row.seconds for row in times[name])
        for name, chosen in found.configurations.items()
    ]
    return runs.analytical(
        {
            "seconds": found.seconds,
            "over_fastest": found.seconds / found.fastest,
            "gap": found.gap,
            "worst": max(ratios),
        }
    )
