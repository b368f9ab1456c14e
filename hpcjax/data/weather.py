"""Fields of the weather, from files of any of its formats, under one set of names."""

import importlib.util
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data import weather_grib

DIMS = ("number", "time", "lead_time", "level", "latitude", "longitude")
# What files call dimensions: cfgrib, CF, CDO, WeatherBench 1 and 2, and ERA5's stores.
_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "number": ("realization", "member", "ensemble", "ens"),
    "time": ("init_time", "initial_time", "forecast_reference_time", "valid_time"),
    "lead_time": ("step", "prediction_timedelta", "forecast_period"),
    "level": ("isobaricInhPa", "isobaricInPa", "plev", "pressure_level"),
    "latitude": ("lat",),
    "longitude": ("lon",),
}
# Of each variable, by ECMWF's short name: WeatherBench 2's name, CF's, and the unit.
VARIABLES: Mapping[str, tuple[str, str, str]] = {
    "z": ("geopotential", "geopotential", "m**2 s**-2"),
    "gh": ("geopotential_height", "geopotential_height", "m"),
    "t": ("temperature", "air_temperature", "K"),
    "u": ("u_component_of_wind", "eastward_wind", "m s**-1"),
    "v": ("v_component_of_wind", "northward_wind", "m s**-1"),
    "w": ("vertical_velocity", "lagrangian_tendency_of_air_pressure", "Pa s**-1"),
    "q": ("specific_humidity", "specific_humidity", "kg kg**-1"),
    "d": ("divergence", "divergence_of_wind", "s**-1"),
    "t2m": ("2m_temperature", "", "K"),
    "u10": ("10m_u_component_of_wind", "", "m s**-1"),
    "v10": ("10m_v_component_of_wind", "", "m s**-1"),
    "msl": ("mean_sea_level_pressure", "air_pressure_at_mean_sea_level", "Pa"),
    "sst": ("sea_surface_temperature", "sea_surface_temperature", "K"),
    "tp": ("total_precipitation", "", "m"),
}
# Other names of variables: CDO's and GRIB's.
_ALIASES = {
    **{"2t": "t2m", "10u": "u10", "10v": "v10", "SSTK": "sst", "T2M": "t2m"},
    # CMIP's, whose standard names do not tell them from those of the air above.
    **{"tas": "t2m", "uas": "u10", "vas": "v10"},
}
# Other spellings of units, and what is done to values of other units.
_SPELLINGS = {
    "m**2 s**-2": ("m2 s-2", "m^2 s^-2", "m2/s2", "m^2/s^2", "J kg-1", "J kg**-1"),
    "m s**-1": ("m s-1", "m/s", "m s^-1"),
    "Pa s**-1": ("Pa s-1", "Pa/s"),
    "kg kg**-1": ("kg kg-1", "kg/kg", "1", "g/g"),
    "s**-1": ("s-1", "1/s", "s^-1"),
    "K": ("kelvin", "Kelvin", "degK"),
    "m": ("gpm", "metre", "meter"),
    "Pa": ("pascal", "Pascal"),
}
_CONVERSIONS = {
    ("degC", "K"): (1.0, 273.15),
    ("C", "K"): (1.0, 273.15),
    ("celsius", "K"): (1.0, 273.15),
    ("degree_Celsius", "K"): (1.0, 273.15),
    ("g kg-1", "kg kg**-1"): (1e-3, 0.0),
    ("hPa", "Pa"): (100.0, 0.0),
    ("mbar", "Pa"): (100.0, 0.0),
    ("mm", "m"): (1e-3, 0.0),
}


