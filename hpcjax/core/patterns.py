"""Checks of regular expressions over paths, before anything is matched with them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hpcjax.core.errors import ConfigError


def check_patterns(name: str, patterns: Iterable[str]) -> None:
    """Raises ConfigError with the first of `patterns` that is no regular expression.

    Args:
      name: the field they come from, used in the message.
      patterns: the regexes; a single string is refused, since each of its letters
        would be taken for a regex.

    Examples:
      >>> check_patterns("stacked", ("^blocks/", "bias$"))
    """
    if isinstance(patterns, str):
        raise ConfigError(f"{name} must be a list of regexes: got {patterns!r}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError, TypeError) as error:
            raise ConfigError(
                f"{name} must hold regular expressions: got {pattern!r}: {error}"
            ) from error


def matches_any(patterns: Iterable[str], path: str) -> bool:
    """Says whether one of the regexes is found in a path.

    Examples:
      >>> matches_any(("^blocks/", "bias$"), "head/bias")
      True
    """
    return any(re.search(pattern, path) for pattern in patterns)


def check_stacked(stacked: tuple[str, ...], paths: Iterable[str]) -> None:
    """Raises ConfigError unless each of `stacked` is found in one of the paths.

    An empty tree is accepted: `optax.tree_map_params` calls `init` without parameters.
    """
    names = list(paths)
    idle = [rule for rule in stacked if not any(re.search(rule, p) for p in names)]
    if idle and names:
        raise ConfigError(f"stacked must match parameters: got stacked={idle!r}")


def check_pruned(shapes: Mapping[str, Any], pruned: Iterable[bool]) -> None:
    """Raises ConfigError if there are parameters, and none of them is pruned.

    Training would be that of the dense network, with masks of nothing.

    Args:
      shapes: of the parameters, by path.
      pruned: whether each of them is.

    Examples:
      >>> check_pruned({"kernel": (2, 2), "bias": (2,)}, (True, False))
    """
    if shapes and not any(pruned):
        raise ConfigError(
            "none of the parameters is pruned: by default those of two or more axes "
            "are, and those that others are made of, such as stores, have one; got "
            f"{dict(shapes)}"
        )
