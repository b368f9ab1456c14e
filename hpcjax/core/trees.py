"""Pytrees addressed by path, and values chosen by (regex, value) rules."""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from hpcjax.core.errors import ConfigError
from hpcjax.core.patterns import check_patterns

SEPARATOR = "/"


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns `{path: leaf}` in the tree's order, paths such as `"block/0/kernel"`.

    An array in a box of flax (a variable of `flax.nnx`, a value with metadata of
    `flax.linen`) has the path of the box. So the paths are the same in `init`, which
    `nnx.Optimizer` calls with variables, and in `update`, called with their values.

    Args:
      tree: any tree.
      is_leaf: says whether a node is a leaf although it has children.

    Examples:
      >>> flatten({"dense": {"kernel": 1, "bias": 2}})
      {'dense/bias': 2, 'dense/kernel': 1}
    """

    def is_whole(node: Any) -> bool:
        return is_leaf is not None and is_leaf(node)

    def stops(node: Any) -> bool:
        return is_whole(node) or _is_box(node)

    leaves = {}
    for place, node in _with_keys(tree, stops):
        entered = _is_box(node) and not is_whole(node)
        for keys, leaf in _with_keys(node, None) if entered else [((), node)]:
            # The first key is the box's own, `value`.
            leaves[path_of((*place, *keys[1:]))] = leaf
    return leaves


def paths(tree: Any) -> list[str]:
    """Returns the paths of leaves and of those that `optax.masked` has removed.

    Rules are checked against these paths. So the same rules are valid for a whole tree
    and for each of the parts that `optax.partition` makes of it.

    Examples:
      >>> import optax
      >>> paths({"bias": optax.MaskedNode(), "kernel": 1})
      ['bias', 'kernel']
    """
    return list(flatten(tree, _is_masked))


def _with_keys(
    tree: Any, is_leaf: Callable[[Any], bool] | None
) -> list[tuple[tuple[Any, ...], Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]


def _is_box(node: Any) -> bool:
    """Says whether a node is a box of flax, by its methods: flax is not imported."""
    return hasattr(type(node), "get_value") or hasattr(type(node), "unbox")


def _is_masked(node: Any) -> bool:
    """Says whether a node is an `optax.MaskedNode`: a named tuple without fields."""
    return isinstance(node, tuple) and getattr(node, "_fields", None) == ()


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
    rules: Sequence[tuple[str, Any]],
    names: Iterable[str],
    what: str = "parameter",
    others: Iterable[str] = (),
) -> dict[str, Any]:
    """Returns `{name: value}` by the first rule whose regex is found in the name.

    Args:
      rules: `(regex, value)` pairs, matched with `re.search`, first match wins.
      names: the paths to cover.
      what: word for a name in messages.
      others: further names that make a rule valid; they get no value.

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
    known = [*names, *others]
    idle = [
        rule[0]
        for number, rule in enumerate(rules)
        if number not in used and not any(re.search(rule[0], name) for name in known)
    ]
    if idle:
        raise ConfigError(f"rules that match no {what}: {idle}; {what}s: {names}")
    uncovered = [name for name in names if name not in chosen]
    if uncovered:
        raise ConfigError(f"{what}s matched by no rule: {uncovered}")
    return chosen


def choose_tree(rules: Sequence[tuple[str, Any]], tree: Any) -> Any:
    """Returns a tree like `tree` whose leaves are the values the rules choose.

    A rule may match only leaves that `optax.masked` has removed.
    """
    return unflatten(tree, choose(rules, flatten(tree), others=paths(tree)))


def signature(tree: Any) -> Hashable:
    """Returns what a program that is compiled for these arrays depends on.

    That is the structure, and of each array the shape, dtype and sharding.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves)


def shapes(tree: Any) -> Hashable:
    """Returns the structure, and the shape and dtype of each array."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def num_params(tree: Any) -> int:
    """Returns the number of scalars in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_bytes(tree: Any) -> int:
    """Returns the bytes of a tree of arrays or `ShapeDtypeStruct`s."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
