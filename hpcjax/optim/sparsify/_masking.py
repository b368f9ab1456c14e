"""What all transforms that mask have in common: state, draws, updates, moments.

In a state the masks are a tree like the parameters, in which a scalar that is true is
the mask of a parameter that is not pruned: so optax takes it for a copy of the
parameters, which can be split, masked and mapped as any other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from hpcjax.core import masks, trees
from hpcjax.core.errors import ConfigError


class MaskedState(NamedTuple):
    """State of a transform that prunes.

    Attributes:
      masks: see this module; packed into bytes, if that was asked for.
      memory: of the score, see `Accumulated`.
      count: the number of steps taken.
      inner: the state of the wrapped optimizer.
    """

    masks: Any
    memory: Any
    count: Any
    inner: Any


def get_masks(state: Any, params: Any) -> Any:
    """Returns the masks in an optimizer's state, None for what is not pruned.

    Args:
      state: of an optimizer that has a transform of this room in it, once.
      params: the parameters.

    Raises:
      ConfigError: there is none, or more than one.
    """
    found = [
        node
        for node in jax.tree.leaves(state, is_leaf=_is_state)
        if isinstance(node, MaskedState)
    ]
    if len(found) != 1:
        raise ConfigError(
            f"a state must have one transform that prunes: got {len(found)}"
        )
    return hide_unpruned(read_masks(found[0].masks, params))


def _is_state(node: Any) -> bool:
    return isinstance(node, MaskedState)


def fill_masks(params: Any, kept: dict[str, Any]) -> Any:
    """Returns the masks of a state from those of the pruned parameters, by path."""
    return trees.unflatten(
        params,
        {path: kept.get(path, jnp.ones((), bool)) for path in trees.flatten(params)},
    )


def mask_tree(params: Any, kept: dict[str, Any]) -> Any:
    """Returns masks with None for what is not pruned, from those that are, by path."""
    return hide_unpruned(fill_masks(params, kept))


def hide_unpruned(tree: Any) -> Any:
    """Returns the masks of a state with None for what is not pruned."""
    return jax.tree.map(lambda mask: mask if mask.ndim else None, tree)


def store_masks(tree: Any, packed: bool) -> Any:
    """Returns masks as a state keeps them."""
    return jax.tree.map(masks.pack, tree) if packed else tree


def read_masks(stored: Any, params: Any) -> Any:
    """Returns masks that a state keeps, unpacked.

    Where the transform was not given parameters, as inside `optax.masked`, it prunes
    none.
    """

    def read(mask: Any, part: Any) -> Any:
        if _is_masked_node(mask):
            return jax.tree.map(lambda _: jnp.ones((), bool), part)
        packed = mask.dtype == jnp.uint8
        return masks.unpack(mask, part.shape) if packed else mask

    return jax.tree.map(read, stored, params, is_leaf=_is_masked_node)


def mask_updates(kept: Any, updates: Any, params: Any) -> Any:
    """Returns updates after which parameters are exactly zero where they are pruned.

    w + (−w) is zero in any dtype, even if the update is not a number there.
    """

    def fit(mask: Any, update: Any, weights: Any) -> Any:
        return jnp.where(mask, update, -weights.astype(update.dtype))

    return jax.tree.map(fit, kept, updates, params)


def reset_moments(
    inner: optax.GradientTransformation, state: Any, kept: Any, params: Any
) -> Any:
    """Returns an optimizer's state with zeros, where `kept` is false, in all moments.

    What has the shape of its parameter in what optax takes for copies of parameters is
    a moment.
    """

    def reset(leaf: Any, mask: Any, weights: Any) -> Any:
        if _is_masked_node(leaf) or leaf.shape != weights.shape:
            return leaf
        return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))

    initable: Any = inner
    return optax.tree_map_params(
        initable, reset, state, kept, params, is_leaf=_is_masked_node
    )


def _is_masked_node(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def find_change(steps: np.ndarray, count: Array) -> tuple[Array, Array]:
    """Returns whether masks change in a step, and the number of the last change."""
    passed = jnp.sum(steps <= count, dtype=jnp.int32)
    return jnp.any(steps == count), jnp.maximum(passed - 1, 0)


def require_params(params: Any) -> None:
    """Raises ValueError unless `update` was given the parameters."""
    if params is None:
        raise ValueError("params must be given to update: what is pruned is set to 0")