def open_fields(
    path: pathlib.Path | str | Sequence[pathlib.Path | str],
    variables: Sequence[str] | None = None,
    *,
    group: str | None = None,
) -> xr.Dataset:
    """Opens GRIB, netCDF or zarr under canonical names, see `canonicalise`.

    Values are read when they are needed.

    Args:
      path: a file or zarr store; several are joined along their coordinates, such as
        ENS-10's files of a date each, or a file of levels and one of the surface.
      variables: canonical names of those wanted; None for all.
      group: of a zarr store.

    Raises:
      DataMissing: no such file, or a package that reads it is not installed.
      DataFormatError: no such format, a variable that is not there, or what
        `canonicalise` refuses; in GRIB, messages that are missing or there twice.
    """
    if isinstance(path, str | pathlib.Path):
        opened = _open_one(pathlib.Path(path), group, variables, {})
    else:
        chunked = {"chunks": {}}
        parts = [
            _expand(_open_one(pathlib.Path(each), group, variables, chunked))
            for each in path
        ]
        if not parts:
            raise DataMissing("no file is given")
        try:
            joined: Any = xr.combine_by_coords(parts, combine_attrs="drop_conflicts")
        except ValueError as error:
            raise DataFormatError(
                f"{path[0]} and {len(parts) - 1} others do not fit together: {error}"
            ) from error
        opened = _check_order(_order(joined), str(path[0]))
    if variables is None:
        return opened
    absent = [name for name in variables if name not in opened.data_vars]
    if absent:
        raise DataFormatError(
            f"{path}: expected variables {', '.join(variables)}, found "
            f"{', '.join(map(str, opened.data_vars))}"
        )
    return opened[list(variables)]


def _expand(fields: xr.Dataset) -> xr.Dataset:
    """Makes dimensions of a single time, lead time and level, to join fields along."""
    single = [dim for dim in DIMS[1:4] if dim in fields.coords and not fields[dim].ndim]
    return fields.expand_dims(single)


