"""Eager SGD as a part of a config; imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.averaging.late_config import LateConfig, Run
from hpcjax.averaging.workers_config import AveragingConfig
from hpcjax.core import checks
from hpcjax.core.config import Count

if TYPE_CHECKING:
    from hpcjax.averaging import Averaging
    from hpcjax.core.method import Method, Optimization, RunShape

# Steps beyond the run's for which workers are followed, so that its last rounds are
# those of a run that goes on.
BEYOND = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagerConfig(AveragingConfig):
    """Eager SGD: sums of gradients that wait for the first, or for most, workers.

    Each worker has a device and a model of its own; these differ for as long as
    somebody is late.

    Attributes:
      mode: who starts a round, see `hostcomm.PartialAllreduce`.
      limiter: after so many partial rounds all are waited for; 0: never.
      missed: what a late worker applies; "newest" only between processes.
      sync_models_every: steps between means of the models; 0: never. Likewise.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients", "mean")
    may_be_late: ClassVar[bool] = True

    mode: Literal["solo", "majority", "sync"] = "majority"
    limiter: Count = 0
    missed: Literal["apply_all", "newest"] = "apply_all"
    sync_models_every: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        everything = self.missed == "apply_all" and not self.sync_models_every
        rule = "between devices a late worker applies all that it has missed"
        both = {"missed": self.missed, "sync_models_every": self.sync_models_every}
        checks.require(everything or self.between == "processes", rule, **both)

    @property
    def plays_delays(self) -> bool:
        """Whether delays that nobody spends decide what is trained: between devices."""
        return self.between == "devices"

    def make(
        self, over: Any, tx: Any, *, workers: int, steps: int, seed: int = 0
    ) -> "Averaging":
        """Returns one worker's optimizer, on a host."""
        from hpcjax.averaging import eager_sgd

        del workers, steps
        hosts = not isinstance(over, str)
        checks.require(hosts, "eager SGD has workers on hosts alone", over=over)
        return eager_sgd(
            over,
            tx,
            mode=self.mode,
            limiter=self.limiter,
            missed=self.missed,
            sync_models_every=self.sync_models_every,
            seed=seed,
        )

    def build(
        self, optimizer: "Optimization", mean: Any, setup: "RunShape"
    ) -> "Method":
        """Returns the method of a run, with late workers as simulated.

        Raises:
          ConfigError: a backward pass or an exchange of its own: rounds have neither.
        """
        from hpcjax import cost
        from hpcjax.averaging import eager_rounds
        from hpcjax.optim import all_reduce_mean

        plain = optimizer.gradients is None and mean is all_reduce_mean
        rule = "eager SGD sums whole gradients itself: no exchange, backward or K-FAC"
        checks.require(plain, rule, optimizer=optimizer.tx, mean=mean)
        run = Run(setup.workers, setup.steps + BEYOND, setup.seed())
        late = self.late or LateConfig()
        seconds = late.step_seconds(run)
        times = cost.simulate_rounds(
            seconds,
            mode=self.mode,
            seconds=late.seconds,
            limiter=self.limiter,
            seed=run.seed,
        )
        return eager_rounds(times.trace(), optimizer, setup)
