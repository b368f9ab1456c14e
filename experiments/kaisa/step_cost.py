"""What a step of K-FAC costs, by stage: precondition, factors, decompositions.

Three kinds of step are measured: one that only preconditions, one that also updates the
factors, one that also decomposes them. At intervals f and d a step costs
plain + (factors − plain)/f + (decompositions − factors)/d.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax import perf, runs
from hpcjax.optim import SgdConfig
from hpcjax.optim.kfac import KfacConfig
from hpcjax.runs.measured_step import StepConfig

NEVER = 2**30

STAGES = ("precondition", "factors", "decompositions")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(StepConfig):
    """A model, a batch and K-FAC's intervals.

    Attributes:
      precision: of K-FAC's products.
      factor_update_steps: f.
      inv_update_steps: d.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **StepConfig.smoke,
        "classes": "10",
        "compute": "bfloat16",
        "precision": "default",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "row repetition: of a step, or of a stage's share of it",
    }

    precision: Literal["default", "high", "highest"] = "highest"
    factor_update_steps: int = 10
    inv_update_steps: int = 100

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "row": (*("sgd", "kfac", "kfac, all at every step"), *STAGES),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times the steps, interleaved, in this process."""
    base = SgdConfig(lr=1e-3)

    def kfac(factors: int, decompositions: int) -> KfacConfig:
        return KfacConfig(
            base=base,
            factor_update_steps=factors,
            inv_update_steps=decompositions,
            precision=cfg.precision,
        )

    kinds = {
        "sgd": base,
        "plain": kfac(NEVER, NEVER),
        "factors": kfac(1, NEVER),
        "decompositions": kfac(1, 1),
    }
    steps = {name: cfg.step(kind, ctx.mesh.size) for name, kind in kinds.items()}
    seconds = perf.compare(steps, "sgd", repetitions=cfg.repetitions)["seconds"]
    sgd, plain, factors, whole = (
        seconds.sel(candidate=name, drop=True) for name in kinds
    )
    rows = {
        "sgd": sgd,
        "kfac": plain
        + (factors - plain) / cfg.factor_update_steps
        + (whole - factors) / cfg.inv_update_steps,
        "kfac, all at every step": whole,
        "precondition": plain - sgd,
        "factors": (factors - plain) / cfg.factor_update_steps,
        "decompositions": (whole - factors) / cfg.inv_update_steps,
    }
    return runs.measured({"seconds": runs.Dataset(rows).to_array("row")})
