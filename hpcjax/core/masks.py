"""Masks of pruned parameters: choosing them from scores, and applying them.

Masks are values: a tree like the parameters, with a bool array for each pruned
parameter, true where it is kept, and None for the others. Everything here is made of
comparisons and counts, so that a sharded parameter has a mask of the same sharding, and
the same one as on a single device.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from hpcjax.core import checks, trees
from hpcjax.core.bisection import find_largest
from hpcjax.core.errors import ConfigError
from hpcjax.core.structures import NM, Structure

LARGEST_LEAF = 2**31
Count = int | Int[Array, ""]


def map_masks(function: Callable[..., Any], masks: Any, *others: Any) -> Any:
    """Maps `function(mask, *others)`; the mask of an unpruned parameter is None."""
    return jax.tree.map(function, masks, *others, is_leaf=lambda mask: mask is None)


def apply(params: Any, masks: Any) -> Any:
    """Returns the parameters with zeros, of either sign never, where they are pruned.

    Examples:
      >>> params = {"b": jnp.ones(1), "w": jnp.array([-1.0, jnp.nan])}
      >>> apply(params, {"b": None, "w": jnp.array([True, False])})["w"].tolist()
      [-1.0, 0.0]
    """

    def keep(mask: Any, leaf: Any) -> Any:
        return leaf if mask is None else jnp.where(mask, leaf, 0)

    return map_masks(keep, masks, params)


def pack(mask: Bool[Array, "*shape"]) -> Shaped[Array, "*packed"]:
    """Returns a mask with eight entries of the last axis in a byte; a scalar as it is.

    Examples:
      >>> pack(jnp.array([[True, False, True]])).tolist()
      [[160]]
    """
    return jnp.packbits(mask, axis=-1) if mask.ndim else mask


def unpack(packed: Shaped[Array, "*packed"], shape: tuple[int, ...]) -> Any:
    """Returns the mask of this shape that was packed.

    Examples:
      >>> unpack(pack(jnp.array([True, False, True])), (3,)).tolist()
      [True, False, True]
    """
    if not shape:
        return packed
    return jnp.unpackbits(packed, axis=-1, count=shape[-1]).astype(bool)


def count_true(masks: Any) -> dict[str, Any]:
    """Returns the number of kept weights of each pruned parameter, by path.

    Examples:
      >>> {k: int(v) for k, v in count_true({"w": jnp.array([True, False])}).items()}
      {'w': 1}
    """
    return {path: count(mask) for path, mask in trees.flatten(masks).items()}


def choose(
    structure: Structure,
    scores: Any,
    counts: Mapping[str, Count] | Count,
    rescale: Callable[[Array], Array] | None = None,
    *,
    at_least: int = 1,
) -> Any:
    """Returns the masks that keep the units of the largest scores.

    Args:
      structure: what is kept or removed together.
      scores: a tree with an array for each parameter to prune, and None for others.
      counts: the number of units to keep of each parameter (of each group of
        `Channels`), or one number for all together.
        For `NM` it is, for each parameter, how many of each m neighbours are kept.
      rescale: makes the scores of different layers comparable; applied to the units of
        each parameter or group.
      at_least: units that are kept of each, where one number is given for all.

    Raises:
      ConfigError: a parameter cannot be cut into units.

    Examples:
      >>> from hpcjax.core.structures import Unstructured
      >>> scores = {"a": jnp.array([3.0, 1.0, 1.0]), "b": None}
      >>> choose(Unstructured(), scores, {"a": 2})["a"].tolist()
      [True, True, False]
    """
    leaves = {path: jnp.asarray(leaf) for path, leaf in trees.flatten(scores).items()}
    units = structure.pool(leaves)
    if rescale is not None:
        units = {name: rescale(unit) for name, unit in units.items()}
    if not isinstance(counts, Mapping):
        kept = keep_largest(units, counts, at_least=at_least)
    elif isinstance(structure, NM):
        m = structure.m
        kept = {
            path: keep_of_each(unit, counts[path], m) for path, unit in units.items()
        }
    else:
        kept = {name: keep_largest(unit, counts[name]) for name, unit in units.items()}
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    return trees.unflatten(scores, structure.spread(kept, shapes))


def keep_largest(scores: Any, k: Count, *, at_least: int = 0) -> Any:
    """Returns the masks of the k largest entries of a tree of scores, exactly.

    Of equal scores those of the earlier leaf are kept, and in a leaf those of the lower
    index; NaN is below all numbers. The result is found by counts alone: the k-th
    largest score bit by bit, then, bit by bit, the index below which scores equal to it
    are kept.

    Args:
      scores: a tree of arrays, of less than 2³¹ entries; None is passed over.
      k: how many, which may be traced; all, if there are not as many.
      at_least: entries that are kept of each leaf, 0 or 1.

    Examples:
      >>> keep_largest(jnp.array([2.0, 5.0, 2.0, 2.0]), 2).tolist()
      [True, True, False, False]
    """
    for path, leaf in trees.flatten(scores).items():
        rule = f"{path or 'scores'} must have less than 2**31 entries"
        checks.require(leaf.size < LARGEST_LEAF, rule, size=leaf.size)
    total = trees.num_params(scores)  # counts of leaves are added in int32
    rule = "scores that are ranked together must be less than 2**31"
    checks.require(total < LARGEST_LEAF, rule, size=total)
    leaves, structure = jax.tree.flatten(scores)
    if not leaves:
        return scores
    wide = jnp.result_type(jnp.float32, *leaves)
    keys = [sort_key(jnp.asarray(leaf, wide)) for leaf in leaves]
    if at_least:
        top = ~jnp.zeros((), keys[0].dtype)
        firsts = [keep_largest(leaf, 1) for leaf in leaves]
        keys = [jnp.where(f, top, key) for f, key in zip(firsts, keys, strict=True)]

    def reaches(value: Array) -> Array:
        return jnp.asarray(sum(count(key >= value) for key in keys) >= k)

    kth = find_largest(reaches, keys[0].dtype.itemsize * 8, keys[0].dtype)
    missing = k - sum(count(key > kth) for key in keys)
    masks = []
    for key in keys:
        tied = key == kth
        masks.append((key > kth) | _keep_first(tied, missing))
        missing = jnp.maximum(missing - count(tied), 0)
    return jax.tree.unflatten(structure, masks)


def keep_of_each(
    scores: Shaped[Array, "*lead inputs outputs"], n: Count, m: int
) -> Bool[Array, "*lead inputs outputs"]:
    """Returns the mask of the n best of every m neighbouring inputs of an output.

    Of equal scores the first are kept.

    Examples:
      >>> scores = jnp.array([[1.0], [4.0], [4.0], [4.0]])
      >>> keep_of_each(scores, 2, 4).ravel().tolist()
      [False, True, True, False]
    """
    *lead, inputs, outputs = scores.shape
    key = sort_key(scores).reshape(*lead, inputs // m, m, outputs)
    mine, other = jnp.expand_dims(key, -2), jnp.expand_dims(key, -3)
    # [mine, other, 1]: whether the other one comes first of two equal ones.
    first = np.tri(m, m, -1, dtype=bool)[:, :, None]
    better = (other > mine) | ((other == mine) & first)
    rank = jnp.sum(better, axis=-2, dtype=jnp.int32)
    return (rank < n).reshape(scores.shape)


def sort_key(scores: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """Returns unsigned integers in the order of the scores; NaN is 0, the least.

    Unlike floats, they distinguish denormal numbers on a CPU.

    Examples:
      >>> key = sort_key(jnp.array([-0.0, 0.0, -2.0, jnp.nan, 1.0]))
      >>> jnp.argsort(key).tolist(), bool(key[0] == key[1])
      ([3, 2, 0, 1, 4], True)
    """
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    unsigned = jnp.uint64 if wide.dtype.itemsize == 8 else jnp.uint32
    sign = np.array(1 << (8 * wide.dtype.itemsize - 1), unsigned)
    bits = jax.lax.bitcast_convert_type(wide, unsigned)
    bits = jnp.where(bits == sign, 0, bits)
    # Positive floats are ordered as their bits, negative ones in the opposite way.
    key = jnp.where(bits < sign, bits | sign, ~bits)
    return jnp.where(jnp.isnan(wide), 0, key).astype(unsigned)


def check_scores(scores: Any) -> None:
    """Raises ConfigError naming the parameters whose scores are not all numbers."""
    wrong = [
        path
        for path, leaf in trees.flatten(scores).items()
        if bool(jnp.any(jnp.isnan(leaf)))
    ]
    if wrong:
        raise ConfigError(f"scores must be numbers: got NaN in {wrong}")


def count(mask: Bool[Array, "*shape"]) -> Int[Array, ""]:
    """Returns the number of true entries, int32."""
    return jnp.sum(mask, dtype=jnp.int32)


def _keep_first(mask: Bool[Array, "*shape"], k: Count) -> Bool[Array, "*shape"]:
    """Returns the mask of the first k true entries, by their flat index."""
    index = _flat_index(mask.shape)

    def leaves_enough(cut: Array) -> Array:
        return count(mask & (index < cut)) <= k

    cut = find_largest(leaves_enough, mask.size.bit_length(), jnp.int32)
    return mask & (index < cut)


def _flat_index(shape: tuple[int, ...]) -> Int[Array, "*shape"]:
    """Returns the row-major index of each entry, of which no sharding is undone."""
    index = jnp.zeros(shape, jnp.int32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :])
        index += stride * jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return index
