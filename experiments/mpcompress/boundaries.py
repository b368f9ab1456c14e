"""What stages of a pipeline send each other whose outputs are encoded."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from hpcjax import runs
from hpcjax.core import checks
from hpcjax.runs import program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A language model of two stages, with a codec between them."""

    axes: ClassVar[tuple[str, ...]] = ("data", "stage", "col")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"codec": self.codec, "stages": getattr(self.parallel, "stages", 1)}
        rule = "there must be a codec between two stages"
        checks.require(self.codec is not None and given["stages"] == 2, rule, **given)

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and what the codec says."""
        up = "to the next stage and back, read from the step"
        return {
            **super().figures,
            "up down": f": bytes that a device sends {up}",
            "wire slopes": ": what the codec and its slopes are, of all ticks",
        }


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the step, by directions."""
    ways: dict[str, float] = {"up": 0.0, "down": 0.0}

    def make(cfg: Any, data_root: pathlib.Path, devices: int) -> program.Step:
        from hpcjax import perf

        step = program.compose(cfg, data_root, devices)
        for each in perf.collectives(step.compiled):
            if each.kind == "collective-permute":
                (source, target), *_ = each.groups
                ways["up" if source < target else "down"] += each.total
        return step

    found = program.read(cfg, ctx, make)
    return {**found, **ways, **told(cfg, cfg.devices or ctx.mesh.size)}


def told(cfg: Config, devices: int) -> dict[str, float]:
    """Returns what the codec and its slopes are in all ticks, of one device."""
    from hpcjax import sharding

    pipe, codec = cfg.parallel, cfg.codec
    make = getattr(sharding, pipe.schedule)
    ticks = sharding.tick_table(make(pipe.stages, pipe.micro_batches)).op.shape[1]
    copies = devices // (pipe.stages * pipe.tensor)
    rows = cfg.train.batch_size // (copies * pipe.micro_batches)
    size = rows, cfg.dataset.context, cfg.model.width
    code = codec.wire_bytes(size, cfg.compute, where="pipeline")
    slope = codec.slope_bytes(size, cfg.compute)
    return {"wire": ticks * code, "slopes": ticks * slope}
