"""Fields on grids of the globe, and their values between the points of the grid."""

import itertools
import logging
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Int

from hpcjax.core.errors import DataFormatError

log = logging.getLogger(__name__)

DIMS = ("time", "level", "latitude", "longitude")
_PASCAL = 2000  # no level is of as many hPa


class Grid(NamedTuple):
    """The axes of a field; those of dimensions that it lacks have one entry, 0.

    Attributes:
      time: of any dtype that xarray has for times, in order.
      level: pressures in hPa, float64.
      latitude: in degrees, in either order, float64.
      longitude: in degrees, equal steps around the globe, float64.
      dims: the dimensions that the field has, in the order of `DIMS`.
    """

    time: np.ndarray
    level: np.ndarray
    latitude: np.ndarray
    longitude: np.ndarray
    dims: tuple[str, ...] = DIMS

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the four axes."""
        return tuple(len(axis) for axis in self[:4])

    @property
    def coords(self) -> dict[str, np.ndarray]:
        """The axes that the field has."""
        return {dim: getattr(self, dim) for dim in self.dims}


def read_grid(field: xr.DataArray) -> tuple[Grid, Float[np.ndarray, "t p y x"]]:
    """Returns the grid of a field and its values, float32.

    Args:
      field: with latitude and longitude, maybe time and level, named as by
        `data.canonicalise`. Levels in Pa, or above 2000 without a unit, become hPa.

    Raises:
      DataFormatError: other dimensions, values that are not finite, times not in order,
        or longitudes that do not go around the globe once in equal steps.
    """
    dims = tuple(dim for dim in DIMS if dim in field.dims)
    if {"latitude", "longitude"} - set(dims) or len(dims) < field.ndim:
        raise DataFormatError(
            f"dimensions must be latitude, longitude and maybe time and level, see "
            f"data.canonicalise: got {field.dims}"
        )
    axes = {dim: field[dim].to_numpy() for dim in dims}
    level = np.asarray(axes.get("level", [0]), np.float64)
    units = field["level"].attrs.get("units", "") if "level" in dims else ""
    if units in ("Pa", "pascal"):
        level = level / 100
    elif not units and level.max() > _PASCAL:
        log.warning("levels up to %g are taken for Pa", level.max())
        level = level / 100
    time = np.asarray(axes.get("time", [0]))
    latitude, longitude = (np.asarray(axes[dim], np.float64) for dim in DIMS[2:])
    grid = Grid(time, level, latitude, longitude, dims)
    _check(grid)
    values = field.transpose(*dims).to_numpy().astype(np.float32).reshape(grid.shape)
    lost = values.size - int(np.isfinite(values).sum())
    if lost:
        raise DataFormatError(f"{lost} of {values.size} values are not finite")
    return grid, values


def _check(grid: Grid) -> None:
    """Raises DataFormatError unless the axes are those of a `Grid`."""
    count = len(grid.longitude)
    turn = np.append(grid.longitude, grid.longitude[0] + 360)
    if not np.allclose(np.diff(turn), 360 / count, rtol=0, atol=0.01):
        raise DataFormatError(
            "longitudes must go around the globe in equal steps, and name no meridian "
            f"twice: got {count} from {grid.longitude[0]:g} to {grid.longitude[-1]:g}"
        )
    steps = np.diff(grid.latitude)
    if len(steps) < 1 or not ((steps > 0).all() or (steps < 0).all()):
        raise DataFormatError(f"latitudes must be in order: got {grid.latitude}")
    if np.abs(grid.latitude).max() > 90:
        raise DataFormatError(f"latitudes must be degrees: got {grid.latitude}")
    if not (np.diff(grid.time).astype(np.float64) > 0).all():
        raise DataFormatError("times must be in order, each once")


def interpolate(
    values: Float[Array, "t p y x"],
    grid: Grid,
    points: Float[Array, "n 4"],
    level: Int[Array, " n"],
) -> Float[Array, " n"]:
    """Returns a field's values at any points, multilinear in time and place.

    Between the last longitude and 360° lies the cell that joins them. Beyond the first
    and last latitude a field is as it is there.

    Args:
      values: of the grid.
      grid: its axes.
      points: time in steps, pressure (not used), latitude and longitude in degrees.
      level: number of the level of each point.
    """
    t, _, y, x = jnp.asarray(points, jnp.float32).T
    order = 1.0 if grid.latitude[0] < grid.latitude[-1] else -1.0
    first = float(grid.longitude[0])
    places = (
        _locate(np.arange(len(grid.time)), t),
        _locate(order * grid.latitude, order * y),
        _locate(np.append(grid.longitude, first + 360), first + (x - first) % 360),
    )
    total = jnp.zeros(len(points), values.dtype)
    for corner in itertools.product((0, 1), repeat=3):
        at, weight = [], jnp.ones(len(points), values.dtype)
        for upper, (index, share) in zip(corner, places, strict=True):
            at.append(index + upper)
            weight = weight * (share if upper else 1 - share)
        row = jnp.minimum(at[0], len(grid.time) - 1)
        column = at[2] % len(grid.longitude)
        total = total + weight * values[row, level, at[1], column]
    return total


def _locate(axis: np.ndarray, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cell of an ascending axis that x lies in, and x's place there."""
    if len(axis) == 1:
        return jnp.zeros(len(x), jnp.int32), jnp.zeros_like(x)
    knots = jnp.asarray(axis, x.dtype)
    index = jnp.clip(jnp.searchsorted(knots, x, side="right") - 1, 0, len(axis) - 2)
    low, high = knots[index], knots[index + 1]
    return index, jnp.clip((x - low) / (high - low), 0, 1)
