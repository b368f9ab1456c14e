"""Scaled dot-product attention with grouped key and value heads."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hpcjax.layers import _precision


def attention(
    query: Float[Array, "batch q_time heads head_dim"],
    key: Float[Array, "batch k_time kv_heads head_dim"],
    value: Float[Array, "batch k_time kv_heads head_dim"],
    *,
    causal: bool = True,
    mask: Bool[Array, "batch q_time k_time"] | None = None,
) -> Float[Array, "batch q_time heads head_dim"]:
    """Computes softmax(q kᵀ / √head_dim) v for each head; the softmax is float32.

    Head h reads key and value head ⌊h · kv_heads / heads⌋; keys are not repeated in
    memory. Products run in the dtype of the operands and accumulate in float32.

    Args:
      query: `[batch, q_time, heads, head_dim]`.
      key: `[batch, k_time, kv_heads, head_dim]`.
      value: as `key`.
      causal: whether query i sees only the keys up to k_time − q_time + i, so that the
        last query sees all.
      mask: `[batch, q_time, k_time]`, true where a query may look; a query that may
        look nowhere gets the mean of all values.

    Returns:
      `[batch, q_time, heads, head_dim]` in the dtype of `query`.

    Raises:
      ValueError: kv_heads does not divide heads.

    Examples:
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> attention(x, x[:, :, :1], x[:, :, :1]).shape
      (1, 3, 2, 4)
    """
    batch, q_time, heads, head_dim = query.shape
    k_time, kv_heads = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(
            f"kv_heads must divide heads: got kv_heads={kv_heads}, heads={heads}"
        )
    grouped = query.reshape(batch, q_time, kv_heads, heads // kv_heads, head_dim)
    scores = _product("btkgd,bskd->bkgts", grouped, key) / math.sqrt(head_dim)
    allowed = allowed_keys(q_time, k_time, causal, mask)
    if allowed is not None:
        scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    y = _product("bkgts,bskd->btkgd", jax.nn.softmax(scores), value)
    return y.reshape(query.shape).astype(query.dtype)


def _product(formula: str, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the float32 einsum of both operands in the dtype of `right`."""

    def einsum(left: jax.Array, right: jax.Array, accumulate: str | None) -> jax.Array:
        return jnp.einsum(formula, left, right, preferred_element_type=accumulate)

    return _precision.accumulate_float32(einsum, left, right, right.dtype)


def allowed_keys(
    q_time: int,
    k_time: int,
    causal: bool,
    mask: Bool[Array, "batch q_time k_time"] | None = None,
) -> Bool[Array, "..."] | None:
    """Returns which scores `[batch, kv_heads, group, q_time, k_time]` count.

    Args:
      q_time: number of queries.
      k_time: number of keys.
      causal: see `attention`.
      mask: see `attention`.

    Returns:
      A mask that broadcasts against the scores, or None if all count.
    """
    allowed = None if mask is None else mask[:, None, None]
    if causal:
        past = jnp.tril(jnp.ones((q_time, k_time), bool), k_time - q_time)
        allowed = past if allowed is None else allowed & past
    return allowed
