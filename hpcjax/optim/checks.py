"""Checks of values that configs and factories share; imports no JAX."""

import math
from collections.abc import Mapping
from typing import Any

from hpcjax.core.errors import ConfigError, nearest


def require(condition: bool, rule: str, **values: Any) -> None:
    """Raises ConfigError with the rule and the values unless `condition` holds.

    Examples:
      >>> require(0.5 > 0, "density must be positive", density=0.5)
    """
    if not condition:
        got = ", ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(f"{rule}: got {got}")


def require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError naming the nearest choice unless `value` is one of them."""
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {allowed}: got {value!r}"
            f"{nearest(str(value), allowed)}"
        )


def require_finite(minimum: float = -math.inf, **values: Any) -> None:
    """Raises ConfigError unless every value is finite and at least `minimum`.

    Traced values, which `optax.inject_hyperparams` passes, are not looked at.
    """
    for name, value in values.items():
        if isinstance(value, int | float):
            good = math.isfinite(value) and value >= minimum
            rule = "finite" if minimum == -math.inf else f"finite and >= {minimum:g}"
            require(good, f"{name} must be {rule}", **{name: value})


def require_positive(**values: Any) -> None:
    """Raises ConfigError unless every value that is not traced is finite and > 0."""
    for name, value in values.items():
        if isinstance(value, int | float):
            good = math.isfinite(value) and value > 0
            require(good, f"{name} must be finite and > 0", **{name: value})


def require_count(minimum: int, **values: Any) -> None:
    """Raises ConfigError unless every value is an integer of at least `minimum`."""
    for name, value in values.items():
        good = isinstance(value, int) and value >= minimum
        require(good, f"{name} must be an integer >= {minimum}", **{name: value})


def require_decay(name: str, value: Any) -> None:
    """Raises ConfigError unless a decay rate is in [0, 1)."""
    if isinstance(value, int | float):
        require(0 <= value < 1, f"{name} must be in [0, 1)", **{name: value})


def check_sizes(max_dim: int, block_size: int | None) -> None:
    """Raises ConfigError unless the sizes of preconditioners are positive."""
    require_count(1, max_dim=max_dim)
    if block_size is not None:
        require_count(1, block_size=block_size)


def check_common(lr: Any, weight_decay: Any, clip_norm: Any) -> None:
    """Raises ConfigError for values that no optimizer of this room accepts."""
    require_finite(0.0, lr=lr, weight_decay=weight_decay)
    if clip_norm is not None:
        require_positive(clip_norm=clip_norm)


def keyword_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a factory got as `**options`.

    `optax.inject_hyperparams` passes such a dictionary on under its own name.

    Examples:
      >>> keyword_options({"order": 1}), keyword_options({"options": {"order": 1}})
      ({'order': 1}, {'order': 1})
    """
    return {
        **given.get("options", {}),
        **{k: given[k] for k in given if k != "options"},
    }
