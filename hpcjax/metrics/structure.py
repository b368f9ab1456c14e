"""Structural similarity of pairs of fields, at one scale and at several."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.metrics.means import widen

_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def ssim(
    first: Float[Array, "*batch height width"],
    second: Float[Array, "*batch height width"],
    *,
    data_range: float,
    window: int = 11,
    sigma: float = 1.5,
) -> Float[Array, "*batch"]:
    """Returns the mean structural similarity of pairs of fields, 1 if they are equal.

    (2 μ₁μ₂ + c₁)(2 σ₁₂ + c₂) / ((μ₁² + μ₂² + c₁)(σ₁² + σ₂² + c₂)), of means, variances
    and covariance under a Gaussian window that lies within the field, c₁ = (0.01 L)²
    and c₂ = (0.03 L)².

    Args:
      first: `[..., height, width]`.
      second: likewise.
      data_range: L, from the least to the largest possible value.
      window: taps of the window, along both sides.
      sigma: its standard deviation.

    Raises:
      ValueError: a field smaller than the window.

    References:
      Wang, Bovik, Sheikh, Simoncelli, IEEE Trans. Image Processing 13, 2004.

    Examples:
      >>> field = jnp.arange(16.0).reshape(4, 4)
      >>> float(ssim(field, field, data_range=15.0, window=3))
      1.0
    """
    light, shape = _compare(first, second, data_range, window, sigma)
    return jnp.mean(light * shape, axis=(-2, -1))


def ms_ssim(
    first: Float[Array, "*batch height width"],
    second: Float[Array, "*batch height width"],
    *,
    data_range: float,
    scales: int = 5,
    window: int = 11,
    sigma: float = 1.5,
) -> Float[Array, "*batch"]:
    """Returns the structural similarity of pairs of fields at several scales.

    Π c_j^{w_j} · s^{w}, of the mean contrast and structure c at each scale but the
    coarsest, and of `ssim` s at that. Scales are means of 2×2 points of the one before,
    what is below zero is zero, and of fewer than five scales the first weights count,
    divided by their sum.

    Args:
      first: `[..., height, width]`.
      second: likewise.
      data_range: from the least to the largest possible value.
      scales: at most 5.
      window: taps of the window, along both sides.
      sigma: its standard deviation.

    Raises:
      ConfigError: fields too small, or too many scales.

    References:
      Wang, Simoncelli, Bovik, Asilomar Conference on Signals 37, 2003.

    Examples:
      >>> field = jnp.arange(400.0).reshape(20, 20)
      >>> options = {"scales": 3, "window": 5, "sigma": 1.0}
      >>> float(ms_ssim(field, field, data_range=399.0, **options))
      1.0
    """
    rule = f"scales must be from 1 to {len(_WEIGHTS)}"
    checks.require(1 <= scales <= len(_WEIGHTS), rule, scales=scales)
    # Sides are halved and rounded up before each further scale.
    sides, least = first.shape[-2:], 2 ** (scales - 1) * (window - 1) + 1
    checks.require(
        min(sides) >= least,
        f"MS-SSIM of {scales} scales and {window} taps needs {least} points a side"
        + ("; three scales of five taps need 17" if least > 17 else ""),
        sides=sides,
    )
    weights = np.array(_WEIGHTS[:scales]) / sum(_WEIGHTS[:scales])
    product: Any = 1.0
    for scale, weight in enumerate(weights.tolist()):
        light, shape = _compare(first, second, data_range, window, sigma)
        last = scale == scales - 1
        mean = jnp.mean(light * shape if last else shape, axis=(-2, -1))
        # At zero a root's slope would be infinite.
        product = product * jnp.maximum(mean, 1e-6) ** weight
        first, second = _halve(first), _halve(second)
    return product


def _halve(field: jax.Array) -> jax.Array:
    rows, columns = (side + side % 2 for side in field.shape[-2:])
    width = [(0, 0)] * (field.ndim - 2)
    width += [(0, rows - field.shape[-2]), (0, columns - field.shape[-1])]
    wide = jnp.pad(field, width, mode="edge")
    parts = wide.reshape(*field.shape[:-2], rows // 2, 2, columns // 2, 2)
    return parts.mean((-3, -1))


def _compare(
    first: Any, second: Any, data_range: float, window: int, sigma: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the similarity of means, and of contrast and structure, at each point."""
    checks.require_same_shape(first=first, second=second)
    first, second = widen(first, second)
    if min(first.shape[-2:]) < window:
        raise ValueError(
            f"fields must have at least window={window} points on both sides: got "
            f"{first.shape[-2:]}"
        )
    taps = np.exp(-0.5 * ((np.arange(window) - (window - 1) / 2) / sigma) ** 2)
    taps = jnp.asarray(taps / taps.sum(), first.dtype)

    def blur(field: jax.Array) -> jax.Array:
        for axis in (-2, -1):
            size = field.shape[axis] - window + 1
            parts = [
                tap * jax.lax.slice_in_dim(field, at, at + size, axis=axis)
                for at, tap in enumerate(taps)
            ]
            field = functools.reduce(jnp.add, parts)
        return field

    # About the first field's mean, since squares of large offsets would cancel.
    level = jnp.mean(first, axis=(-2, -1), keepdims=True)
    x, y = first - level, second - level
    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x**2, blur(y * y) - mean_y**2
    both = blur(x * y) - mean_x * mean_y
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    mean_x, mean_y = mean_x + level, mean_y + level
    light = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return light, (2 * both + c2) / (var_x + var_y + c2)
