"""Scaled dot-product attention with grouped key and value heads."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hpcjax.core.errors import UnsupportedOp, nearest
from hpcjax.layers import _precision

log = logging.getLogger(__name__)

Implementation = Literal["auto", "reference", "xla", "cudnn"]
_HALF = ("bfloat16", "float16")


def attention(
    query: Float[Array, "batch q_time heads head_dim"],
    key: Float[Array, "batch k_time kv_heads head_dim"],
    value: Float[Array, "batch k_time kv_heads head_dim"],
    *,
    causal: bool = True,
    mask: Bool[Array, "batch q_time k_time"] | None = None,
    slopes: Float[Array, " heads"] | None = None,
    drop: Callable[[jax.Array], jax.Array] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "batch q_time heads head_dim"]:
    """Computes softmax(q kᵀ / √head_dim) v for each head; the softmax is float32.

    Query head h uses key and value head ⌊h · kv_heads / heads⌋; keys are not repeated
    in memory. Products take operands in the given dtype and accumulate in float32.

    Args:
      query: `[batch, q_time, heads, head_dim]`.
      key: `[batch, k_time, kv_heads, head_dim]`.
      value: as `key`.
      causal: whether query i sees only the keys up to k_time − q_time + i, so that the
        last query sees all.
      mask: `[batch, q_time, k_time]`, true where a query attends to a key; a query
        whose row is all false gets the mean of all values.
      slopes: what each head's scores lose with each place between query and key, see
        `alibi_slopes`; None for nothing. Only if causal.
      drop: dropout of the weights `[batch, heads, q_time, k_time]`; None for none.
      implementation: "reference" is the code of this module. "xla" and "cudnn" are
        those of `jax.nn.dot_product_attention`; they take no mask, slopes or dropout
        and, if causal, need as many queries as keys. "auto" takes cuDNN's for such
        arguments on a GPU in half precision, else the reference.

    Returns:
      `[batch, q_time, heads, head_dim]` in the dtype of `query`.

    Raises:
      ValueError: kv_heads does not divide heads, slopes without causal, or an unknown
        implementation.
      UnsupportedOp: the chosen implementation cannot handle the arguments.

    Examples:
      >>> x = jnp.ones((1, 3, 2, 4))
      >>> attention(x, x[:, :, :1], x[:, :, :1]).shape
      (1, 3, 2, 4)
    """
    q_time, heads = query.shape[1:3]
    k_time, kv_heads = key.shape[1:3]
    if heads % kv_heads:
        raise ValueError(
            f"kv_heads must divide heads: got kv_heads={kv_heads}, heads={heads}"
        )
    if slopes is not None and not causal:
        raise ValueError("slopes need keys before the query: got causal=False")
    plain = mask is None and slopes is None and drop is None
    chosen = _choose(implementation, query, key, causal, plain)
    if chosen is not None:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=causal, implementation=chosen
        )
    # b batch, k key head, g query head in its group, t query, s key, d feature.
    allowed = allowed_keys(q_time, k_time, causal, mask)
    maps = _grouped_maps(query, key, allowed, slopes)
    if drop is not None:
        whole = (len(query), heads, q_time, k_time)
        maps = drop(maps.reshape(whole)).reshape(maps.shape)
    y = _product("bkgts,bskd->btkgd", maps, value)
    return y.reshape(query.shape).astype(query.dtype)


def attention_maps(
    query: Float[Array, "batch q_time heads head_dim"],
    key: Float[Array, "batch k_time kv_heads head_dim"],
    mask: Bool[Array, "batch q_time k_time"],
) -> Float[Array, "batch heads q_time k_time"]:
    """Returns the attention weights softmax(q kᵀ / √head_dim) of each head, float32.

    Args:
      query: `[batch, q_time, heads, head_dim]`.
      key: `[batch, k_time, kv_heads, head_dim]`; kv_heads divides heads.
      mask: true where a query attends to a key; at least one in each row.

    Examples:
      >>> x = jnp.ones((1, 2, 1, 4))
      >>> attention_maps(x, x, jnp.array([[[True, False], [True, True]]])).tolist()
      [[[[1.0, 0.0], [0.5, 0.5]]]]
    """
    maps = _grouped_maps(query, key, mask[:, None, None])
    return maps.reshape(len(query), query.shape[2], *maps.shape[-2:])


def _grouped_maps(
    query: jax.Array,
    key: jax.Array,
    allowed: jax.Array | None,
    slopes: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax weights `[batch, kv_heads, group, q_time, k_time]`, float32."""
    batch, time, _, head_dim = query.shape
    # heads = kv_heads · group, the head of the group running fastest. One einsum then
    # uses each key head for its whole group without repeating it.
    grouped = query.reshape(batch, time, key.shape[2], -1, head_dim)
    scores = _product("btkgd,bskd->bkgts", grouped, key) / math.sqrt(head_dim)
    if slopes is not None:
        q_time, k_time = scores.shape[-2:]
        # As in `allowed_keys`, the last query stands at the last key.
        places = jnp.arange(k_time - q_time, k_time)[:, None] - jnp.arange(k_time)
        scores -= slopes.reshape(key.shape[2], -1, 1, 1) * places
    if allowed is not None:
        # The least finite number, not −∞: a row that is masked throughout gives uniform
        # weights, where −∞ − (−∞) would give NaN in the values and in the gradient.
        scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores)


