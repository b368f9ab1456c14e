"""Arrays of a tree in buckets, each of which is sent by a collective of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def fill_buckets(leaves: Sequence[Any], bucket_bytes: int) -> list[list[int]]:
    """Returns the places of leaves in buckets of at most so many bytes, last first.

    The backward pass makes gradients of the last layers first, so that these can be
    sent while it goes on. A bucket holds leaves of one dtype; a leaf that is larger has
    a bucket of its own, and empty ones are in none.

    Args:
      leaves: arrays or shapes, in the order of the layers.
      bucket_bytes: the most bytes of a bucket of several leaves.

    References:
      Li et al., PyTorch Distributed, VLDB 2020, §3.2.3.

    Examples:
      >>> leaves = [np.zeros(n, np.float32) for n in (2, 1, 9, 3)]
      >>> fill_buckets(leaves, 16)
      [[3], [2], [1, 0]]
    """
    buckets: list[list[int]] = []
    last: dict[Any, list[int]] = {}
    free: dict[Any, int] = {}
    for place in reversed(range(len(leaves))):
        dtype = leaves[place].dtype
        size = leaves[place].size * dtype.itemsize
        if not size:
            continue
        if size > free.get(dtype, -1):
            last[dtype], free[dtype] = [], bucket_bytes
            buckets.append(last[dtype])
        last[dtype].append(place)
        free[dtype] -= size
    return buckets


def map_buckets(
    function: Callable[[Any], Any], tree: Any, bucket_bytes: int, xp: Any = jnp
) -> Any:
    """Applies a collective to a tree, one bucket after the other; see `fill_buckets`.

    Args:
      function: takes a vector and returns one as long.
      tree: of arrays; empty ones are returned as they are.
      bucket_bytes: the most bytes of a bucket of several leaves.
      xp: `jax.numpy` or `numpy`.

    Examples:
      >>> tree = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
      >>> found = map_buckets(lambda flat: flat / len(flat), tree, 16)
      >>> found["a"].tolist(), found["b"].tolist()
      ([[0.25, 0.25], [0.25, 0.25]], [0.5, 0.5])
    """
    leaves, structure = jax.tree.flatten(tree)
    done, before = list(leaves), None
    for places in fill_buckets(leaves, bucket_bytes):
        flat = xp.concatenate([leaves[place].reshape(-1) for place in places])
        if before is not None and isinstance(flat, jax.Array):
            flat = _after(flat, before)
        before = function(flat)
        ends = np.cumsum([leaves[place].size for place in places])[:-1].tolist()
        for place, part in zip(places, xp.split(before, ends), strict=True):
            done[place] = part.reshape(leaves[place].shape)
    return structure.unflatten(done)


def _after(flat: jax.Array, before: jax.Array) -> jax.Array:
    """Returns `flat`, which XLA believes to depend on the floating `before`.

    XLA would make one all-reduce of those that do not wait for each other, and it takes
    `jax.lax.optimization_barrier` out before it does so.
    """
    # A truth value has one bit, so that nothing is left of it.
    zero = jnp.isnan(before[0]).astype(jnp.int32) >> 1
    return flat + zero.astype(flat.dtype)
