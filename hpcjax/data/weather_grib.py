"""GRIB files, as cfgrib reads them, and whether all of their messages are there."""

import itertools
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from hpcjax.core.errors import DataFormatError


def open_messages(path: pathlib.Path, options: Mapping[str, Any]) -> list[xr.Dataset]:
    """Returns the parts of a GRIB file, each on levels and times of its own.

    Args:
      path: the file.
      options: of xarray's `open_dataset`.

    Raises:
      DataFormatError: it is damaged, or a message is missing or there twice.
    """
    import cfgrib
    from eccodes import CodesInternalError

    how = {"backend_kwargs": {"indexpath": "", "errors": "raise"}, **options}
    try:
        with warnings.catch_warnings():
            # Of cfgrib's own calls of xarray.
            warnings.filterwarnings("ignore", category=FutureWarning)
            # Several, if variables have levels or steps of their own.
            parts = cfgrib.open_datasets(str(path), decode_timedelta=True, **how)
    except (CodesInternalError, EOFError, ValueError, KeyError) as error:
        raise DataFormatError(f"{path}: damaged GRIB: {error}") from error
    for part in parts:
        for field in part.data_vars.values():
            _check_messages(path, field)
    return parts


def _check_messages(path: pathlib.Path, field: xr.DataArray) -> None:
    """Raises DataFormatError if a message is missing or there twice."""
    inner: Any = field.variable._data
    while not hasattr(inner, "field_id_index"):
        if not hasattr(inner, "array"):
            return
        inner = inner.array
    messages: Mapping[tuple[int, ...], Sequence[Any]] = inner.field_id_index
    headers = [dim for dim in field.dims if dim not in ("latitude", "longitude")]
    cells = itertools.product(*(range(field.sizes[dim]) for dim in headers))
    if len(messages) != math.prod(field.sizes[dim] for dim in headers):
        absent = next(cell for cell in cells if cell not in messages)
        raise DataFormatError(
            f"{path}: no message of {_name_cell(field, headers, absent)}; "
            f"{len(messages)} of {math.prod(field.sizes[dim] for dim in headers)} are "
            "there"
        )
    for cell, found in messages.items():
        if len(found) > 1:
            raise DataFormatError(
                f"{path}: {len(found)} messages of {_name_cell(field, headers, cell)}"
            )


def _name_cell(field: xr.DataArray, dims: Sequence[Any], cell: Sequence[int]) -> str:
    places = [
        f"{dim}={field[dim].to_numpy()[at]}" for dim, at in zip(dims, cell, strict=True)
    ]
    return ", ".join([str(field.name), *places])
