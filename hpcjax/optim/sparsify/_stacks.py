"""Parameters that are stacks of layers, each of which is pruned by itself.

The part `i` of a stack has the path of the stack and its number, `blocks/kernel/3`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp


def split_shapes(
    shapes: Mapping[str, tuple[int, ...]], stacked: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of parts, by path.

    Examples:
      >>> split_shapes({"a": (2, 3), "b": (4,)}, {"a"})
      {'a/0': (3,), 'a/1': (3,), 'b': (4,)}
    """
    found = {}
    for path, shape in shapes.items():
        if path in stacked:
            found |= {f"{path}/{i}": tuple(shape[1:]) for i in range(shape[0])}
        else:
            found[path] = tuple(shape)
    return found


def split(leaves: Mapping[str, Any], stacked: Collection[str]) -> dict[str, Any]:
    """Returns the parts of arrays, by path."""
    found = {}
    for path, leaf in leaves.items():
        if path in stacked:
            found |= {f"{path}/{i}": leaf[i] for i in range(leaf.shape[0])}
        else:
            found[path] = leaf
    return found


def join(
    parts: Mapping[str, Any], like: Mapping[str, Any], stacked: Collection[str]
) -> dict[str, Any]:
    """Returns the arrays of `like`'s paths and lengths from their parts.

    Examples:
      >>> whole = {"a": jnp.arange(4.0).reshape(2, 2), "b": jnp.ones(1)}
      >>> join(split(whole, {"a"}), whole, {"a"})["a"].tolist()
      [[0.0, 1.0], [2.0, 3.0]]
    """
    return {
        path: _stack([parts[f"{path}/{i}"] for i in range(leaf.shape[0])], leaf)
        if path in stacked
        else parts[path]
        for path, leaf in like.items()
    }


def _stack(parts: list[Any], like: Any) -> Any:
    """Returns the parts one after the other; none of an empty stack."""
    return jnp.stack(parts) if parts else jnp.zeros(like.shape, bool)
