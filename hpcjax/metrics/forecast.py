"""Scores of forecasts on a grid, whose every convention is an argument.

Fields are `[..., latitude, longitude]`. Weights are broadcast against them, such as
`latitude_weights(...)[:, None]`; where a weight is zero a value may be NaN.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpcjax.core import checks
from hpcjax.metrics.grids import are_radians
from hpcjax.metrics.means import (
    Axes,
    broadcast,
    member_moments,
    weighted_mean,
    widen,
    widen_members,
    widen_points,
)

WeightKind = Literal["cos", "cell_area"]
Order = Literal["sqrt_last", "sqrt_per_time"]


def latitude_weights(
    latitude: Float[np.ndarray, " latitude"], kind: WeightKind = "cell_area"
) -> Float[np.ndarray, " latitude"]:
    """Returns weights of latitudes, whose mean is 1, in float64.

    "cos" is cos φ, WeatherBench 1's. "cell_area" is sin of the upper minus sin of the
    lower bound of a cell, WeatherBench 2's: midpoints, and at the ends ±90°, or where
    that is further than one and a half cells, as of a region, half a cell.
    Away from the poles on an equally spaced grid they are the same; at a pole "cos" is
    zero, and the other is not.

    Args:
      latitude: φ in degrees, in order, in either direction.
      kind: "cos" or "cell_area".

    Raises:
      ValueError: an unknown kind, latitudes outside [−90, 90] or not in order, or such
        as are radians.

    Examples:
      >>> latitude_weights(np.array([-60.0, 0.0, 60.0]), "cos").round(2).tolist()
      [0.75, 1.5, 0.75]
    """
    if kind not in ("cos", "cell_area"):
        raise ValueError(f"kind must be 'cos' or 'cell_area': got {kind!r}")
    latitude = np.asarray(latitude, np.float64)
    _check_latitude(latitude)
    if latitude.size == 1:
        return np.ones(1)
    if kind == "cos":
        weights = np.maximum(np.cos(np.deg2rad(latitude)), 0)
    else:
        middles = (latitude[1:] + latitude[:-1]) / 2
        bounds = np.concatenate([_end(latitude), middles, _end(latitude[::-1])])
        weights = np.abs(np.diff(np.sin(np.deg2rad(bounds))))
    return weights / weights.mean()


def _end(latitude: np.ndarray) -> list[float]:
    """Returns the outer bound of the first of some latitudes."""
    step = latitude[0] - latitude[1]
    pole = np.copysign(90.0, step)
    near = abs(pole - latitude[0]) <= 1.5 * abs(step)
    return [pole if near else latitude[0] + step / 2]


def _check_latitude(latitude: np.ndarray) -> None:
    if latitude.ndim != 1 or latitude.size == 0:
        raise ValueError(f"latitude must be one axis: got shape {latitude.shape}")
    most = np.abs(latitude).max()
    if not most <= 90:
        raise ValueError(f"latitude must be in [-90, 90] degrees: got {most:g}")
    steps = np.diff(latitude)
    if steps.size and not (np.all(steps > 0) or np.all(steps < 0)):
        raise ValueError("latitude must be in order, from one pole to the other")
    if are_radians(latitude):
        raise ValueError(
            f"latitude must be in degrees: got {latitude.min():.3f} to "
            f"{latitude.max():.3f}, which are radians"
        )


def rmse(
    forecast: Float[Array, "..."],
    truth: Float[Array, "..."],
    weights: Float[Array, "..."] | None = None,
    *,
    order: Order = "sqrt_last",
) -> Float[Array, ""]:
    """Returns the root of the weighted mean of squared errors.

    Args:
      forecast: values `[..., latitude, longitude]`.
      truth: likewise.
      weights: of points.
      order: "sqrt_last", √ of the mean over all axes; or "sqrt_per_time", the mean over
        all axes but the last two of the √ of their mean, which is never more.

    Raises:
      ValueError: an unknown order.

    Examples:
      >>> truth = jnp.zeros((2, 1, 1))
      >>> forecast = jnp.array([[[1.0]], [[7.0]]])
      >>> float(rmse(forecast, truth)), float(rmse(forecast, truth,
      ...   order="sqrt_per_time"))
      (5.0, 4.0)
    """
    squares = _error(forecast, truth, weights) ** 2
    if order == "sqrt_last":
        return jnp.sqrt(weighted_mean(squares, weights))
    if order == "sqrt_per_time":
        return jnp.mean(jnp.sqrt(weighted_mean(squares, weights, (-2, -1))))
    raise ValueError(f"order must be 'sqrt_last' or 'sqrt_per_time': got {order!r}")


def _error(
    forecast: jax.Array, truth: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns forecast − truth, zero where the weight is, so that slopes are too."""
    checks.require_same_shape(forecast=forecast, truth=truth)
    forecast, truth = widen(forecast, truth)
    error = forecast - truth
    if weights is None:
        return error
    return jnp.where(broadcast("weights", weights, error.shape) > 0, error, 0)


