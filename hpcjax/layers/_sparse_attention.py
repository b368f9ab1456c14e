"""Attention to a sparse pattern of keys, in floats or with quantized products."""

from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import kernels
from hpcjax.core import checks

# Bits of probabilities and of queries, keys and values.
_BITS = ((16, 8), (8, 8), (8, 4), (4, 4))
Scales = Literal["calibrated", "published"]
# Of queries, keys and values, and of probabilities.
_PUBLISHED = (36.0, 32.0)


class AttentionBits(NamedTuple):
    """How many bits the operands of the products have.

    Attributes:
      probabilities: 16, 8 or 4.
      heads: of queries, keys and values, 8 or 4.
    """

    probabilities: Literal[16, 8, 4] = 8
    heads: Literal[8, 4] = 8


def sparse_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch k_time heads head_dim"],
    value: Float[Array, "batch k_time heads head_dim"],
    pattern: kernels.SRBCRS,
    *,
    bits: AttentionBits | None = None,
    scales: Scales = "calibrated",
    implementation: str = "auto",
) -> Float[Array, "batch time heads head_dim"]:
    """Computes softmax(q kᵀ / √head_dim) v over the keys that a pattern has.

    A query without keys gets zeros. With `bits`, a head's queries, keys and values are
    rounded to integers, x ≈ s · round(x / s) with the largest |x| at the end of the
    range, and probabilities to multiples of 1 / (2^(bits − 1) − 1); products are of
    integers, and there is no gradient.

    The published code has fixed units instead, 1/36 and of probabilities 1/32; it cuts
    off what is behind the unit, and what is out of the range.

    Args:
      query: `[batch, time, heads, head_dim]`.
      key: as many heads.
      value: as `key`.
      pattern: `[time, k_time]`, the same for all heads, of which the numbers do not
        count.
      bits: of the operands; None for floats.
      scales: of the integers, "calibrated" or "published".
      implementation: as for `kernels.spmm`.

    Raises:
      ConfigError: shapes that do not fit, or bits that go with no others.
      UnsupportedOp: the kernels are named and cannot run here.

    References:
      Li, Osawa and Hoefler, Efficient Quantized Sparse Matrix Operations on Tensor
      Cores, SC 2022, §5.2.

    Examples:
      >>> x = jnp.ones((1, 2, 1, 4))
      >>> pattern = kernels.sr_bcrs(jnp.ones((2, 2)), vector=2)
      >>> sparse_attention(x, x, x, pattern).shape
      (1, 2, 1, 4)
    """
    checks.require(
        bits is None or tuple(bits) in _BITS, f"bits must be one of {_BITS}", bits=bits
    )

    checks.require_choice("scales", scales, get_args(Scales))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if bits is None:
            return _attend(q, k, v, pattern, implementation)
        fixed = scales == "published"
        return _attend_quantized(q, k, v, pattern, bits, fixed, implementation)

    # Over requests and heads; each has matrices of its own.
    for axis in (1, 0):
        attend = jax.vmap(attend, in_axes=axis, out_axes=axis)
    return attend(query, key, value).astype(query.dtype)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pattern: kernels.SRBCRS,
    implementation: str,
) -> jax.Array:
    scores = kernels.sddmm(q, k, pattern, implementation=implementation)
    maps = _softmax(scores.tiles() / jnp.sqrt(q.shape[1]), pattern).astype(v.dtype)
    matrix = kernels.with_values(pattern, maps)
    return kernels.spmm(matrix, v, implementation=implementation)


def _attend_quantized(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pattern: kernels.SRBCRS,
    bits: AttentionBits,
    fixed: bool,
    implementation: str,
) -> jax.Array:
    cast = _cut if fixed else _round
    (q, q_size), (k, k_size), (v, v_size) = (cast(x, bits.heads) for x in (q, k, v))
    scores = kernels.sddmm(q, k, pattern, implementation=implementation)
    head_dim = q.shape[1] * (2 if bits.heads == 4 else 1)
    size = q_size * k_size / jnp.sqrt(head_dim)
    maps = _softmax(scores.tiles().astype(jnp.float32) * size, pattern)
    most = 2 ** (bits.probabilities - 1) - 1
    if fixed:
        unit = 1 / _PUBLISHED[1]
        integers = jnp.minimum(jnp.trunc(maps / unit), most)
    else:
        unit, integers = 1 / most, jnp.round(maps * most)
    matrix = kernels.with_values(
        pattern,
        integers.astype(jnp.int32),
        bits=bits.probabilities,
        limb=min(8, bits.heads),
    )
    mixed = kernels.spmm(matrix, v, implementation=implementation)
    return mixed.astype(jnp.float32) * (v_size * unit)


def _round(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Returns x as integers, packed if of four bits, and their unit."""
    most = 2 ** (bits - 1) - 1
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    unit = jnp.where(largest > 0, largest, 1) / most
    return _pack(jnp.round(x / unit), bits), unit


def _cut(x: jax.Array, bits: int) -> tuple[jax.Array, float]:
    """As `_round`, but as the published code does it."""
    end = 2 ** (bits - 1)
    integers = jnp.clip(jnp.trunc(x * _PUBLISHED[0]), -end, end - 1)
    return _pack(integers, bits), 1 / _PUBLISHED[0]


def _pack(integers: jax.Array, bits: int) -> jax.Array:
    narrow = integers.astype(jnp.int8)
    return kernels.pack_nibbles(narrow) if bits == 4 else narrow


def _softmax(scores: jax.Array, pattern: kernels.SRBCRS) -> jax.Array:
    """Returns the softmax of each row of tiles, `[groups, V, s]`, zero in padding."""
    rows = pattern.shape[0] // pattern.vector
    real = (pattern.columns >= 0).reshape(-1, 1, pattern.stride)
    scores = jnp.where(real, scores, -jnp.inf)
    highest = jax.ops.segment_max(jnp.max(scores, axis=2), pattern.rows, rows)
    # The softmax does not depend on it, nor has it a gradient.
    highest = jax.lax.stop_gradient(highest[pattern.rows])
    weights = jnp.where(real, jnp.exp(scores - highest[..., None]), 0)
    total = jax.ops.segment_sum(jnp.sum(weights, axis=2), pattern.rows, rows)
    return weights / total[pattern.rows][..., None]
