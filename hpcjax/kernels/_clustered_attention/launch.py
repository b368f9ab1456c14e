"""Clustered attention of one query by a kernel.

A program has one request, one cluster and one block of positions. It reads the keys of
the cluster and computes its weights once, then reads the values of the cluster's heads,
one head after the other. The partial sums of the blocks are combined at the end.

References:
  Agarwal et al., CHAI, ICML 2024; Dao et al., Flash-Decoding for Long-Context
  Inference, 2023, for the split over positions.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.kernels._triton.launch import Launch, run

# Positions of a program, a power of two.
BLOCK = 128


class Sizes(NamedTuple):
    """What a launch depends on.

    Attributes:
      batch: requests.
      time: positions of the cache.
      clusters: maps.
      heads: query heads.
      key_heads: heads of the keys.
      kv_heads: heads of the values.
      head_dim: features.
    """

    batch: int
    time: int
    clusters: int
    heads: int
    key_heads: int
    kv_heads: int
    head_dim: int


def find_problem(queries: int) -> str | None:
    """Returns why the kernel does not take so many queries; None if it does."""
    return None if queries == 1 else f"the kernel takes one query: got {queries}"


def plan(sizes: Sizes) -> Launch:
    """Returns the launch for caches of some sizes."""
    splits = -(-sizes.time // BLOCK)
    # Triton's blocks are powers of two; the kernel masks features beyond head_dim.
    width = 1 << (sizes.head_dim - 1).bit_length()

    def out(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sizes.batch, splits, *shape), jnp.float32)

    names = ("time", "clusters", "heads", "key_heads", "kv_heads", "head_dim")
    return Launch(
        kernel="hpcjax.kernels._clustered_attention.kernel:attend",
        grid=(sizes.batch, sizes.clusters, splits),
        outputs=(
            out(sizes.heads, width),
            out(sizes.clusters),
            out(sizes.clusters),
        ),
        constants={
            **{name.upper(): getattr(sizes, name) for name in names},
            "WIDTH": width,
            "BLOCK": BLOCK,
            "SCALE": 1 / math.sqrt(sizes.head_dim),
        },
    )


def clustered_attention(
    query: Float[Array, "batch 1 clusters head_dim"],
    keys: Float[Array, "batch k_time key_heads head_dim"],
    values: Float[Array, "batch k_time kv_heads head_dim"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch 1"],
    *,
    key_heads: Int[Array, "batch clusters"] | None = None,
    dtype: Any = None,
    interpreted: bool = False,
) -> Float[Array, "batch 1 heads head_dim"]:
    """See `kernels.clustered_attention`; takes one query and has no gradient.

    Args:
      query: as there.
      keys: as there.
      values: as there.
      assign: as there.
      positions: as there.
      key_heads: as there.
      dtype: as there.
      interpreted: as for `_triton.launch.run`.
    """
    batch, _, clusters, head_dim = query.shape
    if key_heads is None:
        key_heads = jnp.broadcast_to(jnp.arange(clusters), (batch, clusters))
    order, begins = _group_heads(assign, clusters)
    indices = (order, begins, key_heads, positions)
    sizes = Sizes(
        batch=batch,
        time=keys.shape[1],
        clusters=clusters,
        heads=assign.shape[1],
        key_heads=keys.shape[2],
        kv_heads=values.shape[2],
        head_dim=head_dim,
    )
    y, largest, total = run(
        plan(sizes),
        *(index.astype(jnp.int32) for index in indices),
        query,
        keys,
        values,
        interpreted=interpreted,
    )
    y = _combine_blocks(y, largest, total, assign, positions)
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


def _combine_blocks(
    y: Float[Array, "batch splits heads width"],
    largest: Float[Array, "batch splits clusters"],
    total: Float[Array, "batch splits clusters"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch 1"],
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
    written = jnp.arange(y.shape[1]) * BLOCK <= positions
    y = jnp.where(written[:, :, None, None], y, 0)
    return jnp.sum(share[..., None] * y, axis=1)
