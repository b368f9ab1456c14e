"""Clustered attention of one query as a Triton kernel.

A program has one request, one cluster and one block of positions. It reads the keys of
the cluster and computes its weights once, then reads the values of the cluster's heads,
one head after the other. The partial sums of the blocks are combined at the end.

References:
  Agarwal et al., CHAI, ICML 2024; Dao et al., Flash-Decoding for Long-Context
  Inference, 2023, for the split over positions.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from hpcjax.core.errors import UnsupportedOp

# Positions of a program.
BLOCK = 128


def clustered_attention(
    query: Float[Array, "batch q_time clusters head_dim"],
    keys: Float[Array, "batch k_time key_heads head_dim"],
    values: Float[Array, "batch k_time kv_heads head_dim"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch q_time"],
    *,
    key_heads: Int[Array, "batch clusters"] | None = None,
    dtype: Any = None,
    block: int = BLOCK,
    interpret: bool = False,
) -> Float[Array, "batch q_time heads head_dim"]:
    """See `kernels.clustered_attention`; takes one query and has no gradient.

    Args:
      query: with `q_time` = 1.
      keys: as there.
      values: as there.
      assign: as there.
      positions: as there.
      key_heads: as there.
      dtype: as there.
      block: positions of a program, a power of two.
      interpret: runs the kernel in Python on any device, slowly.

    Raises:
      UnsupportedOp: several queries.
      ValueError: block is not a power of two.
    """
    batch, q_time, clusters, head_dim = query.shape
    if q_time != 1:
        raise UnsupportedOp(
            f"the kernel takes one query: got {q_time}; use implementation='reference'"
        )
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two: got block={block}")
    if key_heads is None:
        key_heads = jnp.broadcast_to(jnp.arange(clusters), (batch, clusters))
    order, begins = _group_heads(assign, clusters)
    indices = (order, begins, key_heads, positions)
    call = _call(query, keys, values, assign.shape[1], block, interpret)
    y, largest, total = call(
        *(index.astype(jnp.int32) for index in indices),
        query[:, 0],
        keys,
        values,
    )
    y = _combine_blocks(y, largest, total, assign, positions, block)
    return y[:, None, :, :head_dim].astype(dtype or query.dtype)


def _group_heads(assign: Int[Array, "batch heads"], clusters: int) -> tuple:
    """Sorts heads by cluster.

    Returns:
      Heads in the order of their clusters, `[batch, heads]`, and the position of each
      cluster's first head in that order, `[batch, clusters + 1]` with the end.
    """
    order = jnp.argsort(assign, axis=1, stable=True)
    before = assign[:, :, None] < jnp.arange(clusters + 1)
    return order, jnp.sum(before, axis=1)


def _call(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    heads: int,
    block: int,
    interpret: bool,
) -> Any:
    batch, _, clusters, head_dim = query.shape
    time, key_heads, kv_heads = *keys.shape[1:3], values.shape[2]
    # Triton's blocks are powers of two; the kernel masks features beyond head_dim.
    width = pl.next_power_of_2(head_dim)
    splits = pl.cdiv(time, block)

    def row(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, size), lambda b, _c, _s: (b, 0))

    def part(*shape: int) -> pl.BlockSpec:
        rest = (0,) * len(shape)
        return pl.BlockSpec((None, None, *shape), lambda b, _c, s: (b, s, *rest))

    def cache(heads: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, block, heads, width), lambda b, _c, s: (b, s, 0, 0))

    def out(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, splits, *shape), jnp.float32)

    return pl.pallas_call(
        functools.partial(
            _kernel, time=time, head_dim=head_dim, groups=heads // kv_heads
        ),
        grid=(batch, clusters, splits),
        in_specs=[
            row(heads),
            row(clusters + 1),
            row(clusters),
            row(1),
            pl.BlockSpec((None, clusters, width), lambda b, _c, _s: (b, 0, 0)),
            cache(key_heads),
            cache(kv_heads),
        ],
        out_specs=(part(heads, width), part(clusters), part(clusters)),
        out_shape=(out(heads, width), out(clusters), out(clusters)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="clustered_attention",
    )


def _kernel(*refs: Any, time: int, head_dim: int, groups: int) -> None:
    order, begins, key_heads, position, query, keys, values, y, largest, total = refs
    cluster, split = pl.program_id(1), pl.program_id(2)
    block, _, width = keys.shape
    last = jnp.minimum(position[0], time - 1)
    seen = split * block + jnp.arange(block) <= last
    real = jnp.arange(width) < head_dim
    # Positions behind the query's are not read, which saves their bandwidth.
    tile = seen[:, None] & real
    q = triton.load(query.at[cluster, :], mask=real, other=0).astype(jnp.float32)
    k = triton.load(keys.at[:, key_heads[cluster], :], mask=tile, other=0)
    scores = jnp.sum(k.astype(jnp.float32) * q, axis=1) / math.sqrt(head_dim)
    scores = jnp.where(seen, scores, -jnp.inf)
    highest = jnp.max(scores)
    # In a block behind the position the highest score is -inf, and exp(-inf + inf) NaN.
    weights = jnp.where(seen, jnp.exp(scores - highest), 0)
    largest[cluster] = highest
    total[cluster] = jnp.sum(weights)

    def attend(place: jax.Array, _: None) -> None:
        head = order[place]
        v = triton.load(values.at[:, head // groups, :], mask=tile, other=0)
        part = jnp.sum(v.astype(jnp.float32) * weights[:, None], axis=0)
        triton.store(y.at[head, :], part)

    # No heads, hence no reads, in a block behind the position.
    end = jnp.where(split * block <= last, begins[cluster + 1], begins[cluster])
    jax.lax.fori_loop(begins[cluster], end, attend, None)


def _combine_blocks(
    y: Float[Array, "batch splits heads width"],
    largest: Float[Array, "batch splits clusters"],
    total: Float[Array, "batch splits clusters"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch 1"],
    block: int,
) -> Float[Array, "batch heads width"]:
    """Combines the partial sums of blocks into a softmax over all positions.

    Block s has Σ exp(score − m_s) v, its maximum m_s and t_s = Σ exp(score − m_s). With
    the overall maximum m, the result is Σ_s exp(m_s − m) y_s / Σ_s exp(m_s − m) t_s.
    """
    highest = jnp.max(largest, axis=1, keepdims=True)
    share = jnp.where(total > 0, jnp.exp(largest - highest), 0)
    whole = jnp.sum(share * total, axis=1, keepdims=True)
    share = share / jnp.where(whole > 0, whole, 1)
    share = jnp.take_along_axis(share, assign[:, None, :], axis=2)
    # A block behind the position has not written y, which may hold NaN: masked, as
    # 0 · NaN would stay.
    written = jnp.arange(y.shape[1]) * block <= positions
    y = jnp.where(written[:, :, None, None], y, 0)
    return jnp.sum(share[..., None] * y, axis=1)
