"""Configs of learning-rate schedules; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, ClassVar

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Share, Within


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUpConfig(Config):
    """Base of schedules' configs; `make(peak, steps)` returns the schedule of a run.

    Attributes:
      warmup: steps over which the rate rises linearly to its peak.
    """

    warmup: Count = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantConfig(WarmUpConfig):
    """The peak learning rate throughout, after a linear warm-up."""

    factory: ClassVar[str] = "hpcjax.optim.schedules:constant_schedule"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig(WarmUpConfig):
    """Half a cosine from the peak to `final` times the peak.

    Attributes:
      final: the last rate as a fraction of the peak.
    """

    factory: ClassVar[str] = "hpcjax.optim.schedules:cosine_schedule"

    final: Annotated[float, Within("[0, 1]")] = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDecayConfig(WarmUpConfig):
    """The peak multiplied by `factor` at each of the given fractions of the run.

    Attributes:
      factor: what the rate is multiplied by.
      at: fractions of the run, increasing, in (0, 1).
    """

    factory: ClassVar[str] = "hpcjax.optim.schedules:step_decay_schedule"

    factor: Annotated[float, Within("(0, 1]")] = 0.1
    at: tuple[Share, ...] = (1 / 3, 2 / 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        increasing = all(a < b for a, b in zip(self.at, self.at[1:], strict=False))
        checks.require(increasing, "at must increase", at=self.at)


ScheduleConfig = ConstantConfig | CosineConfig | StepDecayConfig
