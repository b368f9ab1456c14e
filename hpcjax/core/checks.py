"""Checks of values in configs and arguments; imports no JAX."""

import math
import numbers
import reprlib
from collections.abc import Sequence
from typing import Any

from hpcjax.core.errors import ConfigError, nearest

# On devices, counters of steps are int32 and learning rates float32. SMALLEST is the
# least normal float32; devices may flush smaller numbers to zero.
MOST_STEPS = 2**31 - 1
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127


def require(condition: bool, rule: str, **values: Any) -> None:
    """Raises ConfigError with the rule and the values unless `condition` holds.

    Examples:
      >>> require(0.5 > 0, "density must be positive", density=0.5)
    """
    if not condition:
        got = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(f"{rule}: got {got}")


def is_plain(value: Any) -> bool:
    """Returns whether a value is a real number of Python or NumPy, to be compared.

    Examples:
      >>> is_plain(0.5), is_plain("0.5")
      (True, False)
    """
    return isinstance(value, numbers.Real)


def require_has(what: str, attributes: Sequence[str], **values: Any) -> None:
    """Raises ConfigError, "inner must be `what`", unless all have the attributes.

    Examples:
      >>> require_has("a number", ("real", "imag"), length=3)
    """
    for name, value in values.items():
        if not all(hasattr(value, each) for each in attributes):
            got = reprlib.repr(value)
            raise ConfigError(f"{name} must be {what}: got {name}={got}")


def require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError naming the nearest choice unless `value` is one of them."""
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {allowed}: got {value!r}"
            f"{nearest(str(value), allowed)}"
        )


def require_same_shape(**arrays: Any) -> None:
    """Raises ConfigError with their shapes unless arrays have the same shape.

    What is compared place by place must not be broadcast: one longitude of a truth
    would be that of all.

    Examples:
      >>> require_same_shape(forecast=1.0, truth=2.0)
    """
    shapes = {name: getattr(value, "shape", ()) for name, value in arrays.items()}
    if len({*shapes.values()}) > 1:
        told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ConfigError(f"{' and '.join(shapes)} must have one shape: got {told}")


def require_on_grid(name: str, value: float, grid: Sequence[float]) -> None:
    """Raises ConfigError naming the nearest two unless `value` is one of a grid.

    Examples:
      >>> require_on_grid("batch", 4, [1, 2, 4])
    """
    if value not in grid:
        near = sorted(sorted(grid, key=lambda each: abs(each - value))[:2])
        told = " and ".join(f"{each:g}" for each in near)
        raise ConfigError(f"{name}={value} is not on the grid: the nearest are {told}")


def require_finite(minimum: float = -math.inf, **values: Any) -> None:
    """Raises ConfigError unless every value is finite and at least `minimum`.

    Traced values, which `optax.inject_hyperparams` passes, are not checked; those of
    NumPy are.
    """
    for name, value in values.items():
        if is_plain(value):
            good = math.isfinite(value) and value >= minimum
            rule = "finite" if minimum == -math.inf else f"finite and >= {minimum:g}"
            require(good, f"{name} must be {rule}", **{name: value})


def require_positive(**values: Any) -> None:
    """Raises ConfigError unless every value that is not traced is finite and > 0."""
    for name, value in values.items():
        if is_plain(value):
            good = math.isfinite(value) and value > 0
            require(good, f"{name} must be finite and > 0", **{name: value})


def require_count(minimum: int, **values: Any) -> None:
    """Raises ConfigError unless every value is an integer in [minimum, 2**31)."""
    for name, value in values.items():
        good = isinstance(value, int) and minimum <= value <= MOST_STEPS
        rule = f"{name} must be an integer >= {minimum} and < 2**31"
        require(good, rule, **{name: value})


def require_float32(**values: Any) -> None:
    """Raises ConfigError unless every value is zero or a positive float32.

    Other values below the least normal float32, or above the largest, are refused.
    Traced values and schedules are not checked, but that they are none else.
    """
    for name, value in values.items():
        if not is_plain(value):
            known = callable(value) or hasattr(value, "dtype")
            require(known, f"{name} must be a number or a schedule", **{name: value})
        else:
            good = value == 0 or SMALLEST <= value <= LARGEST
            rule = f"{name} must be finite and >= 0, in the range of float32"
            require(good, rule, **{name: value})
