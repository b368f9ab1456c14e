"""Weighted means."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

Axes = int | tuple[int, ...] | None


def widen(*arrays: Any) -> list[jax.Array]:
    """Returns arrays in their common dtype, at least float32."""
    # Under strict promotion too bfloat16 beside float32 is no mistake here.
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(*arrays, jnp.float32)
    return [jnp.asarray(each).astype(dtype) for each in arrays]


def widen_points(**arrays: Any) -> list[jax.Array]:
    """Returns arrays as `widen`, checked: of one shape, or scalars, which are for all.

    Raises:
      ConfigError: arrays of several shapes.
    """
    wide = widen(*arrays.values())
    named = zip(arrays, wide, strict=True)
    checks.require_same_shape(**{name: each for name, each in named if each.ndim})
    return wide


def widen_members(members: Any, observed: Any, axis: int) -> list[jax.Array]:
    """Returns both as `widen`, checked: what is observed has all axes but the members'.

    Raises:
      ConfigError: another shape.
    """
    members, observed = widen(members, observed)
    rule = f"observed must have the shape of members without axis {axis}"
    good = observed.shape == tuple(np.delete(members.shape, axis))
    checks.require(good, rule, members=members.shape, observed=observed.shape)
    return [members, observed]


def broadcast(name: str, array: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of a shape, or raises ConfigError with its name."""
    try:
        return jnp.broadcast_to(jnp.asarray(array), shape)
    except ValueError as error:
        own, wanted = list(jnp.shape(array)), list(shape)
        raise ConfigError(f"{name} {own} do not fit values {wanted}") from error


def weighted_sums(
    values: Float[Array, "..."], weights: Float[Array, "..."], axis: Axes = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns Σ w v and Σ w, at least in float32.

    Of several parts of the data, on devices or in chunks, both are to be added up, and
    then divided: a mean of the parts' means would count small parts too much. An item
    of weight zero is ignored even if its value is not finite.

    Args:
      values: v.
      weights: w, non-negative, broadcast against `values`.
      axis: over which axes; None means all.

    Raises:
      ConfigError: weights that do not fit, or against which values would be broadcast.

    Examples:
      >>> sums = weighted_sums(jnp.array([1.0, jnp.nan]), jnp.array([2.0, 0.0]))
      >>> [float(each) for each in sums]
      [2.0, 2.0]
    """
    wide, weights = widen(values, weights)
    weights = broadcast("weights", weights, wide.shape)
    # A product alone would let 0 · NaN and 0 · ∞ into the sum.
    scored = jnp.where(weights > 0, wide, 0)
    return jnp.sum(scored * weights, axis=axis), jnp.sum(weights, axis=axis)


def weighted_mean(
    values: Float[Array, "..."],
    weights: Float[Array, "..."] | None = None,
    axis: Axes = None,
) -> Float[Array, "..."]:
    """Returns Σ w v / Σ w, see `weighted_sums`; NaN when every weight is zero.

    Args:
      values: v.
      weights: w, non-negative, broadcast against `values`; None means all ones.
      axis: over which axes; None means all.

    Examples:
      >>> float(weighted_mean(jnp.array([1.0, jnp.nan]), jnp.array([1.0, 0.0])))
      1.0
    """
    if weights is None:
        return jnp.mean(*widen(values), axis=axis)
    total, weight = weighted_sums(values, weights, axis)
    return total / weight


def member_moments(
    members: Float[Array, "..."], axis: int, ddof: int
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns mean and variance of members along an axis.

    Both are of differences from the first member, since the mean of large values would
    be rounded. Members are added one by one, which XLA makes one loop over points of;
    its reduction over a leading axis takes seven times as long on a CPU.

    Args:
      members: x, M along `axis`.
      axis: of the members.
      ddof: what is taken from M in the variance.

    Examples:
      >>> mean, variance = member_moments(jnp.array([[1.0], [3.0]]), 0, 1)
      >>> mean.tolist(), variance.tolist()
      ([2.0], [2.0])
    """
    first, *others = jnp.moveaxis(members, axis, 0)
    apart = [jnp.zeros_like(first), *(other - first for other in others)]
    mean = functools.reduce(jnp.add, apart) / len(apart)
    squares = functools.reduce(jnp.add, [(each - mean) ** 2 for each in apart])
    return first + mean, squares / (len(apart) - ddof)
