"""Which weights are dropped and which are grown, of masks and scores by path."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core import masks
from hpcjax.optim.sparsify.config import DynamicOptions

Leaves = dict[str, jax.Array]


class Rewired(NamedTuple):
    """Masks after weights were dropped and others grown.

    Attributes:
      left: what was active and was not dropped.
      active: what is active now.
    """

    left: Leaves
    active: Leaves


def rewire(
    active: Leaves,
    params: Leaves,
    drop: Leaves,
    grow: Leaves,
    momenta: Leaves | None,
    share: Float[Array, ""],
    chosen: DynamicOptions,
) -> Rewired:
    """Drops a share of the active weights and grows as many.

    Args:
      active: the masks.
      params: the weights.
      drop: scores of weights; the least are dropped.
      grow: scores of weights; the largest are grown.
      momenta: the optimizer's, where `redistribute` needs them.
      share: f, of which ⌊f·n⌋ of n active weights are dropped.
      chosen: how.

    Returns:
      Masks with as many active weights as before: of each layer, unless `redistribute`
      moves them from layer to layer.
    """
    left = _drop(active, params, drop, share, chosen)
    barred = left if chosen.regrow else active
    room = {path: ~mask for path, mask in barred.items()}
    lost = {
        path: masks.count(mask) - masks.count(left[path])
        for path, mask in active.items()
    }
    quota = _quota(active, left, lost, room, momenta, chosen.redistribute)
    new = {
        path: left[path] | _best(grow[path], room[path], quota[path]) for path in left
    }
    return Rewired(left, new)


def share_out(
    total: Int[Array, ""], weights: Float[Array, " n"], room: Int[Array, " n"]
) -> Int[Array, " n"]:
    """Shares a number out in proportion to weights, to each no more than it has room.

    What finds no room goes to the others, in proportion again; what rounding leaves,
    to the first.

    Examples:
      >>> share_out(jnp.int32(9), jnp.array([1.0, 1, 1]), jnp.array([1, 9, 9])).tolist()
      [1, 4, 4]
    """

    def deal(_: Any, given: Array) -> Array:
        missing, free = total - given.sum(), room - given
        open_weights = jnp.where(free > 0, weights, 0)
        whole = jnp.maximum(open_weights.sum(), jnp.finfo(weights.dtype).tiny)
        more = jnp.floor(missing * (open_weights / whole)).astype(jnp.int32)
        return given + _fill(jnp.minimum(more, free), missing)

    # A round in which something finds no room fills one place at least.
    given = jax.lax.fori_loop(0, len(room), deal, jnp.zeros_like(room))
    return given + _fill(room - given, total - given.sum())


def _fill(wanted: Array, total: Array) -> Array:
    """Gives to each what it wants, in order, until there is nothing left."""
    before = jnp.cumsum(wanted) - wanted
    return jnp.clip(total - before, 0, wanted)


def _drop(
    active: Leaves, params: Leaves, scores: Leaves, share: Array, chosen: DynamicOptions
) -> Leaves:
    """Returns the masks of what is not dropped."""
    if chosen.compare == "all":
        ranked = {path: _rank(scores[path], mask) for path, mask in active.items()}
        total = sum(map(masks.count, active.values()), jnp.zeros((), jnp.int32))
        size = sum(mask.size for mask in active.values())
        limit = None if chosen.regrow else size - total
        kept = masks.keep_largest(ranked, _remain(total, share, limit))
        return {path: kept[path] & mask for path, mask in active.items()}
    left = {}
    for path, mask in active.items():
        parts = [mask]
        if chosen.by_sign:
            positive = params[path] > 0
            parts = [mask & positive, mask & ~positive]
        limit = None if chosen.regrow else (mask.size - masks.count(mask)) // len(parts)
        left[path] = jnp.zeros_like(mask)
        for part in parts:
            remain = _remain(masks.count(part), share, limit)
            left[path] |= _best(scores[path], part, remain)
    return left


def _remain(count: Array, share: Array, limit: Array | None) -> Array:
    """Returns n − ⌊f·n⌋, or more, if there is a limit to what can be dropped."""
    dropped = jnp.floor(share * count).astype(jnp.int32)
    return count - (dropped if limit is None else jnp.minimum(dropped, limit))


def _quota(
    active: Leaves,
    left: Leaves,
    lost: Leaves,
    room: Leaves,
    momenta: Leaves | None,
    redistribute: str,
) -> Leaves:
    """Returns how many weights each layer grows."""
    if redistribute == "none" or not active:
        return lost
    if momenta is None:
        weights = [masks.count(mask).astype(jnp.float32) for mask in left.values()]
    else:
        weights = [
            jnp.sum(jnp.where(mask, jnp.abs(momenta[path]), 0), dtype=jnp.float32)
            / jnp.maximum(masks.count(mask), 1)
            for path, mask in active.items()
        ]
    rooms = jnp.stack([masks.count(mask) for mask in room.values()])
    total = jnp.stack(list(lost.values())).sum()
    given = share_out(total, jnp.stack(weights), rooms)
    return {path: given[number] for number, path in enumerate(active)}


def _best(
    scores: Float[Array, "*shape"], among: Bool[Array, "*shape"], k: Array
) -> Bool[Array, "*shape"]:
    """Returns the mask of the k largest scores among some; all of these at most."""
    return masks.keep_largest(_rank(scores, among), k) & among


def _rank(
    scores: Float[Array, "*shape"], among: Bool[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Returns scores of which all others are below those among some, NaN included."""
    least = jnp.finfo(scores.dtype).min
    numbers = jnp.where(jnp.isnan(scores), least, jnp.maximum(scores, least))
    return jnp.where(among, numbers, -jnp.inf)