def _choose(
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    causal: bool,
    plain: bool,
) -> Literal["xla", "cudnn"] | None:
    """Returns which implementation of JAX to call; None for the reference.

    `plain` says that there are neither a mask nor slopes nor dropout.
    """
    allowed = ("auto", "reference", "xla", "cudnn")
    if implementation not in allowed:
        raise ValueError(
            f"unknown implementation: got {implementation!r}"
            f"{nearest(implementation, allowed)}"
        )
    if implementation == "reference":
        return None
    square = not causal or query.shape[1] == key.shape[1]
    possible = plain and square
    if implementation == "auto":
        half = query.dtype in _HALF and key.dtype == query.dtype
        return "cudnn" if possible and half and cudnn_works() else None
    if not possible:
        raise UnsupportedOp(
            f"attention {implementation!r} takes no mask, no slopes, no dropout, and "
            f"as many queries as keys: got {query.shape[1]} queries, {key.shape[1]} "
            "keys; take 'reference'"
        )
    if implementation == "cudnn" and query.dtype not in _HALF:
        raise UnsupportedOp(
            f"attention 'cudnn' needs bfloat16 or float16: got {query.dtype}"
        )
    return implementation


@functools.cache
def cudnn_works() -> bool:
    """Says whether cuDNN's attention runs on the default device; tried once, logged."""
    if jax.default_backend() != "gpu":
        return False
    x = jnp.ones((1, 128, 1, 64), "bfloat16")
    try:
        # The first call may come while a caller is traced: this one must run at once.
        with jax.ensure_compile_time_eval():
            output = jax.nn.dot_product_attention(
                x, x, x, is_causal=True, implementation="cudnn"
            )
            jax.block_until_ready(output)
    # Each version fails in its own way, from missing libraries to compiler errors.
    except Exception as error:
        log.warning("attention: cuDNN's does not work here (%s); XLA's is used", error)
        return False
    log.info("attention: cuDNN's")
    return True


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
    """Returns the mask of the scores `[batch, kv_heads, group, q_time, k_time]`.

    Args:
      q_time: number of queries.
      k_time: number of keys.
      causal: see `attention`.
      mask: see `attention`.

    Returns:
      A mask that broadcasts against the scores, or None if nothing is masked.
    """
    allowed = None if mask is None else mask[:, None, None]
    if causal:
        # The last query is aligned with the last key, as in decoding with a cache:
        # query i stands at position k_time − q_time + i, hence the shifted diagonal.
        past = jnp.tril(jnp.ones((q_time, k_time), bool), k_time - q_time)
        allowed = past if allowed is None else allowed & past
    return allowed
