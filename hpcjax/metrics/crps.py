"""Scores of distributions: CRPS of Gaussians and ensembles, and the extreme index.

All are computed in float32, or in float64 if an input is, point by point.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from hpcjax.core import checks
from hpcjax.metrics.means import widen, widen_members, widen_points

Estimator = Literal["fair", "unfair", "almost_fair"]
ESTIMATORS = ("fair", "unfair", "almost_fair")
# The quantiles of a climate, as ENS-10 has them.
CLIMATE_QUANTILES = 21
# Sorting networks of more members take long to compile, and `jnp.sort` is then used,
# which on a CPU takes 50 times as long for 50 members and 90 times as long for 10.
_NETWORK = 64
_ROOT_PI, _ROOT_TWO = math.sqrt(math.pi), math.sqrt(2)


def crps_gaussian(
    mean: Float[Array, "*#points"],
    std: Float[Array, "*#points"],
    observed: Float[Array, "*#points"],
) -> Float[Array, "*points"]:
    """Returns the continuous ranked probability score of N(mean, std²), by point.

    σ [z (2 Φ(z) − 1) + 2 φ(z) − 1/√π] with z = (μ − y) / σ, which for σ = 0 is |μ − y|.
    Its derivatives are those of the closed form, 2 Φ(z) − 1 by μ and 2 φ(z) − 1/√π by
    σ, finite everywhere.

    Args:
      mean: μ.
      std: σ, not negative; under `jit` a negative one counts as zero.
      observed: y. All three have one shape; a scalar is for all points.

    Returns:
      The score, in the unit of `observed`; less is better.

    Raises:
      ConfigError: arrays of several shapes.
      ValueError: a σ below zero, outside of traced code.

    References:
      Gneiting, Raftery, Westveld, Goldman, Monthly Weather Review 133, 2005, eq. 5.

    Examples:
      >>> score = crps_gaussian(jnp.zeros(2), jnp.ones(2), jnp.array([0.0, 1.0]))
      >>> [round(float(each), 4) for each in score]
      [0.2337, 0.6024]
    """
    mean, std, observed = widen_points(mean=mean, std=std, observed=observed)
    _check_std(std)
    return _crps_gaussian(mean - observed, std)


def _check_std(std: jax.Array) -> None:
    if isinstance(std, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        negative = bool(jnp.any(std < 0))
    if negative:
        raise ValueError(f"std must not be negative: got {float(jnp.min(std)):g}")


def _density(z: jax.Array) -> jax.Array:
    return jnp.exp(-0.5 * z * z) / (_ROOT_TWO * _ROOT_PI)


def _standardize(distance: jax.Array, std: jax.Array) -> jax.Array:
    # Of a σ of zero z is infinite, or zero where the distance is, and nothing is NaN.
    return distance / jnp.maximum(std, jnp.finfo(std.dtype).tiny)


@jax.custom_jvp
def _crps_gaussian(distance: jax.Array, std: jax.Array) -> jax.Array:
    z = _standardize(distance, std)
    # erf keeps the digits of small z that 2 Φ(z) − 1 cancels.
    above = jnp.abs(distance) * jax.scipy.special.erf(jnp.abs(z) / _ROOT_TWO)
    spread = 2 * _density(z) - 1 / _ROOT_PI
    return above + jnp.maximum(std, 0) * spread


@_crps_gaussian.defjvp
def _crps_gaussian_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    # By autodiff the terms in φ' would have to cancel, z φ(z) + φ'(z) = 0.
    z = _standardize(*primals)
    by_mean = jax.scipy.special.erf(z / _ROOT_TWO)
    by_std = 2 * _density(z) - 1 / _ROOT_PI
    slope = by_mean * tangents[0] + by_std * tangents[1]
    return _crps_gaussian(*primals), slope


def crps_censored_gaussian(
    mean: Float[Array, "*#points"],
    std: Float[Array, "*#points"],
    observed: Float[Array, "*#points"],
) -> Float[Array, "*points"]:
    """Returns the CRPS of max(0, X) with X from N(mean, std²), such as of rain.

    With z = (y − μ)/σ and c = −μ/σ it is the Gaussian's score less σ A(c), A(u) = ∫Φ²
    up to u = u Φ(u)² + 2 φ(u) Φ(u) − Φ(√2 u)/√π. Where it is likely dry, c > 0, these
    cancel, and the same is computed as y + σ (A(−c) + 2 (B(z) − B(c))), B(u) = ∫(1 − Φ)
    from u on = φ(u) − u Φ(−u).

    Args:
      mean: μ.
      std: σ, positive.
      observed: y, not negative.

    References:
      Thorarinsdottir, Gneiting, J. R. Stat. Soc. A 173, 2010; Jordan, Krüger, Lerch,
      Journal of Statistical Software 90, 2019, appendix.

    Examples:
      >>> dry = crps_censored_gaussian(jnp.zeros(()), jnp.ones(()), jnp.zeros(()))
      >>> float(dry) < float(crps_gaussian(jnp.zeros(()), jnp.ones(()), jnp.zeros(())))
      True
    """
    mean, std, observed = widen_points(mean=mean, std=std, observed=observed)
    _check_std(std)
    z, c = _standardize(observed - mean, std), _standardize(-mean, std)
    wet = _crps_gaussian(mean - observed, std) - std * _integrate_below(c)
    tails = _integrate_below(-c) + 2 * (_integrate_above(z) - _integrate_above(c))
    return jnp.where(c > 0, observed + std * tails, wet)


def _integrate_below(u: jax.Array) -> jax.Array:
    """Returns ∫ Φ² up to u."""
    below, root = (jax.scipy.special.ndtr(each) for each in (u, _ROOT_TWO * u))
    return u * below**2 + 2 * _density(u) * below - root / _ROOT_PI


def _integrate_above(u: jax.Array) -> jax.Array:
    """Returns ∫ (1 − Φ) from u on."""
    return _density(u) - u * jax.scipy.special.ndtr(-u)


def crps_ensemble(
    members: Float[Array, "..."],
    observed: Float[Array, "..."],
    *,
    axis: int = -1,
    estimator: Estimator = "fair",
    alpha: float = 0.95,
) -> Float[Array, "..."]:
    """Returns the continuous ranked probability score of an ensemble, by point.

    mean_i |x_i − y| − s Σ_ij |x_i − x_j| with s = 1/(2 M²), the score of the members'
    empirical distribution ("unfair"), or 1/(2 M (M − 1)), its unbiased estimate for the
    distribution that they are drawn from ("fair"), or α times this plus 1 − α times
    that ("almost_fair").

    Both are sums over the gaps between sorted members, x_(k) to x_(k+1), of their parts
    below and above y: k² and (M − k)² over M² for the unfair one, k (k − 1) and (M − k)
    (M − k − 1) over M (M − 1) for the fair one, plus how far y is outside. No term is
    negative, so that nothing cancels, however large the values' offset.

    Args:
      members: x, M along `axis`.
      observed: y, of the other axes.
      axis: of the members.
      estimator: "fair", "unfair" or "almost_fair".
      alpha: α, in [0, 1].

    Returns:
      The score, in the unit of `observed`; less is better.

    Raises:
      ConfigError: what is observed has other axes.
      ValueError: an unknown estimator, an α outside [0, 1], no member, or a single one
        with an estimator that divides by M − 1.

    References:
      Ferro, Q. J. R. Meteorol. Soc. 140, 2014, "fair"; Lang et al., AIFS-CRPS, 2024.

    Examples:
      >>> x, y = jnp.array([1.0, 2.0, 4.0]), jnp.array(3.0)
      >>> [round(float(crps_ensemble(x, y, estimator=e)), 4) for e in ESTIMATORS[:2]]
      [0.3333, 0.6667]
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {ESTIMATORS}: got {estimator!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1]: got alpha={alpha}")
    members, y = widen_members(members, observed, axis)
    count = members.shape[axis]
    least = 1 if estimator == "unfair" else 2
    if count < least:
        raise ValueError(
            f"{estimator} CRPS needs at least {least} members, got {count}"
        )
    fairness = {"fair": 1.0, "unfair": 0.0, "almost_fair": alpha}[estimator]
    ordered = _sort(jnp.moveaxis(members, axis, 0))
    score = jnp.maximum(ordered[0] - y, 0) + jnp.maximum(y - ordered[-1], 0)
    for k in range(1, count):
        lower, upper = ordered[k - 1], ordered[k]
        middle = jnp.clip(y, lower, upper)
        score += _weigh(k, count, fairness) * (middle - lower)
        score += _weigh(count - k, count, fairness) * (upper - middle)
    return score