def _open_one(
    path: pathlib.Path,
    group: str | None,
    variables: Sequence[str] | None,
    options: Mapping[str, Any],
) -> xr.Dataset:
    if not path.exists():
        raise DataMissing(f"there is no file {path}")
    if path.is_dir():
        _require("zarr", path)
        if not any((path / name).exists() for name in _ZARR):
            raise DataFormatError(f"{path}: expected a zarr store, found a folder")
        with warnings.catch_warnings():
            # That a store has no consolidated metadata is nothing to be told of.
            warnings.filterwarnings("ignore", "Failed to open Zarr store")
            opened = xr.open_zarr(path, group=group, **options or _LAZY)
        return canonicalise(opened, str(path))
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] == b"GRIB":
        return _open_grib(path, variables, options)
    # netCDF 4 is HDF5, netCDF 3 is "CDF" and a version.
    engines = {b"\x89HDF": "h5netcdf", b"CDF": "scipy"}
    found = [engine for magic, engine in engines.items() if start.startswith(magic)]
    if not found:
        raise DataFormatError(f"{path}: expected GRIB, netCDF or zarr, found {start!r}")
    try:
        opened = xr.open_dataset(
            path, engine=found[0], decode_timedelta=True, **options
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataFormatError(f"{path}: damaged netCDF: {error}") from error
    return canonicalise(opened, str(path))


_ZARR = ("zarr.json", ".zgroup", ".zmetadata")
_LAZY: Mapping[str, Any] = {"chunks": None, "decode_timedelta": True}


def _require(package: str, path: pathlib.Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise DataMissing(f"{path} is read by {package}: pip install 'hpcjax[weather]'")


def _open_grib(
    path: pathlib.Path, variables: Sequence[str] | None, options: Mapping[str, Any]
) -> xr.Dataset:
    _require("cfgrib", path)
    parts = []
    for part in weather_grib.open_messages(path, options):
        fields = canonicalise(part, str(path))
        wanted = [name for name in fields if name in (variables or ())] or list(fields)
        parts.append(fields[wanted])
    try:
        return xr.merge(parts, join="exact", compat="no_conflicts")
    except ValueError as error:
        names = ", ".join(str(name) for each in parts for name in each)
        raise DataFormatError(
            f"{path}: {names} are not on one grid of levels and times: choose some of "
            f"these variables ({error})"
        ) from error


def canonicalise(fields: xr.Dataset, source: str = "fields") -> xr.Dataset:
    """Returns fields under canonical names of dimensions and variables, in their units.

    Dimensions are `number`, `time` (when a forecast starts, or an analysis is valid),
    `lead_time`, `level` in hPa from above, `latitude` from north to south and
    `longitude` from 0 to 360 degrees, in this order; variables have ECMWF's short
    names, see `VARIABLES`. Those that it does not know keep name and unit. Of a single
    level, time or lead time there is a coordinate and no dimension.

    Args:
      fields: as cfgrib, CDO, WeatherBench 1 or 2, or the CF conventions name them.
      source: a name for messages.

    Returns:
      A new dataset; `attrs["history"]` says what was changed.

    Raises:
      DataFormatError: no latitude or longitude, a unit that does not fit, times that
        are not in order, or an empty dimension.
    """
    fields = _rename(fields, source)
    notes: list[str] = []
    for dim in ("latitude", "longitude"):
        if dim not in fields.dims:
            raise DataFormatError(
                f"{source}: expected a dimension latitude and one longitude, found "
                f"{', '.join(map(str, fields.sizes))}"
            )
        if dim not in fields.coords:
            raise DataFormatError(f"{source}: {dim} has no coordinates")
    if "lead_time" in fields.coords and fields["lead_time"].ndim:
        own = fields["lead_time"].dims
        if own != ("lead_time",):
            raise DataFormatError(
                f"{source}: expected time, when forecasts start, and lead_time as two "
                f"dimensions, found a lead time for each of {', '.join(map(str, own))}"
            )
    fields = _turn(_set_level(_drop_others(fields), source), source, notes)
    empty = [str(dim) for dim, size in fields.sizes.items() if size == 0]
    if empty:
        raise DataFormatError(f"{source}: no {' and no '.join(empty)} is selected")
    converted = {
        str(name): _convert(each, source, notes) for name, each in fields.items()
    }
    fields = _check_order(fields.assign(converted), source)
    fields = _order(fields)
    history = [fields.attrs["history"]] if "history" in fields.attrs else []
    fields.attrs["history"] = "\n".join([*history, *dict.fromkeys(notes)])
    return fields


def _order(fields: xr.Dataset) -> xr.Dataset:
    return fields.transpose(*(dim for dim in DIMS if dim in fields.dims), ...)


def _rename(fields: xr.Dataset, source: str) -> xr.Dataset:
    names = {}
    for dim, others in _DIMENSIONS.items():
        found = [
            other for other in others if other in fields.dims or other in fields.coords
        ]
        # ERA5's stores have `valid_time` as a dimension; beside a time of its own it
        # follows from that.
        if dim not in fields.coords and dim not in fields.dims and found:
            names[found[0]] = dim
    for name, field in fields.data_vars.items():
        short = _short_name(str(name), field.attrs)
        if short != name:
            names[str(name)] = short
    final = {str(name): names.get(str(name), str(name)) for name in fields.variables}
    for new in names.values():
        olds = [old for old, each in final.items() if each == new]
        if len(olds) > 1:
            raise DataFormatError(f"{source}: {' and '.join(olds)} are both {new}")
    return fields.rename(names)


def _short_name(name: str, attrs: Mapping[str, Any]) -> str:
    # Some files call heights "z".
    is_height = str(attrs.get("units", "")) in ("m", "gpm")
    if name in ("z", "Z"):
        named = attrs.get("standard_name") == "geopotential_height"
        return "gh" if is_height or named else "z"
    if name in VARIABLES:
        return name
    if name in _ALIASES:
        return _ALIASES[name]
    for short, (long, standard, _) in VARIABLES.items():
        if name in (long, short.upper()):
            return short
        if standard and attrs.get("standard_name") == standard:
            return short
    return name


def _drop_others(fields: xr.Dataset) -> xr.Dataset:
    """Drops coordinates that are none of ours."""
    for name in set(fields.coords) - set(fields.dims):
        alone = name in DIMS and not fields[name].ndim
        # What is said of dates stays, such as which are for training.
        of_dates = fields[name].dims == ("time",) and name != "valid_time"
        is_zero = name == "lead_time" and alone and not fields[name].any()
        if name == "number" or is_zero or not (alone or of_dates):
            fields = fields.drop_vars([name])
    return fields


def _set_level(fields: xr.Dataset, source: str) -> xr.Dataset:
    if "level" not in fields.coords:
        return fields
    level = fields["level"]
    units = str(level.attrs.get("units", ""))
    if units in ("Pa", "pascal") or (not units and float(level.max()) > 2000):
        level = level / 100
    elif units not in ("", "hPa", "millibars", "mbar", "mb", "millibar"):
        raise DataFormatError(f"{source}: expected levels in hPa or Pa, found {units}")
    values = level.to_numpy().astype(float)
    fields = fields.assign_coords(level=(level.dims, values, {"units": "hPa"}))
    return fields.sortby("level") if level.ndim else fields


def _turn(fields: xr.Dataset, source: str, notes: list[str]) -> xr.Dataset:
    """Puts latitudes from north to south, and longitudes from 0 to 360."""
    latitude, longitude = fields["latitude"], fields["longitude"]
    steps = np.diff(latitude.to_numpy())
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise DataFormatError(f"{source}: latitudes are not in order, or NaN")
    if latitude.size > 1 and float(latitude[0]) < float(latitude[-1]):
        fields = fields.isel(latitude=slice(None, None, -1))
        notes.append("latitude: now from north to south")
    east = longitude.to_numpy() % 360
    if np.unique(east).size < east.size or not np.isfinite(east).all():
        raise DataFormatError(f"{source}: a longitude is there twice, or NaN")
    if not np.array_equal(east, longitude.to_numpy()):
        fields = fields.assign_coords(longitude=("longitude", east, longitude.attrs))
        notes.append("longitude: now from 0 to 360 degrees")
    if np.any(np.diff(east) < 0):
        fields = fields.isel(longitude=np.argsort(east, kind="stable"))
    return fields


def _convert(field: xr.DataArray, source: str, notes: list[str]) -> xr.DataArray:
    """Returns a variable in its canonical unit."""
    if field.name not in VARIABLES or "units" not in field.attrs:
        return field
    unit, given = VARIABLES[str(field.name)][2], str(field.attrs["units"])
    if given == unit or given in _SPELLINGS.get(unit, ()):
        return field.assign_attrs(units=unit)
    if (given, unit) not in _CONVERSIONS:
        raise DataFormatError(
            f"{source}: expected {field.name} in {unit}, found {given!r}"
        )
    factor, offset = _CONVERSIONS[given, unit]
    notes.append(f"{field.name}: from {given} to {unit}")
    return (field * factor + offset).assign_attrs(field.attrs | {"units": unit})


def _check_order(fields: xr.Dataset, source: str) -> xr.Dataset:
    """Returns fields whose times rise; raises DataFormatError if they do not."""
    for dim in ("time", "lead_time"):
        if dim not in fields.coords:
            continue
        values = np.atleast_1d(fields[dim].to_numpy())
        if dim == "lead_time" and not np.issubdtype(values.dtype, np.timedelta64):
            raise DataFormatError(
                f"{source}: expected lead times with a unit, such as 'hours', found "
                f"{values[:3].tolist()}"
            )
        wrong = np.nonzero(values[1:] <= values[:-1])[0]
        if wrong.size:
            twice = values[wrong[0] + 1] == values[wrong[0]]
            raise DataFormatError(
                f"{source}: {dim} {values[wrong[0] + 1]} "
                f"{'is there twice' if twice else f'comes after {values[wrong[0]]}'}: "
                f"use drop_duplicates('{dim}') or sortby('{dim}')"
            )
    return fields


def to_weatherbench(fields: xr.Dataset) -> xr.Dataset:
    """Returns canonical fields as WeatherBench 2 names and orders them.

    `canonicalise` of the result are the fields again.

    Args:
      fields: with canonical names.
    """
    long = {name: VARIABLES[name][0] for name in fields.data_vars if name in VARIABLES}
    dims = {"lead_time": "prediction_timedelta"} if "lead_time" in fields.dims else {}
    turned = fields.isel(latitude=slice(None, None, -1)).rename(long | dims)
    return turned.transpose(..., "longitude", "latitude")
