"""Configs of learning-rate schedules; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import (
    Config,
    Count,
    NotNegative,
    Positive,
    Share,
    Size,
    Within,
)
from hpcjax.core.parts import Part

if TYPE_CHECKING:
    import optax


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptaxConfig(Config):
    """Base of configs of optax's schedules; fields are their function's arguments.

    Rates are multiples of the peak learning rate. Steps are steps of the run.
    """

    factory: ClassVar[str] = "hpcjax.optim.schedules:optax_schedule"
    function: ClassVar[str] = ""

    def make(self, peak: float, steps: int) -> "optax.Schedule":
        """Returns the schedule of a run of `steps` steps."""
        return super().make(peak, steps, self.function)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransitionConfig(OptaxConfig):
    """Base of schedules that go from one rate to another.

    Attributes:
      init_value: the first rate.
      transition_begin: steps before it changes.
      transition_steps: over which it changes; none for the rest of the run.
    """

    init_value: NotNegative = 1.0
    transition_begin: Count = 0
    transition_steps: Size | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(TransitionConfig):
    """A straight line from the peak to zero, or to `end_value`.

    Attributes:
      end_value: the last rate.
    """

    function: ClassVar[str] = "linear_schedule"

    end_value: NotNegative = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolynomialConfig(TransitionConfig):
    """A power of what is left of the run, from the peak to zero, or to `end_value`.

    Attributes:
      end_value: the last rate.
      power: of the polynomial; 1 is `linear`.
    """

    function: ClassVar[str] = "polynomial_schedule"

    end_value: NotNegative = 0.0
    power: Positive = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExponentialConfig(TransitionConfig):
    """The peak multiplied by `decay_rate` in each `transition_steps`.

    Attributes:
      transition_steps: in which it falls by `decay_rate`; none for the rest of the run.
      decay_rate: what the rate is multiplied by.
      staircase: whether it falls at once after `transition_steps`.
      end_value: where it stops.
    """

    function: ClassVar[str] = "exponential_decay"

    decay_rate: Positive = 0.1
    staircase: bool = False
    end_value: NotNegative | None = None


def _are_boundaries(name: str, value: Any) -> None:
    steps = [step for step, _ in value]
    rule = f"{name} must be (step, scale) pairs, at least one, at increasing steps"
    increasing = all(a < b for a, b in zip([-1, *steps], steps, strict=False))
    checks.require(bool(steps) and increasing, rule, **{name: value})


Boundaries = Annotated[tuple[tuple[Count, NotNegative], ...], _are_boundaries]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseConfig(OptaxConfig):
    """The peak multiplied by a scale at each of some steps.

    `stepdecay` has fractions of the run in place of steps.

    Attributes:
      init_value: the first rate.
      boundaries_and_scales: `[[step,scale],...]`; scales multiply each other.
    """

    smoke: ClassVar[Mapping[str, str]] = {"boundaries_and_scales": "[[1,0.5]]"}
    function: ClassVar[str] = "piecewise_constant_schedule"

    init_value: NotNegative = 1.0
    boundaries_and_scales: Boundaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class PiecewiseInterpolateConfig(PiecewiseConfig):
    """From the peak to other rates at given steps, and between them along curves.

    Attributes:
      interpolate_type: the curves.
    """

    function: ClassVar[str] = "piecewise_interpolate_schedule"

    interpolate_type: Literal["linear", "cosine"] = "linear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneCycleConfig(OptaxConfig):
    """Up to the peak and down again, to almost zero, along cosines.

    Attributes:
      transition_steps: of the cycle; none for the run.
      pct_start: the fraction of the cycle after which the peak is reached.
      div_factor: the peak divided by the first rate.
      final_div_factor: the first rate divided by the last.
    """

    function: ClassVar[str] = "cosine_onecycle_schedule"

    transition_steps: Size | None = None
    pct_start: Share = 0.3
    div_factor: Positive = 25.0
    final_div_factor: Positive = 1e4


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearOneCycleConfig(OneCycleConfig):
    """Up to the peak, down again, and then to almost zero, along straight lines.

    Attributes:
      pct_final: the fraction of the cycle after which the first rate is reached again.
    """

    function: ClassVar[str] = "linear_onecycle_schedule"

    pct_final: Share = 0.85


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupCosineConfig(OptaxConfig):
    """A straight line up to the peak, then half a cosine to `end_value`.

    `cosine` with `warmup` is the same but for the first rate, which is not zero.

    Attributes:
      init_value: the first rate.
      warmup_steps: up to the peak; none for a tenth of the run.
      decay_steps: up to the end, warm-up included; none for the run.
      end_value: the last rate.
      exponent: of the cosine.
    """

    function: ClassVar[str] = "warmup_cosine_decay_schedule"

    init_value: NotNegative = 0.0
    warmup_steps: Count | None = None
    decay_steps: Size | None = None
    end_value: NotNegative = 0.0
    exponent: Positive = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmupExponentialConfig(ExponentialConfig):
    """A straight line up to the peak, which is then multiplied by `decay_rate`.

    Attributes:
      warmup_steps: up to the peak; none for a tenth of the run.
    """

    function: ClassVar[str] = "warmup_exponential_decay_schedule"

    init_value: NotNegative = 0.0
    warmup_steps: Count | None = None


# `hpcjax list --parts` names them.
SchedulePart = Annotated[Any, Part("schedule")]
