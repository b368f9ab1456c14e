"""Attention to a cache, read in blocks and only as far as it is filled.

The scores of all queries with all keys are never in memory at once, and neither time
nor memory depends on the room that the cache has, only on the tokens in it. This is the
definition's sum in another order: with m the largest score so far, t = Σ exp(s − m) and
a = Σ exp(s − m) v over the keys so far, a block with largest score m' gives

  m'' = max(m, m'),  t'' = t · exp(m − m'') + Σ exp(s − m''),  a'' likewise,

and a / t is the output in the end.

References:
  Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al.,
  FlashAttention, NeurIPS 2022; Dao et al., Flash-Decoding, 2023.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.kernels._clustered_attention.reference import product

# Keys of a block. More would make a step with few tokens in a large cache slower, fewer
# the products of a long prompt: of SmolLM2, 128 keys take 2 % of the bytes of a step.
KEYS = 128
# Queries of a block. With KEYS, the products' inner sizes on a processor's caches.
QUERIES = 256


def clustered_attention(
    query: Float[Array, "batch q_time maps head_dim"],
    keys: Float[Array, "*layers batch k_time key_heads head_dim"],
    values: Float[Array, "*layers batch k_time kv_heads head_dim"],
    assign: Int[Array, "batch heads"] | None,
    positions: Int[Array, "batch q_time"],
    *,
    key_heads: Int[Array, "batch maps"] | None = None,
    layer: Int[Array, ""] | None = None,
    slopes: Float[Array, " maps"] | None = None,
    dtype: Any = None,
    blocks: tuple[int, int] = (QUERIES, KEYS),
) -> Float[Array, "batch q_time heads head_dim"]:
    """See `kernels.clustered_attention`; has no reverse gradient beyond one block.

    Args:
      query: as there.
      keys: as there.
      values: as there.
      assign: as there; None if every query head has a map of its own.
      positions: as there.
      key_heads: as there; None if query head h reads ⌊h · key_heads / maps⌋.
      layer: as there.
      slopes: what each map's scores lose with each place between query and key; None
        for nothing.
      dtype: as there.
      blocks: how many queries read how many keys at once.
    """
    query_block, key_block = blocks
    if layer is None:
        keys, values, layer = keys[None], values[None], jnp.int32(0)
    attend = functools.partial(
        _attend_block,
        keys=keys,
        values=values,
        assign=assign,
        key_heads=key_heads,
        layer=layer,
        slopes=slopes,
        size=min(key_block, keys.shape[2]),
    )
    time = query.shape[1]
    if time <= query_block:
        y = attend(query, positions)
    else:
        # A query at position −1 sees no key.
        places = functools.partial(_split, size=query_block, filler=-1)
        parts = _split(query, size=query_block, filler=0), places(positions)
        y = jax.lax.map(lambda part: attend(*part), parts)
        # [blocks, batch, query_block, …] -> [batch, time, …]
        y = jnp.moveaxis(y, 0, 1)
        y = y.reshape(y.shape[0], -1, *y.shape[3:])[:, :time]
    return y.astype(dtype or query.dtype)


def _split(rows: jax.Array, *, size: int, filler: int) -> jax.Array:
    """Cuts axis 1 into blocks, filled up, which become the leading axis."""
    batch, time, *shape = rows.shape
    padding = [(0, 0), (0, -time % size), *[(0, 0)] * len(shape)]
    rows = jnp.pad(rows, padding, constant_values=filler)
    return jnp.moveaxis(rows.reshape(batch, -1, size, *shape), 1, 0)


def _penalize(slopes: jax.Array | None, away: jax.Array) -> jax.Array | float:
    """Returns what linear biases take off the scores of keys so many places away."""
    return 0.0 if slopes is None else slopes[:, None, None] * away


def _attend_block(
    query: jax.Array,
    positions: jax.Array,
    *,
    keys: jax.Array,
    values: jax.Array,
    assign: jax.Array | None,
    key_heads: jax.Array | None,
    layer: jax.Array,
    slopes: jax.Array | None,
    size: int,
) -> jax.Array:
    """Attends with one block of queries; returns float32."""
    room = keys.shape[2]
    batch, time, maps, head_dim = query.shape
    heads = maps if assign is None else assign.shape[1]
    if key_heads is None:
        # [b, t, k, g, d]: g query heads read key head k.
        query = query.reshape(batch, time, keys.shape[3], -1, head_dim)

    def read(rows: jax.Array, start: jax.Array) -> jax.Array:
        begin = (layer, 0, start, 0, 0)
        block = (1, batch, size, *rows.shape[3:])
        return jax.lax.dynamic_slice(rows, begin, block)[0]

    def score(start: jax.Array) -> jax.Array:
        block = read(keys, start)
        if key_heads is None:
            scores = product("btkgd,bskd->bkgts", query, block)
            return scores.reshape(batch, maps, time, size)
        block = jnp.take_along_axis(block, key_heads[:, None, :, None], axis=2)
        return product("btmd,bsmd->bmts", query, block)

    def spread(rows: jax.Array) -> jax.Array:
        """Gives each head what its map has: [b, m, t, …] -> [b, h, t, …]."""
        if assign is None:
            return rows
        index = assign.reshape(*assign.shape, *[1] * (rows.ndim - 2))
        return jnp.take_along_axis(rows, index, axis=1)

    def add(number: jax.Array, sums: tuple) -> tuple:
        largest, total, mixed = sums
        # The last block ends with the cache. What it shares with the one before it is
        # not seen again.
        first = number * size
        start = jnp.minimum(first, room - size)
        places = start + jnp.arange(size)
        seen = (places <= positions[..., None]) & (places >= first)
        scores = score(start) / math.sqrt(head_dim)
        scores -= _penalize(slopes, positions[:, None, :, None] - places)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        above = jnp.maximum(largest, jnp.max(scores, axis=-1))
        # Without any key so far, −∞ − (−∞) would be NaN.
        shift = jnp.where(jnp.isfinite(above), above, 0)
        weights = jnp.exp(scores - shift[..., None])
        kept = jnp.exp(largest - shift)
        total = kept * total + jnp.sum(weights, axis=-1)
        block = read(values, start)
        grouped = spread(weights).reshape(batch, block.shape[2], -1, time, size)
        new = product("bkgts,bskd->bkgtd", grouped, block)
        mixed = spread(kept)[..., None] * mixed + new.reshape(mixed.shape)
        return above, total, mixed

    shape = (batch, maps, time)
    sums = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((batch, heads, time, head_dim), jnp.float32),
    )
    if size == room:
        sums = add(jnp.int32(0), sums)
    else:
        filled = jnp.minimum(jnp.max(positions, initial=-1) + 1, room)
        sums = jax.lax.fori_loop(0, (filled + size - 1) // size, add, sums)
    _, total, mixed = sums
    y = mixed / spread(jnp.where(total > 0, total, 1))[..., None]
    return jnp.swapaxes(y, 1, 2)
