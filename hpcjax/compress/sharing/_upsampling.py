"""Weights of a layer that has more of them than its group's store.

Each function maps a store `[P]` to the weights of a layer, `[outputs, ...]`; all are
linear in the store.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Shares of a layer's rows and columns that "inter" reads, the largest first.
SHARES = tuple(Fraction(count, 20) for count in range(19, 0, -1))


def reduced_shapes(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the smaller shapes that a layer may be interpolated from, largest first.

    Both leading axes are cut to p of their length, rounded, halves to even, for
    p = 0.95, 0.90, ..., 0.05, unless one of them would be empty.

    Examples:
      >>> reduced_shapes((4, 2, 3))[-1]
      (1, 1, 3)
    """
    first, second, *rest = shape
    cut = [(round(p * first), round(p * second), *rest) for p in SHARES]
    return [smaller for smaller in cut if min(smaller) >= 1]


def fit_reduced(shape: Sequence[int], numbers: int) -> tuple[int, ...] | None:
    """Returns the largest reduced shape of at most so many numbers, or None.

    Examples:
      >>> fit_reduced((640, 640, 3, 3), 364_612)
      (192, 192, 3, 3)
    """
    fitting = (s for s in reduced_shapes(shape) if math.prod(s) <= numbers)
    return next(fitting, None)


def interpolate(
    store: Float[Array, " p"], reduced: Sequence[int], shape: Sequence[int]
) -> Float[Array, "..."]:
    """Returns the layer that bilinear interpolation makes of a smaller one.

    The beginning of the store is the smaller layer. Both are matrices
    `[outputs, inputs · height · width]`; pixels are areas (half-pixel centres), and
    nothing is smoothed, as in PyTorch with `align_corners=False`.

    Args:
      store: the group's store.
      reduced: shape of the smaller layer.
      shape: of the layer.
    """
    return resize(store[: math.prod(reduced)].reshape(reduced[0], -1), shape)


def resize(
    matrix: Float[Array, "rows columns"], shape: Sequence[int]
) -> Float[Array, "..."]:
    """Returns the layer that bilinear interpolation makes of a matrix, see above."""
    rows = _stretch(matrix, shape[0])
    return _stretch(rows.T, math.prod(shape[1:])).T.reshape(shape)


def _stretch(matrix: jax.Array, length: int) -> jax.Array:
    """Interpolates along axis 0. `jax.image.resize` finds places in float32 only."""
    old = matrix.shape[0]
    places = (np.arange(length) + 0.5) * old / length - 0.5
    places = np.clip(places, 0, old - 1)
    low = places.astype(int)
    share = jnp.asarray((places - low)[:, None], matrix.dtype)
    above = matrix[np.minimum(low + 1, old - 1)]
    return (1 - share) * matrix[low] + share * above


def repeat(store: Float[Array, " p"], shape: Sequence[int]) -> Float[Array, "..."]:
    """Returns copies of the store, one after the other, as far as they are needed."""
    size = math.prod(shape)
    return jnp.tile(store, -(-size // len(store)))[:size].reshape(shape)


def count_copies(size: int, usable: int) -> int:
    """Returns how many copies a store of `usable` numbers needs after the first."""
    return -(-size // usable) - 1


def mask_copies(
    store: Float[Array, " p"],
    masks: Float[Array, "copies window"],
    shape: Sequence[int],
) -> Float[Array, "..."]:
    """Returns the store and further copies of it, each times a learned mask.

    With w numbers in a mask, the first P - P mod w of the store are rows of w numbers.
    The first copy is the store, in copy j each row is multiplied by mask j.

    Args:
      store: the group's store.
      masks: one for each copy after the first.
      shape: of the layer.
    """
    window = masks.shape[1]
    rows = store[: len(store) // window * window].reshape(-1, window)
    copies = masks[:, None, :] * rows
    whole = jnp.concatenate([rows[None], copies]).ravel()
    return whole[: math.prod(shape)].reshape(shape)


def mix_halves(
    store: Float[Array, " p"], mixtures: Float[Array, "rows 2"], shape: Sequence[int]
) -> Float[Array, "..."]:
    """Returns mixtures of the store's halves, a₀ h₀ + a₁ h₁, one after the other.

    Args:
      store: the group's store; of an odd one the last number is left out.
      mixtures: (a₀, a₁) of each.
      shape: of the layer.
    """
    first, second = store[: len(store) // 2 * 2].reshape(2, -1)
    mixed = mixtures[:, :1] * first + mixtures[:, 1:] * second
    return mixed.ravel()[: math.prod(shape)].reshape(shape)