def mae(
    forecast: Float[Array, "..."],
    truth: Float[Array, "..."],
    weights: Float[Array, "..."] | None = None,
) -> Float[Array, ""]:
    """Returns the weighted mean of absolute errors.

    Examples:
      >>> float(mae(jnp.array([1.0, -3.0]), jnp.zeros(2)))
      2.0
    """
    return weighted_mean(jnp.abs(_error(forecast, truth, weights)), weights)


def bias(
    forecast: Float[Array, "..."],
    truth: Float[Array, "..."],
    weights: Float[Array, "..."] | None = None,
) -> Float[Array, ""]:
    """Returns the weighted mean of forecast − truth.

    Examples:
      >>> float(bias(jnp.array([1.0, -3.0]), jnp.zeros(2)))
      -1.0
    """
    return weighted_mean(_error(forecast, truth, weights), weights)


def acc(
    forecast: Float[Array, "time latitude longitude"],
    truth: Float[Array, "time latitude longitude"],
    climatology: Float[Array, "..."] | None = None,
    weights: Float[Array, "..."] | None = None,
    *,
    variant: Literal["wb1", "wb2"] = "wb2",
) -> Float[Array, ""]:
    """Returns the anomaly correlation, Σ w f' a' / √(Σ w f'² · Σ w a'²).

    "wb2": f' and a' are forecast and truth less `climatology`; the ratio is of sums
    over space, and its mean over times is returned. "wb1": less the truth's mean over
    time, and each then less its own unweighted mean; the sums are over everything.

    Args:
      forecast: `[time, latitude, longitude]`.
      truth: likewise.
      climatology: of "wb2" alone, broadcast against `truth`.
      weights: of points.
      variant: "wb1" or "wb2".

    Raises:
      ValueError: an unknown variant, or one with the wrong kind of climatology.

    References:
      WeatherBench, Rasp et al. 2020; WeatherBench 2, Rasp et al. 2024.

    Examples:
      >>> truth = jnp.array([[[1.0, 2.0]], [[3.0, 5.0]]])
      >>> float(acc(truth, truth, jnp.zeros((1, 2))))
      1.0
    """
    if variant not in ("wb1", "wb2"):
        raise ValueError(f"variant must be 'wb1' or 'wb2': got {variant!r}")
    if (climatology is None) != (variant == "wb1"):
        raise ValueError(
            f"{variant} takes {'a' if variant == 'wb2' else 'no'} climatology"
        )
    checks.require_same_shape(forecast=forecast, truth=truth)
    forecast, truth = widen(forecast, truth)
    if climatology is None:
        usual = jnp.mean(truth, axis=0)
        kept = jnp.ones(truth.shape, bool)
        if weights is not None:
            kept = jnp.broadcast_to(jnp.asarray(weights) > 0, truth.shape)
        f, a = (
            each - jnp.mean(each, where=kept)
            for each in (forecast - usual, truth - usual)
        )
        return _correlate(f, a, weights, None)
    usual = broadcast("climatology", climatology, truth.shape).astype(truth.dtype)
    return jnp.mean(_correlate(forecast - usual, truth - usual, weights, (-2, -1)))


def _correlate(
    f: jax.Array, a: jax.Array, weights: jax.Array | None, axis: Axes
) -> jax.Array:
    both = weighted_mean(f * a, weights, axis)
    own = weighted_mean(f * f, weights, axis) * weighted_mean(a * a, weights, axis)
    return both / jnp.sqrt(own)


def percent_close(
    forecast: Float[Array, "..."],
    truth: Float[Array, "..."],
    *,
    rtol: float,
    atol: float = 1e-8,
    weights: Float[Array, "..."] | None = None,
) -> Float[Array, ""]:
    """Returns the percentage of points with |f − t| ≤ atol + rtol |t|; NaN if one is.

    Args:
      forecast: f.
      truth: t.
      rtol: relative part of the tolerance.
      atol: absolute part.
      weights: of points, such as 1 in a region and 0 outside.

    Examples:
      >>> float(percent_close(jnp.array([1.0, 1.2]), jnp.ones(2), rtol=0.1))
      50.0
    """
    checks.require_finite(0.0, rtol=rtol, atol=atol)
    checks.require_same_shape(forecast=forecast, truth=truth)
    forecast, truth = widen(forecast, truth)
    return 100 * weighted_mean(is_close(forecast, truth, rtol, atol), weights)


