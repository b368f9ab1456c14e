"""Checks of what optimizers can be told; imports no JAX."""

from collections.abc import Mapping
from typing import Any

from hpcjax.core import checks
from hpcjax.core.patterns import check_patterns


def check_sizes(max_dim: int, block_size: int | None) -> None:
    """Raises ConfigError unless the sizes of preconditioners are positive."""
    checks.require_count(1, max_dim=max_dim)
    if block_size is not None:
        checks.require_count(1, block_size=block_size)


def check_common(lr: Any, weight_decay: Any, clip_norm: Any) -> None:
    """Raises ConfigError for values that no optimizer of this room accepts."""
    checks.require_float32(lr=lr)
    checks.require_finite(0.0, weight_decay=weight_decay)
    if clip_norm is not None:
        checks.require_positive(clip_norm=clip_norm)


def check_rules(rules: Any, name: str = "decay_rules") -> None:
    """Raises ConfigError unless `rules` are `(regex, chosen)` pairs, and some."""
    pairs = all(isinstance(rule, tuple | list) and len(rule) == 2 for rule in rules)
    rule = f"{name} must be (regex, chosen) pairs, at least one"
    checks.require(bool(rules) and pairs, rule, **{name: rules})
    check_patterns(name, [pattern for pattern, _ in rules])


def check_graft(graft: str, graft_momentum: Any) -> None:
    """Raises ConfigError unless SGD can be grafted, or is not, with these settings."""
    checks.require_choice("graft", graft, ("sgd", "none"))
    checks.require_decay("graft_momentum", graft_momentum)


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
