"""netCDF and zarr opened without being read, whose damage is told when it is met."""

import importlib.util
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from hpcjax.core.errors import DataFormatError, DataMissing, HpcjaxError


def open_lazily(path: pathlib.Path, engine: str, group: str | None) -> xr.Dataset:
    """Returns what a file or store holds; values are read when they are needed.

    Args:
      path: the file.
      engine: xarray's, "zarr", "h5netcdf" or "scipy".
      group: of a store or netCDF 4.

    Raises:
      DataFormatError: it is damaged, has no such group, or times that are no dates.
      DataMissing: cftime is needed for its calendar, and not installed.
    """
    options: dict[str, Any] = {"engine": engine, "cache": False, "chunks": None}
    if group is not None:
        if engine == "scipy":
            raise DataFormatError(f"{path}: netCDF 3 has no groups: got {group!r}")
        options["group"] = group
    try:
        return guard(_open(path, decode_timedelta=True, **options), path)
    except Exception as error:  # readers fail in all ways
        raise _explain(error, path, options) from error


def _open(path: pathlib.Path, **options: Any) -> xr.Dataset:
    with warnings.catch_warnings():
        # That a store has no consolidated metadata is nothing to be told of.
        warnings.filterwarnings("ignore", "Failed to open Zarr store")
        return xr.open_dataset(path, **options)


def _explain(
    error: Exception, path: pathlib.Path, options: Mapping[str, Any]
) -> HpcjaxError:
    """Returns what a user is told of a file that could not be opened."""
    kind = "zarr" if options["engine"] == "zarr" else "netCDF"
    if "group" in options and isinstance(error, OSError | KeyError):
        return DataFormatError(f"{path}: no group {options['group']!r}: {error}")
    try:
        raw = _open(path, decode_times=False, **options)
    except Exception:  # so it was not the times
        return DataFormatError(f"{path}: damaged {kind}: {error}")
    for name, times in raw.variables.items():
        units = str(times.attrs.get("units", ""))
        calendar = str(times.attrs.get("calendar", "standard"))
        if " since " not in units:
            continue
        if units.split(maxsplit=1)[0].lower().rstrip("s") in ("month", "year"):
            return DataFormatError(
                f"{path}: {name} is in {units!r}, and these are of no one length: "
                "expected seconds, minutes, hours or days since a date"
            )
        if importlib.util.find_spec("cftime") is None:
            return DataMissing(
                f"{path}: dates of {name}, {units!r} in the calendar {calendar!r}, are "
                "read by cftime: pip install 'hpcjax[weather]'"
            )
    return DataFormatError(f"{path}: times are no dates: {str(error).splitlines()[0]}")


def guard(fields: xr.Dataset, path: pathlib.Path) -> xr.Dataset:
    """Returns fields that raise DataFormatError where they cannot be read."""
    guarded = {}
    for name, field in fields.data_vars.items():
        lazy: Any = indexing.LazilyIndexedArray(
            _Guarded(field.variable, f"{path}: {name}")
        )
        cached = indexing.MemoryCachedArray(indexing.CopyOnWriteArray(lazy))
        guarded[name] = xr.Variable(field.dims, cached, field.attrs, field.encoding)
    return fields.assign(guarded)


class _Guarded(BackendArray):
    """A variable of a file, and the name that its damage is told by."""

    def __init__(self, variable: xr.Variable, source: str) -> None:
        self.variable, self.source = variable, source
        self.shape, self.dtype = variable.shape, variable.dtype

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        support = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, support, self._read)

    def _read(self, key: tuple[Any, ...]) -> np.ndarray:
        try:
            return self.variable[key].to_numpy()
        except MemoryError:
            raise
        except Exception as error:  # decoders fail in all ways
            raise DataFormatError(f"{self.source} is damaged: {error}") from error
