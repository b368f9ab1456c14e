"""Sums, means, maxima and softmax over segments: the only place with scatters.

A segment is the set of values with one number, such as the edges of one receiver. What
has no live value, whose mask is true or which has no mask, gives 0, with gradient 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core.errors import ConfigError
from hpcjax.core.varying import vary_like

# On a GPU additions to few places wait for each other; a product does not.
_FEW = 1024
_ONE_HOT_BYTES = 256 << 20


def segment_sum(
    values: Float[Array, "n ..."],
    segments: Int[Array, " n"],
    count: int,
    *,
    mask: Bool[Array, " n"] | None = None,
    is_sorted: bool = False,
) -> Float[Array, "count ..."]:
    """Returns y_s = Σ_{i: segments_i = s} values_i, added in float32 at least.

    On a GPU, sums into 1024 segments or fewer are a product with the segments' one-hot
    matrix, in blocks of at most 256 MiB; what is infinite is NaN there.

    Args:
      values: numbers.
      segments: of each; outside [0, count) it is in none.
      count: of the segments.
      mask: which values are live; None for all.
      is_sorted: promises that segments do not decrease.

    Returns:
      The sums, in the dtype of the values.

    Raises:
      ConfigError: values that are no floats, or arrays of other lengths.

    Examples:
      >>> segment_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 0, 1]), 3).tolist()
      [2.0, 5.0, 0.0]
    """
    _check(values, segments, mask)
    wide = _widen(values)
    if mask is not None:
        wide = jnp.where(add_axes(mask, wide), wide, 0)
    few = 0 < count <= _FEW and wide.size
    if few and jax.default_backend() == "gpu":
        total = _sum_by_products(wide, segments, count)
    else:
        total = jax.ops.segment_sum(
            wide, segments, count, indices_are_sorted=is_sorted, mode="drop"
        )
    return total.astype(values.dtype)


def _sum_by_products(values: jax.Array, segments: jax.Array, count: int) -> jax.Array:
    """Returns the sums over few segments by products, block by block."""
    n, rest = len(values), values.shape[1:]
    block = max(1, min(n, _ONE_HOT_BYTES // (count * values.dtype.itemsize)))
    blocks = -(-n // block)
    flat = jnp.pad(values.reshape(n, -1), ((0, blocks * block - n), (0, 0)))
    places = jnp.pad(segments, (0, blocks * block - n), constant_values=-1)

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple:
        hot = jax.nn.one_hot(part[1], count, dtype=values.dtype, axis=0)
        # In a product one NaN would be in all sums.
        good = jnp.isfinite(part[0])
        new = jnp.matmul(hot, jnp.where(good, part[0], 0), precision="highest")
        bad = jnp.matmul(hot, (~good).astype(hot.dtype))
        return total + jnp.where(bad > 0, jnp.nan, new), None

    parts = flat.reshape(blocks, block, -1), places.reshape(blocks, block)
    start = vary_like(jnp.zeros((count, flat.shape[1]), values.dtype), parts)
    total, _ = jax.lax.scan(add, start, parts)
    return total.reshape(count, *rest)


def segment_mean(
    values: Float[Array, "n ..."],
    segments: Int[Array, " n"],
    count: int,
    *,
    mask: Bool[Array, " n"] | None = None,
    is_sorted: bool = False,
) -> Float[Array, "count ..."]:
    """Returns the mean over each segment; arguments as for `segment_sum`."""
    live = _count_live(segments, count, mask, is_sorted)
    wide = _widen(values)
    total = segment_sum(wide, segments, count, mask=mask, is_sorted=is_sorted)
    return (total / add_axes(jnp.maximum(live, 1), total)).astype(values.dtype)


def segment_max(
    values: Float[Array, "n ..."],
    segments: Int[Array, " n"],
    count: int,
    *,
    mask: Bool[Array, " n"] | None = None,
    is_sorted: bool = False,
) -> Float[Array, "count ..."]:
    """Returns the largest value of each segment; arguments as for `segment_sum`."""
    _check(values, segments, mask)
    lowest = jnp.array(-jnp.inf, values.dtype)
    if mask is not None:
        values = jnp.where(add_axes(mask, values), values, lowest)
    largest = jax.ops.segment_max(
        values, segments, count, indices_are_sorted=is_sorted, mode="drop"
    )
    live = _count_live(segments, count, mask, is_sorted)
    return jnp.where(add_axes(live, largest) > 0, largest, 0)


def segment_softmax(
    logits: Float[Array, "n ..."],
    segments: Int[Array, " n"],
    count: int,
    *,
    mask: Bool[Array, " n"] | None = None,
    is_sorted: bool = False,
) -> Float[Array, "n ..."]:
    """Returns exp(l_i − m_s) / Σ_{j in s} exp(l_j − m_s), of each value in its segment.

    Args:
      logits: l.
      segments: s of each.
      count: of the segments.
      mask: which values are live; the others have 0. None for all.
      is_sorted: promises that segments do not decrease.

    Examples:
      >>> segment_softmax(jnp.array([1e4, 1e4, -1e4]), jnp.array([0, 0, 1]), 2).tolist()
      [0.5, 0.5, 1.0]
    """
    _check(logits, segments, mask)
    known = (segments >= 0) & (segments < count)
    mask = known if mask is None else known & mask
    how = {"mask": mask, "is_sorted": is_sorted}
    # Before the exponential, whose gradient may be 0 · inf.
    wide = jnp.where(add_axes(mask, logits), _widen(logits), 0)
    largest = jax.lax.stop_gradient(segment_max(wide, segments, count, **how))
    powers = jnp.exp(wide - largest[segments])
    powers = jnp.where(add_axes(mask, powers), powers, 0)
    total = segment_sum(powers, segments, count, is_sorted=is_sorted)
    # A segment's largest value adds 1: only one without live values has less.
    shares = powers / jnp.maximum(total, 0.5)[segments]
    return shares.astype(logits.dtype)


def _check(values: Any, segments: Any, mask: Any) -> None:
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ConfigError(f"values must be floats: got {values.dtype}")
    given = (values, segments) if mask is None else (values, segments, mask)
    sizes = [len(each) for each in given]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"values, segments and mask must be equally many: got {sizes}"
        )


def _widen(values: jax.Array) -> jax.Array:
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def add_axes(few: jax.Array, many: jax.Array) -> jax.Array:
    """Adds axes behind those of `few`, so that it is broadcast over `many`."""
    return few.reshape(few.shape + (1,) * (many.ndim - few.ndim))


def _count_live(
    segments: jax.Array, count: int, mask: jax.Array | None, is_sorted: bool
) -> jax.Array:
    ones = jnp.ones(len(segments), jnp.float32)
    return segment_sum(ones, segments, count, mask=mask, is_sorted=is_sorted)
