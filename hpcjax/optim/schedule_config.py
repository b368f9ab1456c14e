"""Configs of learning-rate schedules; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, get_args

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


# The functions of optax that return a schedule for numbers. Listed here, as importing
# optax would start JAX.
OptaxName = Literal[
    "constant_schedule",
    "cosine_decay_schedule",
    "cosine_onecycle_schedule",
    "exponential_decay",
    "linear_onecycle_schedule",
    "linear_schedule",
    "piecewise_constant_schedule",
    "piecewise_interpolate_schedule",
    "polynomial_schedule",
    "warmup_constant_schedule",
    "warmup_cosine_decay_schedule",
    "warmup_exponential_decay_schedule",
]
OPTAX_NAMES: tuple[str, ...] = get_args(OptaxName)


def _are_arguments(name: str, value: Any) -> None:
    keys = [key for key, _ in value]
    rule = f"{name} must name each argument once"
    checks.require(len(set(keys)) == len(keys), rule, **{name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptaxConfig(Config):
    """A schedule of optax, with the peak learning rate as the unit of its values.

    `optimizer.schedule=optax optimizer.schedule.name=cosine_onecycle_schedule
    optimizer.schedule.arguments=[[peak_value,1.0],[pct_start,0.2]]`

    Attributes:
      name: the function of optax.
      arguments: `(name, value)` pairs. Values of the schedule are multiples of the peak
        rate, so that 1.0 is the peak; numbers of steps are steps of the run, and
        `decay_steps` or `transition_steps`, where the function needs it, is the whole
        run unless given. `boundaries_and_scales` is of pairs (step, scale).
    """

    factory: ClassVar[str] = "hpcjax.optim.schedules:optax_schedule"

    name: OptaxName = "constant_schedule"
    arguments: Annotated[
        tuple[
            tuple[str, bool | int | float | str | tuple[tuple[int, float], ...]], ...
        ],
        _are_arguments,
    ] = (("value", 1.0),)


ScheduleConfig = ConstantConfig | CosineConfig | StepDecayConfig | OptaxConfig
