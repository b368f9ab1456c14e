"""Parameters that are stored in another form and become arrays where they are used.

A model takes a `Deferred` in the place of any parameter. Its layers outside of stacks
get the array when the model is applied; a scanned stack is given the stored form, of
which the body of the scan makes the array of one block at a time.
"""

import abc
from typing import Any

import jax


class Deferred(abc.ABC):
    """A stored parameter; a subclass is a pytree, whose arrays a scan can slice."""

    @abc.abstractmethod
    def realize(self) -> jax.Array:
        """Returns the parameter."""


def is_deferred(node: Any) -> bool:
    """Says whether a node of a tree is a `Deferred`."""
    return isinstance(node, Deferred)


def realize(tree: Any) -> Any:
    """Replaces each `Deferred` in a tree by its array; nothing else changes.

    Examples:
      >>> realize({"kernel": 3.0})
      {'kernel': 3.0}
    """
    return jax.tree.map(
        lambda node: node.realize() if is_deferred(node) else node,
        tree,
        is_leaf=is_deferred,
    )