def _weigh(k: int, count: int, fairness: float) -> float:
    """Returns the weight of a gap on whose far side from y there are k members."""
    fair = k * (k - 1) / (count * (count - 1))
    return fairness * fair + (1 - fairness) * (k / count) ** 2


def _sort(members: jax.Array) -> list[jax.Array]:
    """Returns the members in order, `[members, ...]` as a list."""
    count = len(members)
    if count > _NETWORK:
        return list(jnp.sort(members, axis=0))
    ordered = list(members)
    for stage in sorting_network(count):
        for low, high in stage:
            pair = ordered[low], ordered[high]
            ordered[low], ordered[high] = jnp.minimum(*pair), jnp.maximum(*pair)
        # Without, XLA makes one loop of all stages and computes much of it again.
        ordered = list(jax.lax.optimization_barrier(tuple(ordered)))
    return ordered


def sorting_network(count: int) -> list[list[tuple[int, int]]]:
    """Returns stages of pairs whose exchange, the less first, sorts `count` numbers.

    The pairs of a stage have no number in common.

    References:
      Knuth, The Art of Computer Programming 3, algorithm 5.2.2 M (Batcher).

    Examples:
      >>> sorting_network(3)
      [[(0, 2)], [(0, 1)], [(1, 2)]]
    """
    top = 1 << max(0, (count - 1).bit_length() - 1)
    stages, p = [], top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            stages.append([(i, i + d) for i in range(count - d) if i & p == r])
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return stages


