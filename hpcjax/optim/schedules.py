"""Learning-rate schedules: constant, cosine, step decay with warm-up, and optax's."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.optim.schedule_config import (
    ConstantConfig,
    CosineConfig,
    StepDecayConfig,
)


def _check(
    peak: float, steps: int, settings: ConstantConfig | CosineConfig | StepDecayConfig
) -> None:
    """Checks the arguments that a schedule's config does not have."""
    checks.require_float32(peak=peak)
    checks.require_count(1, steps=steps)
    checks.require(
        settings.warmup < steps,
        "warmup must be in [0, steps)",
        warmup=settings.warmup,
        steps=steps,
    )


def _warm_up(after: optax.Schedule, peak: float, warmup: int) -> optax.Schedule:
    """Returns peak·(t + 1)/warmup for t < warmup, which is never zero, then `after`."""

    def schedule(count):
        # t + 1, not t: with a rate of zero the first batch would be wasted. Both
        # branches are evaluated, hence the maximum for warmup = 0.
        step = jnp.asarray(count).astype(jnp.float32)
        rising = peak * (step + 1) / max(warmup, 1)
        return jnp.where(step < warmup, rising, after(step))

    return schedule


def constant_schedule(peak: float, steps: int, warmup: int = 0) -> optax.Schedule:
    """Returns `peak` at every step after a linear warm-up.

    Args:
      peak: the learning rate.
      steps: length of the run; only checked against `warmup`.
      warmup: steps of the linear rise peak·(t+1)/warmup.

    Raises:
      ConfigError: a value out of its range.

    Examples:
      >>> rate = constant_schedule(1.0, steps=10, warmup=4)
      >>> [float(rate(t)) for t in (0, 1, 3, 9)]
      [0.25, 0.5, 1.0, 1.0]
    """
    _check(peak, steps, ConstantConfig(warmup=warmup))
    return _warm_up(lambda step: jnp.full_like(step, peak), peak, warmup)


def cosine_schedule(
    peak: float, steps: int, warmup: int = 0, final: float = 0.0
) -> optax.Schedule:
    """Returns half a cosine from `peak` at the end of the warm-up to `final`·`peak`.

    With u = (t − warmup)/(steps − warmup): peak·(final + (1 − final)(1 + cos πu)/2).

    Args:
      peak: the learning rate after the warm-up.
      steps: length of the run.
      warmup: steps of the linear rise peak·(t+1)/warmup.
      final: the last rate as a fraction of the peak.

    Raises:
      ConfigError: a value out of its range.

    Examples:
      >>> rate = cosine_schedule(1.0, steps=10)
      >>> [round(float(rate(t)), 3) for t in (0, 5, 10)]
      [1.0, 0.5, 0.0]
    """
    _check(peak, steps, CosineConfig(warmup=warmup, final=final))

    def after(step):
        done = jnp.clip((step - warmup) / (steps - warmup), 0.0, 1.0)
        return peak * (final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * done)))

    return _warm_up(after, peak, warmup)


def decay_steps(steps: int, at: Sequence[float]) -> tuple[int, ...]:
    """Returns the steps at which a step-decay schedule of a run of `steps` falls.

    Examples:
      >>> decay_steps(90, (1 / 3, 2 / 3))
      (30, 60)
    """
    return tuple(round(fraction * steps) for fraction in at)


def step_decay_schedule(
    peak: float,
    steps: int,
    warmup: int = 0,
    factor: float = 0.1,
    at: tuple[float, ...] = (1 / 3, 2 / 3),
) -> optax.Schedule:
    """Returns `peak` multiplied by `factor` at each fraction `at` of the run.

    Args:
      peak: the learning rate after the warm-up.
      steps: length of the run.
      warmup: steps of the linear rise peak·(t+1)/warmup.
      factor: what the rate is multiplied by.
      at: fractions of the run at which it falls.

    Raises:
      ConfigError: a value out of its range.

    Examples:
      >>> rate = step_decay_schedule(1.0, steps=90)
      >>> [round(float(rate(t)), 3) for t in (29, 30, 60)]
      [1.0, 0.1, 0.01]
    """
    _check(peak, steps, StepDecayConfig(warmup=warmup, factor=factor, at=at))
    falls = jnp.asarray(decay_steps(steps, at), jnp.float32)

    def after(step):
        # The number of falls at or before this step, for a scalar step or an array.
        passed = jnp.sum(step[..., None] >= falls, axis=-1).astype(jnp.float32)
        return peak * factor**passed

    return _warm_up(after, peak, warmup)


def optax_schedule(
    peak: float, steps: int, function: str, **arguments: Any
) -> optax.Schedule:
    """Returns `peak` times a schedule of optax.

    Args:
      peak: the learning rate for which the schedule is 1.
      steps: length of the run.
      function: of optax, by name.
      **arguments: of that function, where rates are multiples of `peak`. Its
        `peak_value` is 1. None for `decay_steps` or `transition_steps` is what is left
        of the run, None for `warmup_steps` is a tenth of it.

    Raises:
      ConfigError: a run that is too short, or a value that optax refuses.

    Examples:
      >>> rate = optax_schedule(
      ...   0.5, 10, "linear_schedule", init_value=1.0, end_value=0.0,
      ...   transition_steps=None,
      ... )
      >>> [float(rate(step)) for step in (0, 5, 10)]
      [0.5, 0.25, 0.0]
    """
    checks.require_float32(peak=peak)
    checks.require_count(1, steps=steps)
    make = getattr(optax, function)
    given = _fill_lengths(arguments, steps)
    if "peak_value" in inspect.signature(make).parameters:
        given["peak_value"] = 1.0
    if "boundaries_and_scales" in given:
        given["boundaries_and_scales"] = dict(given["boundaries_and_scales"])
    try:
        schedule = make(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{function}: {error}: got {given}") from error
    return lambda count: peak * schedule(count)


def _fill_lengths(arguments: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Returns a schedule's arguments with its lengths in place of None."""
    given = dict(arguments)
    if given.get("warmup_steps", 0) is None:
        given["warmup_steps"] = steps // 10
    before = given.get("transition_begin", 0) + given.get("warmup_steps", 0)
    checks.require(
        before < steps, "a schedule must begin within the run", step=before, steps=steps
    )
    if given.get("decay_steps", 0) is None:
        given["decay_steps"] = steps
    if given.get("transition_steps", 0) is None:
        given["transition_steps"] = steps - before
    return given
