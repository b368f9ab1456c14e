"""Pytrees addressed by path, and values chosen by (regex, value) rules."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from hpcjax.core.errors import ConfigError
from hpcjax.core.patterns import check_patterns

SEPARATOR = "/"


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns `{path: leaf}` in the tree's order, paths such as `"block/0/kernel"`.

    Args:
      tree: any tree.
      is_leaf: says of a node whether it is not to be entered.

    Examples:
      >>> flatten({"dense": {"kernel": 1, "bias": 2}})
      {'dense/bias': 2, 'dense/kernel': 1}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {path_of(path): leaf for path, leaf in leaves}


def path_of(keys: Iterable[Any]) -> str:
    """Returns the path of a leaf from JAX's key entries."""
    return jax.tree_util.keystr(tuple(keys), simple=True, separator=SEPARATOR)


def unflatten(like: Any, leaves: dict[str, Any]) -> Any:
    """Puts `leaves`, keyed as `flatten` does, into the structure of `like`.

    Raises:
      KeyError: a path is missing or left over; the message lists both kinds.
    """
    names = list(flatten(like))
    missing = [name for name in names if name not in leaves]
    extra = sorted(set(leaves) - set(names))
    if missing or extra:
        raise KeyError(f"paths differ: missing {missing}, not in the tree {extra}")
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, [leaves[name] for name in names])


def choose(
    rules: Sequence[tuple[str, Any]], names: Iterable[str], what: str = "parameter"
) -> dict[str, Any]:
    """Returns `{name: value}` by the first rule whose regex is found in the name.

    Args:
      rules: `(regex, value)` pairs, matched with `re.search`, first match wins.
      names: the paths to cover.
      what: what a name stands for, used in messages.

    Raises:
      ConfigError: a rule that is no regex or matches no name, or a name that no rule
        matches.

    Examples:
      >>> choose([("bias", 0.0), (".*", 1e-4)], ["dense/bias", "dense/kernel"])
      {'dense/bias': 0.0, 'dense/kernel': 0.0001}
    """
    check_patterns("rules", [pattern for pattern, _ in rules])
    names = list(names)
    chosen, used = {}, set()
    for name in names:
        for number, (pattern, value) in enumerate(rules):
            if re.search(pattern, name):
                chosen[name] = value
                used.add(number)
                break
    idle = [
        rule[0]
        for number, rule in enumerate(rules)
        if number not in used and not any(re.search(rule[0], name) for name in names)
    ]
    if idle:
        raise ConfigError(f"rules that match no {what}: {idle}; {what}s: {names}")
    uncovered = [name for name in names if name not in chosen]
    if uncovered:
        raise ConfigError(f"{what}s matched by no rule: {uncovered}")
    return chosen


def choose_tree(rules: Sequence[tuple[str, Any]], tree: Any) -> Any:
    """Returns a tree like `tree` whose leaves are the values the rules choose."""
    return unflatten(tree, choose(rules, flatten(tree)))


def num_params(tree: Any) -> int:
    """Returns the number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays or `ShapeDtypeStruct`s."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