def efi(
    members: Float[Array, "*points members"],
    climate: Float[Array, "*points quantiles"],
    *,
    method: Literal["exact", "paper"] = "exact",
) -> Float[Array, "*points"]:
    """Returns the extreme forecast index, in [−1, 1]: how far a forecast is from usual.

    EFI = (2/π) ∫₀¹ (p − F(p)) / √(p (1 − p)) dp, F(p) being the share of members below
    the climate's quantile of p.

    "exact" is the integral of that step function, (4/π) mean_i arcsin √r_i − 1, where
    r_i is the member's rank in the climate, linear between quantiles, and where several
    quantiles are equal the middle of theirs. "paper" is ENS-10's sum over 19 quantiles
    of 0.05 (p − F(p)) / √(p (1 − p)), in which F is rounded up to the next 0.05: it
    reaches ±0.7914 only, and is −0.04 on average where the forecast is the climate's.

    Args:
      members: along the last axis.
      climate: quantiles of equally spaced p from 0 to 1, along the last axis, in order;
        21 of them for "paper".
      method: "exact" or "paper".

    Raises:
      ConfigError: a climate of other points.
      ValueError: an unknown method, or a number of quantiles that it does not take.

    References:
      Zsótér, ECMWF Newsletter 107, 2006; Ashkboos et al., ENS-10, 2022.

    Examples:
      >>> usual = jnp.linspace(0.0, 1.0, 21)
      >>> round(float(efi(jnp.array([2.0, 3.0]), usual)), 3)
      1.0
    """
    if method not in ("exact", "paper"):
        raise ValueError(f"method must be 'exact' or 'paper': got {method!r}")
    quantiles = climate.shape[-1]
    if quantiles < 2 or (method == "paper" and quantiles != CLIMATE_QUANTILES):
        raise ValueError(
            f"climate must have {CLIMATE_QUANTILES} quantiles, or for 'exact' at least "
            f"2: got {quantiles}"
        )
    members, climate = widen(members, climate)
    rule = "climate must be of the members' points"
    good = climate.shape[:-1] == members.shape[:-1]
    checks.require(good, rule, members=members.shape, climate=climate.shape)
    if method == "paper":
        return _paper_efi(members, climate)
    ranks = _rank(members, climate)
    exact = jnp.mean(4 / math.pi * jnp.arcsin(jnp.sqrt(ranks)) - 1, axis=-1)
    return jnp.where(jnp.isnan(climate).any(-1), jnp.nan, exact)


