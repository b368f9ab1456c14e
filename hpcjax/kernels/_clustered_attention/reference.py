"""Clustered attention in plain jnp: the definition."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def clustered_attention(
    query: Float[Array, "batch q_time clusters head_dim"],
    keys: Float[Array, "batch k_time key_heads head_dim"],
    values: Float[Array, "batch k_time kv_heads head_dim"],
    assign: Int[Array, "batch heads"],
    positions: Int[Array, "batch q_time"],
    *,
    key_heads: Int[Array, "batch clusters"] | None = None,
    dtype: Any = None,
) -> Float[Array, "batch q_time heads head_dim"]:
    """See `kernels.clustered_attention`."""
    if key_heads is not None:
        keys = jnp.take_along_axis(keys, key_heads[:, None, :, None], axis=2)
    scores = product("bqcd,btcd->bcqt", query, keys) / math.sqrt(query.shape[-1])
    seen = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
    # jax.nn.softmax would give NaN for a query without keys, whose output is to be 0.
    largest = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    shifted = jnp.where(seen, scores - largest, -jnp.inf)
    weights = jnp.exp(shifted)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1)
    maps = jnp.take_along_axis(weights, assign[:, :, None, None], axis=1)
    batch, _, kv_heads, head_dim = values.shape
    grouped = maps.reshape(batch, kv_heads, -1, *maps.shape[2:])
    y = product("bkgqt,btkd->bqkgd", grouped, values)
    y = y.reshape(*positions.shape, assign.shape[1], head_dim)
    return y.astype(dtype or query.dtype)


def product(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns an einsum that accumulates in float32.

    Operands of one low-precision dtype stay so: products of bfloat16 are exact in
    float32, so that a cast, which would copy a cache, changes nothing.
    """
    if left.dtype == right.dtype:
        return jnp.einsum(
            formula, left, right, precision="highest", preferred_element_type="float32"
        )
    left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(formula, left, right, precision="highest")
