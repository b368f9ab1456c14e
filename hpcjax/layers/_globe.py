"""Borders of fields on the globe, for convolutions."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

GlobePadding = Literal["periodic", "zero"]


def pad_globe(
    x: Float[Array, "batch latitude longitude channels"],
    size: int,
    padding: GlobePadding = "periodic",
) -> Float[Array, "batch latitude_padded longitude_padded channels"]:
    """Adds `size` points on all four sides of fields on the globe.

    West of the first longitude comes the last one, and the reverse; beyond the poles
    there are zeros.

    Args:
      x: fields `[batch, latitude, longitude, channels]`, all the way round.
      size: how many points are added on each side.
      padding: "periodic", or "zero" for zeros in the west and east too.

    Raises:
      ValueError: more points than there are longitudes, or an unknown padding.

    Examples:
      >>> pad_globe(jnp.arange(1.0, 4.0).reshape(1, 1, 3, 1), 1)[0, 1, :, 0].tolist()
      [3.0, 1.0, 2.0, 3.0, 1.0]
    """
    if padding not in ("periodic", "zero"):
        raise ValueError(f"padding must be 'periodic' or 'zero': got {padding!r}")
    if size > x.shape[2]:
        raise ValueError(f"size must be at most {x.shape[2]} longitudes: got {size}")
    rows = jnp.pad(x, ((0, 0), (size, size), (0, 0), (0, 0)))
    around = ((0, 0), (0, 0), (size, size), (0, 0))
    return jnp.pad(rows, around, mode="wrap" if padding == "periodic" else "constant")


def double_globe(
    x: Float[Array, "batch latitude longitude channels"],
    padding: GlobePadding = "periodic",
) -> Float[Array, "batch latitude_doubled longitude_doubled channels"]:
    """Returns fields with twice the sides, interpolated bilinearly at half points.

    Args:
      x: fields `[batch, latitude, longitude, channels]`, all the way round.
      padding: "periodic"; with "zero" the outermost longitudes repeat, as latitudes do.

    Examples:
      >>> double_globe(jnp.arange(2.0).reshape(1, 1, 2, 1))[0, 0, :, 0].tolist()
      [0.25, 0.25, 0.75, 0.75]
    """
    around = int(padding == "periodic")
    wide = jnp.pad(x, ((0, 0), (0, 0), (around, around), (0, 0)), mode="wrap")
    batch, rows, columns, channels = wide.shape
    shape = (batch, 2 * rows, 2 * columns, channels)
    y = jax.image.resize(wide, shape, "bilinear")
    return y[:, :, 2 * around : 2 * columns - 2 * around]
