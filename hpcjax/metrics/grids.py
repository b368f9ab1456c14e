"""Whether two fields are at the same places, told by the values of their axes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.core.errors import DataFormatError

if TYPE_CHECKING:
    import xarray as xr

PLACES = ("latitude", "longitude", "level")
# Northern, southern, western and eastern bound, in degrees.
Region = tuple[float, float, float, float]
# Degrees within which a point is on a bound, as of longitudes in float32.
_NEAR = 1e-4


def require_same_grid(
    first: "xr.DataArray | xr.Dataset",
    second: "xr.DataArray | xr.Dataset",
    names: tuple[str, str] = ("forecasts", "truth"),
    axes: Sequence[str] = PLACES,
) -> None:
    """Raises DataFormatError unless two fields have the same points, by `is_same_axis`.

    Args:
      first: with coordinates, in any order of dimensions.
      second: likewise.
      names: of the two, for messages.
      axes: that are compared; both must have them, but for a time and a level.
    """
    for axis in axes:
        if axis not in first.coords or axis not in second.coords:
            known = axis in first.coords or axis in second.coords
            if axis in ("time", "level") and not known:
                continue
            lacking = names[0] if axis not in first.coords else names[1]
            raise DataFormatError(f"{lacking} have no coordinate {axis}")
        one, other = (np.atleast_1d(each[axis].to_numpy()) for each in (first, second))
        if is_same_axis(one, other):
            continue
        hint = ""
        if is_same_axis(one, other[::-1]):
            hint = f": one is the other reversed, use sortby('{axis}') on both"
        elif axis == "level" and np.isclose(one.max(), 100 * other.max()):
            hint = ": Pa and hPa"
        elif axis == "level" and np.isclose(100 * one.max(), other.max()):
            hint = ": hPa and Pa"
        raise DataFormatError(
            f"{axis} differs: {names[0]} have {_span(one)}, {names[1]} "
            f"{_span(other)}{hint}"
        )
    heights = [each.attrs.get("vertical") for each in (first, second)]
    if None not in heights and heights[0] != heights[1]:
        raise DataFormatError(
            f"{names[0]} are at {heights[0]}, {names[1]} at {heights[1]}"
        )


def is_same_axis(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two axes agree within a thousandth of a cell, or as float32; dates do.

    Examples:
      >>> axis = np.arange(0, 360, 0.3)
      >>> is_same_axis(axis, axis.astype("f4")), is_same_axis(axis, axis + 0.001)
      (True, False)
    """
    if one.shape != other.shape:
        return False
    if one.dtype.kind not in "iuf" or other.dtype.kind not in "iuf":
        return bool(np.array_equal(one, other))
    steps = np.abs(np.diff(one))
    cell = float(steps.min()) if steps.size else 1.0
    rounded = float(np.spacing(np.float32(np.abs(one).max(initial=0))))
    return np.allclose(one, other, rtol=0, atol=max(cell / 1000, rounded))


def find_points(fields: "xr.Dataset", region: Region) -> dict[str, np.ndarray]:
    """Returns the numbers of the rows and of the columns within a region.

    Args:
      fields: with latitudes, and longitudes that may go on beyond the region's west.
      region: whose west may be east of its east; then it goes on across 0°.

    Raises:
      ValueError: bounds that are none.
      DataFormatError: no point is within.
    """
    north, south, west, east = region
    if not (-90 <= south <= north <= 90 and np.isfinite([west, east]).all()):
        raise ValueError(
            "region must be the northern, southern, western and eastern bound in "
            f"degrees: got {region}"
        )
    latitude, longitude = (fields[dim].to_numpy() for dim in PLACES[:2])
    rows = (latitude >= south - _NEAR) & (latitude <= north + _NEAR)
    # All the way round is as far as no way at all.
    width = (east - west) % 360 or 360 * (east != west)
    columns = (longitude - west + _NEAR) % 360 <= width + 2 * _NEAR
    if not (rows.any() and columns.any()):
        raise DataFormatError(
            f"region {region} has no point of latitudes {latitude[0]:g} to "
            f"{latitude[-1]:g} and longitudes {longitude[0]:g} to {longitude[-1]:g}"
        )
    return {"latitude": np.nonzero(rows)[0], "longitude": np.nonzero(columns)[0]}


def are_radians(latitude: np.ndarray) -> bool:
    """Whether latitudes are those of the globe in radians.

    All are within π / 2 of the equator, as of few strips, and no parts of a degree,
    which are whole multiples of half a tenth of a second of arc.
    """
    most, parts = np.abs(latitude).max(), latitude * 72_000
    if latitude.size < 4 or most > np.pi / 2 or np.ptp(latitude) <= np.pi / 2:
        return False
    return not np.allclose(parts, parts.round(), rtol=0, atol=0.02)


def _span(values: np.ndarray) -> str:
    ends = (f"{x:g}" if x.dtype.kind == "f" else str(x) for x in values[[0, -1]])
    return f"{values.size} from {' to '.join(ends)}"
