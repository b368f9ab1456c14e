"""Attention to a sparse pattern of keys, in floats or with quantized products."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax import kernels
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.core.extremes import largest

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


def random_pattern(
    time: int, *, zeros: float, vector: int = 8, seed: int = 0, causal: bool = False
) -> kernels.SRBCRS:
    """Draws which keys each vector of queries attends to.

    Every vector of V queries has as many keys, round((1 − zeros) · time). If causal, it
    has its own V keys, so that no query is without one, and this share of the earlier
    ones; which of its own keys a query does not see yet, `sparse_attention` says.

    Args:
      time: queries and keys, a multiple of `vector`.
      zeros: share of the pairs that are left out, in [0, 1).
      vector: V, queries with the same keys: 2, 4 or 8.
      seed: of the draw.
      causal: whether no query has keys behind its vector.

    Raises:
      ConfigError: a time that is no multiple, or a share out of its range.

    Examples:
      >>> pattern = random_pattern(4, zeros=0.5, vector=2, causal=True)
      >>> pattern.to_dense().astype(int).tolist()[1]
      [1, 1, 0, 0]
    """
    checks.require(0 <= zeros < 1, "zeros must be in [0, 1)", zeros=zeros)
    rule = "sparse attention needs a multiple of `vector` queries"
    good = time > 0 and vector > 0 and time % vector == 0
    checks.require(good, rule, time=time, vector=vector)
    mask = np.zeros((time // vector, time), bool)
    rng = np.random.default_rng(seed)
    for place, row in enumerate(mask):
        own = place * vector
        among = own if causal else time
        kept = max(0 if causal else 1, round((1 - zeros) * among))
        row[rng.permutation(among)[:kept]] = True
        row[own : own + vector] |= causal
    return kernels.sr_bcrs(np.ones((time, time), np.float32), vector=vector, mask=mask)


def sparse_attention(
    query: Float[Array, "batch time heads head_dim"],
    key: Float[Array, "batch k_time heads head_dim"],
    value: Float[Array, "batch k_time heads head_dim"],
    pattern: kernels.SRBCRS,
    *,
    causal: bool = False,
    bits: AttentionBits | None = None,
    scales: Scales = "calibrated",
    implementation: str = "auto",
) -> Float[Array, "batch time heads head_dim"]:
    """Computes softmax(q kᵀ / √head_dim) v over the keys that a pattern has.

    A query without keys gets zeros. With `bits`, a head's queries, keys and values are
    rounded to integers, x ≈ s · round(x / s) with the largest |x| at the end of the
    range, and probabilities to multiples of 1 / (2^(bits − 1) − 1); products are of
    integers, and gradients are refused.

    The published code has fixed units instead, 1/36 and of probabilities 1/32; it cuts
    off what is behind the unit, and what is out of the range.

    Args:
      query: `[batch, time, heads, head_dim]`.
      key: as many heads.
      value: as `key`.
      pattern: `[time, k_time]`, the same for all heads, of which the numbers do not
        count.
      causal: whether a query sees no key behind itself, even if the pattern has it.
      bits: of the operands; None for floats.
      scales: of the integers, "calibrated" or "published".
      implementation: as for `kernels.spmm`.

    Raises:
      ConfigError: shapes that do not fit, or bits that go with no others.
      UnsupportedOp: the kernels are named and cannot run here.
      TypeError: a gradient of products of integers.

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
    visible = _find_visible(pattern, causal=causal)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if bits is None:
            return _attend(q, k, v, pattern, visible, implementation)
        fixed = scales == "published"
        q, k, v = (_refuse_gradient(x) for x in (q, k, v))
        return _attend_quantized(q, k, v, pattern, visible, bits, fixed, implementation)

    # Over requests and heads; each has matrices of its own.
    for axis in (1, 0):
        attend = jax.vmap(attend, in_axes=axis, out_axes=axis)
    return attend(query, key, value).astype(query.dtype)


@jax.custom_jvp
def _refuse_gradient(x: jax.Array) -> jax.Array:
    """Returns x, of which nobody may ask a derivative: that of rounding is zero."""
    return x


@_refuse_gradient.defjvp
def _raise_on_gradient(primals: Any, tangents: Any) -> Any:
    raise ConfigError(
        "sparse attention in integers has no gradient: train in floats (bits=None, in "
        'a config "float") and evaluate in few bits'
    )


def _find_visible(pattern: kernels.SRBCRS, *, causal: bool) -> jax.Array:
    """Returns which numbers of tiles count, `[groups, 1 or V, s]`: no padding."""
    columns = pattern.columns.reshape(-1, 1, pattern.stride)
    if not causal:
        return columns >= 0
    query = pattern.rows[:, None] * pattern.vector + np.arange(pattern.vector)
    return (columns >= 0) & (columns <= query[..., None])


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pattern: kernels.SRBCRS,
    visible: jax.Array,
    implementation: str,
) -> jax.Array:
    scores = kernels.sddmm(q, k, pattern, implementation=implementation)
    maps = _softmax(scores.tiles() / jnp.sqrt(q.shape[1]), pattern, visible)
    matrix = kernels.with_values(pattern, maps.astype(v.dtype))
    return kernels.spmm(matrix, v, implementation=implementation)


def _attend_quantized(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pattern: kernels.SRBCRS,
    visible: jax.Array,
    bits: AttentionBits,
    fixed: bool,
    implementation: str,
) -> jax.Array:
    cast = _cut if fixed else _round
    (q, q_size), (k, k_size), (v, v_size) = (cast(x, bits.heads) for x in (q, k, v))
    scores = kernels.sddmm(q, k, pattern, implementation=implementation)
    head_dim = q.shape[1] * (2 if bits.heads == 4 else 1)
    size = q_size * k_size / jnp.sqrt(head_dim)
    maps = _softmax(scores.tiles().astype(jnp.float32) * size, pattern, visible)
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
    top = largest(jnp.abs(x)).astype(jnp.float32)
    unit = jnp.where(top == 0, 1, top) / most
    return _pack(jnp.round(x / unit), bits), unit


def _cut(x: jax.Array, bits: int) -> tuple[jax.Array, float]:
    """As `_round`, but as the published code does it."""
    end = 2 ** (bits - 1)
    integers = jnp.clip(jnp.trunc(x * _PUBLISHED[0]), -end, end - 1)
    return _pack(integers, bits), 1 / _PUBLISHED[0]


def _pack(integers: jax.Array, bits: int) -> jax.Array:
    narrow = integers.astype(jnp.int8)
    return kernels.pack_nibbles(narrow) if bits == 4 else narrow


def _softmax(
    scores: jax.Array, pattern: kernels.SRBCRS, visible: jax.Array
) -> jax.Array:
    """Returns the softmax of each row of tiles, `[groups, V, s]`; zero if invisible."""
    rows = pattern.shape[0] // pattern.vector
    scores = jnp.where(visible, scores, -jnp.inf)
    highest = jax.ops.segment_max(jnp.max(scores, axis=2), pattern.rows, rows)
    # The softmax does not depend on it, nor has it a gradient. A row that sees nothing
    # has none, and weights of zero.
    highest = jnp.where(jnp.isfinite(highest), highest, 0)
    highest = jax.lax.stop_gradient(highest[pattern.rows])
    weights = jnp.where(visible, jnp.exp(scores - highest[..., None]), 0)
    total = jax.ops.segment_sum(jnp.sum(weights, axis=2), pattern.rows, rows)
    total = jnp.where(total == 0, 1, total)
    return weights / total[pattern.rows][..., None]
