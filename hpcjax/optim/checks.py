"""Checks of values that configs and factories share; imports no JAX."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.patterns import check_patterns

# Counters of steps are int32 and learning rates float32 on the devices.
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
    """Raises ConfigError unless every value is an integer in [minimum, 2**31)."""
    for name, value in values.items():
        good = isinstance(value, int) and minimum <= value <= MOST_STEPS
        rule = f"{name} must be an integer >= {minimum} and < 2**31"
        require(good, rule, **{name: value})


def require_rate(**values: Any) -> None:
    """Raises ConfigError unless every learning rate that is not traced can be one.

    Zero can: it leaves the parameters as they are. A rate that float32 would turn into
    zero or infinity can not.
    """
    for name, value in values.items():
        if isinstance(value, int | float):
            good = value == 0 or SMALLEST <= value <= LARGEST
            rule = f"{name} must be finite and >= 0, in the range of float32"
            require(good, rule, **{name: value})


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
    require_rate(lr=lr)
    require_finite(0.0, weight_decay=weight_decay)
    if clip_norm is not None:
        require_positive(clip_norm=clip_norm)


def check_rules(rules: Any, name: str = "decay_rules") -> None:
    """Raises ConfigError unless `rules` are `(regex, chosen)` pairs, and some."""
    pairs = all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in rules)
    rule = f"{name} must be (regex, chosen) pairs, at least one"
    require(bool(rules) and pairs, rule, **{name: rules})
    check_patterns(name, [pattern for pattern, _ in rules])


def check_stacked(stacked: tuple[str, ...], paths: Iterable[str]) -> None:
    """Raises ConfigError unless each of `stacked` is found in one of the paths.

    Without parameters there is nothing to match: so calls `optax.tree_map_params`.
    """
    names = list(paths)
    idle = [rule for rule in stacked if not any(re.search(rule, p) for p in names)]
    good = not idle or not names
    require(good, "stacked must match parameters", stacked=idle)


def check_graft(graft: str, graft_momentum: Any) -> None:
    """Raises ConfigError unless SGD can be grafted, or is not, with these settings."""
    require_choice("graft", graft, ("sgd", "none"))
    require_decay("graft_momentum", graft_momentum)


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
