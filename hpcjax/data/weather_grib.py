"""GRIB files, as cfgrib reads them, and whether all of their messages are there."""

import itertools
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core.errors import DataFormatError
from hpcjax.data.weather_lazy import guard


def open_messages(path: pathlib.Path) -> list[xr.Dataset]:
    """Returns the parts of a GRIB file, each on levels and times of its own.

    Values are read when they are needed.

    Args:
      path: the file.

    Raises:
      DataFormatError: it is damaged, a message is missing or there twice, or points lie
        elsewhere than the increments of the grid say.
    """
    import cfgrib
    from eccodes import CodesInternalError

    how = {"indexpath": "", "errors": "raise", "squeeze": False}
    try:
        with warnings.catch_warnings():
            # Of cfgrib's own calls of xarray.
            warnings.filterwarnings("ignore", category=FutureWarning)
            # Several, if variables have levels or steps of their own.
            parts = cfgrib.open_datasets(
                str(path), decode_timedelta=True, cache=False, backend_kwargs=how
            )
    except (CodesInternalError, EOFError, ValueError, KeyError) as error:
        raise DataFormatError(f"{path}: damaged GRIB: {error}") from error
    return [_check_part(path, part) for part in parts]


def _check_part(path: pathlib.Path, part: xr.Dataset) -> xr.Dataset:
    """Returns a part whose messages are all there, where they say that they are."""
    axes = {}
    for name, field in part.data_vars.items():
        inner: Any = field.variable._data
        while not hasattr(inner, "field_id_index"):
            inner = inner.array
        _check_messages(path, field, inner)
        # Of some cfgrib takes the latitudes of the grid for those of the globe.
        if "rotated" in str(field.attrs.get("GRIB_gridType")):
            raise DataFormatError(
                f"{path}: the grid of {name} has a pole of its own: expected one of "
                "latitudes by longitudes, such as cdo remapbil makes"
            )
        if "latitude" not in field.dims:
            continue
        for grid in inner.index.header_values["md5GridSection"]:
            message = inner.index.subindex(md5GridSection=grid).first()
            own = _find_axes(path, field, message)
            if not all(np.array_equal(x, axes.setdefault(dim, x)) for dim, x in own):
                raise DataFormatError(
                    f"{path}: points of {name} are at other places, or in another "
                    "order, than those of the messages before: give files of each"
                )
    part = part.assign_coords(
        {dim: (dim, values, part[dim].attrs) for dim, values in axes.items()}
    )
    single = [dim for dim, size in part.sizes.items() if size == 1]
    headers = [dim for dim in single if dim not in ("latitude", "longitude")]
    return guard(part, path).squeeze(headers)


def _find_axes(
    path: pathlib.Path, field: xr.DataArray, message: Mapping[str, Any]
) -> list[tuple[str, np.ndarray]]:
    """Returns latitudes and longitudes in the order in which values are stored."""
    shape = field.sizes["latitude"], field.sizes["longitude"]
    y, x = (
        np.reshape(message[key], shape).astype(float)
        for key in ("latitudes", "longitudes")
    )
    if not (np.allclose(y, y[:, :1]) and np.allclose(x, x[:1])):
        raise DataFormatError(
            f"{path}: points of {field.name} are stored along meridians: expected them "
            "along parallels"
        )
    for dim, axis, key in (("latitude", y[:, 0], "j"), ("longitude", x[0], "i")):
        told = field.attrs.get(f"GRIB_{key}DirectionIncrementInDegrees")
        steps = np.abs((np.diff(axis) + 180) % 360 - 180)
        # GRIB 1 says thousandths of a degree, as does what was made of it.
        given = told is not None and told > 0 and steps.size
        if given and np.abs(steps - told).max() > 5.1e-4:
            raise DataFormatError(
                f"{path}: {dim}s of {field.name} go from {axis[0]:g} to {axis[-1]:g} "
                f"in steps of {steps.max():g}, and the file says steps of {told:g}"
            )
    return [("latitude", y[:, 0]), ("longitude", x[0])]


def _check_messages(path: pathlib.Path, field: xr.DataArray, inner: Any) -> None:
    """Raises DataFormatError if a message is missing or there twice."""
    messages: Mapping[tuple[int, ...], Sequence[Any]] = inner.field_id_index
    shape = inner.shape[: -inner.geo_ndim]
    if len(messages) != math.prod(shape):
        cells = itertools.product(*map(range, shape))
        absent = next(cell for cell in cells if cell not in messages)
        raise DataFormatError(
            f"{path}: no message of {_name_cell(field, absent)}; {len(messages)} of "
            f"{math.prod(shape)} are there"
        )
    for cell, found in messages.items():
        if len(found) > 1:
            ranges = {inner.index.get_field(each)["stepRange"] for each in found}
            steps = f" over {' and '.join(sorted(ranges))} hours: keep one with "
            raise DataFormatError(
                f"{path}: {len(found)} messages of {_name_cell(field, cell)}"
                + (f"{steps}grib_copy -w stepRange=…" if len(ranges) > 1 else "")
            )


def _name_cell(field: xr.DataArray, cell: Sequence[int]) -> str:
    places = [
        f"{dim}={field[dim].to_index()[at]}"
        for dim, at in zip(field.dims, cell, strict=False)
    ]
    return ", ".join([str(field.name), *places])