def _rank(x: jax.Array, climate: jax.Array) -> jax.Array:
    """Returns the rank in [0, 1] of each x `[..., members]` among the quantiles."""
    top = climate.shape[-1] - 1
    below = jnp.sum(climate[..., None, :] < x[..., None], axis=-1)
    not_above = jnp.sum(climate[..., None, :] <= x[..., None], axis=-1)
    low = jnp.clip(below - 1, 0, top)
    left = jnp.take_along_axis(climate, low, axis=-1)
    right = jnp.take_along_axis(climate, jnp.clip(below, 0, top), axis=-1)
    gap = jnp.where(right > left, right - left, 1)
    between = low.astype(x.dtype) + jnp.clip((x - left) / gap, 0, 1)
    equal = (below + not_above - 1).astype(x.dtype) / 2
    return jnp.where(not_above > below, equal, jnp.minimum(between, top)) / top


def _paper_efi(members: jax.Array, climate: jax.Array) -> jax.Array:
    p = np.arange(CLIMATE_QUANTILES) / (CLIMATE_QUANTILES - 1)
    dtype = members.dtype
    own = jnp.quantile(members, jnp.asarray(p[:-1], dtype), axis=-1)
    own, inner = jnp.moveaxis(own, 0, -1)[..., None], climate[..., None, 1:-1]
    below = 0.05 * jnp.sum(own < inner, axis=-2).astype(dtype)
    weights = 2 / math.pi * 0.05 / np.sqrt(p[1:-1] * (1 - p[1:-1]))
    terms = (jnp.asarray(p[1:-1], dtype) - below) * jnp.asarray(weights, dtype)
    unknown = jnp.isnan(members).any(-1) | jnp.isnan(climate).any(-1)
    return jnp.where(unknown, jnp.nan, jnp.sum(terms, axis=-1))


def eecrps(
    crps: Float[Array, "*#points"],
    efi: Float[Array, "*#points"],
    where: Bool[Array, "*#points"] | None = None,
) -> Float[Array, ""]:
    """Returns mean(|EFI| · CRPS), the score that counts where weather is extreme.

    It is the mean of the product, not divided by the mean of |EFI|. Points without an
    EFI, which is NaN there, are left out, as are those where `where` is false.

    Args:
      crps: of each point.
      efi: its index, or NaN.
      where: which points count; None for all that have an EFI.

    Raises:
      ConfigError: arrays of several shapes.

    Examples:
      >>> score = eecrps(jnp.array([1.0, 2.0, 9.0]), jnp.array([-1.0, 0.5, jnp.nan]))
      >>> float(score)
      1.0
    """
    checks.require_same_shape(crps=crps, efi=efi, where=efi if where is None else where)
    crps, efi = widen(crps, efi)
    kept = ~jnp.isnan(efi) if where is None else where & ~jnp.isnan(efi)
    product = jnp.where(kept, jnp.abs(jnp.where(kept, efi, 0)) * crps, 0)
    return jnp.sum(product) / jnp.sum(kept).astype(product.dtype)