def is_close(
    forecast: jax.Array, truth: jax.Array, rtol: float, atol: float = 0.0
) -> jax.Array:
    """Returns 1 where |f − t| ≤ atol + rtol |t|, else 0; NaN where either is."""
    apart = jnp.abs(forecast - truth)
    return jnp.where(jnp.isnan(apart), apart, apart <= atol + rtol * jnp.abs(truth))


def spread(
    members: Float[Array, "..."],
    weights: Float[Array, "..."] | None = None,
    *,
    axis: int = 0,
) -> Float[Array, ""]:
    """Returns √ of the weighted mean of the members' variance, of M − 1.

    Args:
      members: at least two along `axis`.
      weights: of points.
      axis: of the members.

    Raises:
      ValueError: fewer than two members.

    Examples:
      >>> float(spread(jnp.array([1.0, 3.0])[:, None]).round(3))
      1.4140000343322754
    """
    (members,) = widen(members)
    if members.shape[axis] < 2:
        raise ValueError(f"spread needs at least 2 members, got {members.shape[axis]}")
    return jnp.sqrt(weighted_mean(member_moments(members, axis, 1)[1], weights))


def spread_skill_ratio(
    members: Float[Array, "..."],
    observed: Float[Array, "..."],
    weights: Float[Array, "..."] | None = None,
    *,
    axis: int = 0,
    finite_correction: bool = True,
) -> Float[Array, ""]:
    """Returns √((M + 1)/M) · spread / RMSE of the members' mean.

    Of a reliable ensemble it is 1, whatever M is; of one that is too sure, less.

    Args:
      members: at least two along `axis`.
      observed: of the other axes.
      weights: of points.
      axis: of the members.
      finite_correction: whether √((M + 1)/M) is there.

    References:
      Fortin et al., Journal of Hydrometeorology 15, 2014.

    Examples:
      >>> members = jnp.array([[0.0], [2.0]])
      >>> round(float(spread_skill_ratio(members, jnp.array([3.0]))), 3)
      0.866
    """
    members, observed = widen_members(members, observed, axis)
    count = members.shape[axis]
    error, _ = member_moments(members - jnp.expand_dims(observed, axis), axis, 1)
    skill = rmse(error, jnp.zeros_like(error), weights)
    factor = math.sqrt((count + 1) / count) if finite_correction else 1.0
    return factor * spread(members, weights, axis=axis) / skill


def rank_histogram(
    members: Float[Array, "..."],
    observed: Float[Array, "..."],
    key: jax.Array,
    *,
    axis: int = 0,
) -> Int[Array, " bins"]:
    """Returns how often the observation has each rank among the M members, [M + 1].

    The rank is #{x_i < y}, plus a number that is drawn from 0 to #{x_i = y}: ties count
    at random. Of a reliable ensemble all ranks are equally frequent.

    Cases of which a number is NaN are not counted.

    Args:
      members: along `axis`.
      observed: of the other axes.
      key: of the draws.
      axis: of the members.

    References:
      Hamill, Monthly Weather Review 129, 2001.

    Examples:
      >>> members = jnp.array([[1.0], [2.0]])
      >>> rank_histogram(members, jnp.array([1.5]), jax.random.key(0)).tolist()
      [0, 1, 0]
    """
    members, observed = widen_members(members, observed, axis)
    members = jnp.moveaxis(members, axis, 0)
    ties = jnp.sum(members == observed, axis=0)
    share = jax.random.uniform(key, ties.shape)
    drawn = jnp.floor(share * (ties + 1).astype(share.dtype)).astype(ties.dtype)
    ranks = jnp.sum(members < observed, axis=0) + jnp.minimum(drawn, ties)
    known = ~(jnp.isnan(members).any(0) | jnp.isnan(observed))
    return _count(ranks, known, len(members) + 1)


def _count(parts: jax.Array, known: jax.Array, length: int) -> jax.Array:
    counted = known.ravel().astype(jnp.int32)
    return jnp.bincount(parts.ravel(), weights=counted, length=length)


def pit_histogram(
    mean: Float[Array, "*#points"],
    std: Float[Array, "*#points"],
    observed: Float[Array, "*#points"],
    *,
    bins: int = 10,
) -> Int[Array, " bins"]:
    """Returns how often Φ((y − μ)/σ) is in each of `bins` equal parts of [0, 1].

    Cases of which it is NaN are not counted.

    Examples:
      >>> mean, std = jnp.zeros(3), jnp.ones(3)
      >>> pit_histogram(mean, std, jnp.array([-2.0, 0.1, 2.0]), bins=2).tolist()
      [1, 2]
    """
    checks.require_count(1, bins=bins)
    mean, std, observed = widen_points(mean=mean, std=std, observed=observed)
    place = jax.scipy.special.ndtr((observed - mean) / std)
    part = jnp.clip((place * bins).astype(jnp.int32), 0, bins - 1)
    return _count(part, ~jnp.isnan(place), bins)
