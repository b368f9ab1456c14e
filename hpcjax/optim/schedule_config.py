"""Configs of learning rates over a run; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING

from hpcjax.core import checks

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantConfig:
    """The peak learning rate throughout, after a linear warm-up.

    Attributes:
      warmup: steps over which the rate rises linearly to its peak.
    """

    warmup: int = 0

    def __post_init__(self) -> None:
        checks.require_count(0, warmup=self.warmup)

    def make(self, peak: float, steps: int) -> "optax.Schedule":
        """Returns the schedule for a run of `steps` steps."""
        from hpcjax.optim import schedules

        return schedules.constant_schedule(peak, steps, warmup=self.warmup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CosineConfig:
    """Half a cosine from the peak to `final` times the peak.

    Attributes:
      warmup: steps over which the rate rises linearly to its peak.
      final: the last rate as a fraction of the peak.
    """

    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        checks.require_count(0, warmup=self.warmup)
        checks.require(
            0 <= self.final <= 1, "final must be in [0, 1]", final=self.final
        )

    def make(self, peak: float, steps: int) -> "optax.Schedule":
        """Returns the schedule for a run of `steps` steps."""
        from hpcjax.optim import schedules

        return schedules.cosine_schedule(
            peak, steps, warmup=self.warmup, final=self.final
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDecayConfig:
    """The peak multiplied by `factor` at each of the given fractions of the run.

    Attributes:
      warmup: steps over which the rate rises linearly to its peak.
      factor: what the rate is multiplied by.
      at: fractions of the run, increasing, in (0, 1).
    """

    warmup: int = 0
    factor: float = 0.1
    at: tuple[float, ...] = (1 / 3, 2 / 3)

    def __post_init__(self) -> None:
        checks.require_count(0, warmup=self.warmup)
        checks.require(
            0 < self.factor <= 1, "factor must be in (0, 1]", factor=self.factor
        )
        increasing = all(a < b for a, b in zip(self.at, self.at[1:], strict=False))
        inside = all(0 < a < 1 for a in self.at)
        checks.require(
            increasing and inside, "at must increase inside (0, 1)", at=self.at
        )

    def make(self, peak: float, steps: int) -> "optax.Schedule":
        """Returns the schedule for a run of `steps` steps."""
        from hpcjax.optim import schedules

        return schedules.step_decay_schedule(
            peak, steps, warmup=self.warmup, factor=self.factor, at=self.at
        )
