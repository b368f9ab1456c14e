"""WAGMA-SGD as a part of a config; imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.averaging.late_config import LateConfig, Run
from hpcjax.averaging.workers_config import WorkerConfig
from hpcjax.core import checks
from hpcjax.core.config import Size
from hpcjax.hostcomm.groups import LateRule, require_sizes

if TYPE_CHECKING:
    from hpcjax.averaging import Averaging
    from hpcjax.hostcomm import GroupTrace


@dataclasses.dataclass(frozen=True, kw_only=True)
class WagmaConfig(WorkerConfig):
    """WAGMA-SGD: averages in groups of a butterfly, that wait for nobody.

    Attributes:
      group_size: S, a power of two; None: the square root of the number of workers,
        rounded up to one.
      tau: rounds from one mean of all to the next; None: there is none.
      late_rule: "always" adds a worker's own model in all partial rounds.
      order: when models are averaged.
      groups: "fixed" are the same in all rounds.
    """

    may_be_late: ClassVar[bool] = True

    group_size: Size | None = None
    tau: Size | None = 10
    late_rule: LateRule = "conditional"
    order: Literal["update_then_average", "average_then_update"] = "update_then_average"
    groups: Literal["butterfly", "fixed"] = "butterfly"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_size is not None:
            require_sizes(self.group_size)
        if self.workers is not None:
            require_sizes(self.group_size or 1, workers=self.workers)
        rule = (
            "late workers have old models that a warm start does not keep: give no late"
        )
        simulated = self.late and self.between == "devices"
        checks.require(not (simulated and self.warm_start), rule, late=self.late)

    def _worker(self, over: Any, tx: Any, run: Run) -> "Averaging":
        from hpcjax.averaging import wagma

        size = self.group_size
        if size is None:
            size = 2 ** ((run.workers - 1).bit_length() + 1 >> 1)
        require_sizes(size, workers=run.workers)
        trace = None
        if self.late is not None and isinstance(over, str):
            trace = self._trace(self.late, run, size)
        return wagma(
            over,
            tx,
            group_size=size,
            tau=self.tau,
            late_rule=self.late_rule,
            order=self.order,
            groups=self.groups,
            trace=trace,
        )

    def _trace(self, late: LateConfig, run: Run, group_size: int) -> "GroupTrace":
        """Returns what late workers would do; fewer steps begin in the same way."""
        from hpcjax import cost

        times = cost.simulate_groups(
            late.step_seconds(run),
            group_size=group_size,
            tau=self.tau,
            groups=self.groups,
            seconds=late.seconds,
            global_seconds=late.seconds,
        )
        return times.trace()
