"""Averages with few other workers, as parts of a config; imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any

from hpcjax.averaging.late_config import Run
from hpcjax.averaging.workers_config import WorkerConfig
from hpcjax.core import checks
from hpcjax.core.config import Size

if TYPE_CHECKING:
    from hpcjax.averaging import Averaging


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpsgdConfig(WorkerConfig):
    """D-PSGD: averages with the two neighbours in a ring."""

    def _worker(self, over: Any, tx: Any, run: Run) -> "Averaging":
        from hpcjax.averaging import dpsgd

        del run
        return dpsgd(over, tx)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdpsgdConfig(WorkerConfig):
    """AD-PSGD: averages of pairs that are drawn anew in each step."""

    def _worker(self, over: Any, tx: Any, run: Run) -> "Averaging":
        from hpcjax.averaging import adpsgd

        return adpsgd(over, tx, seed=run.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgpConfig(WorkerConfig):
    """Push-sum (SGP): shares of a model are pushed on, with weights.

    Attributes:
      neighbours: to whom a worker pushes in a step.
    """

    neighbours: Size = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "push-sum has weights that a warm start does not: warm_start must be 0"
        checks.require(not self.warm_start, rule, warm_start=self.warm_start)

    def _worker(self, over: Any, tx: Any, run: Run) -> "Averaging":
        from hpcjax.averaging import sgp

        del run
        return sgp(over, tx, neighbours=self.neighbours)
