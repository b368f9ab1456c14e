"""Fields of the weather, from files of any of its formats, under one set of names."""

import importlib.util
import logging
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data import weather_grib, weather_units
from hpcjax.data.weather_axes import DIMS, name_axes, set_level, turn
from hpcjax.data.weather_lazy import open_lazily
from hpcjax.metrics.grids import is_same_axis

log = logging.getLogger(__name__)

_SURFACE = ("t2m", "u10", "v10", "msl", "sst", "tp")
# Axes of single heights, depths and layers, which variables may differ in.
_HEIGHT = re.compile(r"height|altitude|depth|hybrid|sigma|theta|soil|snow", re.I)
_EXTREME = re.compile(r"maximum|minimum|range|variance|standard_deviation")

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
        opened = _open_one(pathlib.Path(path), group, variables)
    else:
        parts = [_open_one(pathlib.Path(each), group, variables) for each in path]
        if not parts:
            raise DataMissing("no file is given")
        source = f"{path[0]} and {len(parts) - 1} others"
        opened = _join(_choose(parts, variables), source)
    if not opened.data_vars:
        raise DataFormatError(f"{path}: no variable of latitudes and longitudes")
    if variables is None:
        return opened
    absent = [name for name in variables if name not in opened.data_vars]
    if absent:
        raise DataFormatError(
            f"{path}: expected variables {', '.join(variables)}, found "
            f"{', '.join(map(str, opened.data_vars))}"
        )
    return opened[list(variables)]


def _join(parts: Sequence[xr.Dataset], source: str) -> xr.Dataset:
    """Returns canonical fields along whatever axes they differ in."""
    alike = []
    shared = [dim for dim in DIMS[:4] if _is_shared(parts, dim)]
    for part in _share_axes(parts):
        # A single member, time, lead time or level is one to join along.
        single = [
            dim
            for dim in DIMS[:4]
            if dim in part.coords and not part[dim].ndim and dim not in shared
        ]
        alike.append(_cut(part).expand_dims(single) if len(parts) > 1 else part)
    _check_kinds(alike, source)
    try:
        joined: Any = xr.combine_by_coords(
            alike,
            join="exact",
            compat="no_conflicts",
            data_vars="minimal",
            coords="minimal",
            combine_attrs="drop_conflicts",
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataFormatError(
            f"{source} do not fit together, expected the same places, and that they "
            f"differ in variables, members, times or levels: {error}"
        ) from error
    return _check_order(_order(joined), source)


def _is_shared(parts: Sequence[xr.Dataset], dim: str) -> bool:
    """Whether all have one and the same member, time, lead time or level."""
    if not all(dim in part.coords and not part[dim].ndim for part in parts):
        return False
    return all(part[dim].variable.equals(parts[0][dim].variable) for part in parts)


def _share_axes(parts: Sequence[xr.Dataset]) -> Iterator[xr.Dataset]:
    """Yields parts whose axes are exactly those that came before, if they agree."""
    axes: dict[str, list[xr.DataArray]] = {dim: [] for dim in DIMS[3:]}
    for part in parts:
        own = {dim: part[dim] for dim in axes if dim in part.coords and part[dim].ndim}
        for dim, axis in own.items():
            known = [x for x in axes[dim] if is_same_axis(x.values, axis.values)]
            axes[dim] += [] if known else [axis]
            own[dim] = [*known, axis][0]
        yield part.assign_coords({dim: axis.variable for dim, axis in own.items()})


def _cut(fields: xr.Dataset) -> xr.Dataset:
    """Returns fields that are read in pieces, the file's own or of a date each."""
    if importlib.util.find_spec("dask") is None:
        return fields
    sizes: dict[Any, Any] = {dim: 1 for dim in DIMS[:3] if dim in fields.dims}
    for field in fields.data_vars.values():
        sizes |= field.encoding.get("preferred_chunks", {})
    return fields.chunk({dim: sizes[dim] for dim in fields.dims if dim in sizes})


def _check_kinds(parts: Sequence[xr.Dataset], source: str) -> None:
    """Raises DataFormatError if a variable has several units or heights."""
    seen: dict[Any, str] = {}
    for part in parts:
        for name, field in part.data_vars.items():
            height = " on levels" if "level" in field.coords else ""
            if "vertical" in field.attrs:
                height = f" at {field.attrs['vertical']}"
            kind = f"{field.attrs.get('units', 'no unit')}{height}"
            if seen.setdefault(name, kind) != kind:
                raise DataFormatError(
                    f"{source} do not fit together: {name} is in {seen[name]} and in "
                    f"{kind}"
                )


def _open_one(
    path: pathlib.Path, group: str | None, variables: Sequence[str] | None
) -> xr.Dataset:
    if not path.exists():
        raise DataMissing(f"there is no file {path}")
    if path.is_dir():
        _require("zarr", path)
        if not any((path / name).exists() for name in _ZARR):
            raise DataFormatError(f"{path}: expected a zarr store, found a folder")
        return canonicalise(open_lazily(path, "zarr", group), str(path), variables)
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] == b"GRIB":
        return _open_grib(path, variables)
    # netCDF 4 is HDF5, netCDF 3 is "CDF" and a version.
    engines = {b"\x89HDF": "h5netcdf", b"CDF": "scipy"}
    found = [engine for magic, engine in engines.items() if start.startswith(magic)]
    if not found:
        raise DataFormatError(f"{path}: expected GRIB, netCDF or zarr, found {start!r}")
    return canonicalise(open_lazily(path, found[0], group), str(path), variables)


_NOW = np.timedelta64(0, "ns")
_ZARR = ("zarr.json", ".zgroup", ".zmetadata")


def _require(package: str, path: pathlib.Path) -> None:
    if importlib.util.find_spec(package) is None:
        raise DataMissing(f"{path} is read by {package}: pip install 'hpcjax[weather]'")


def _open_grib(path: pathlib.Path, variables: Sequence[str] | None) -> xr.Dataset:
    _require("cfgrib", path)
    parts = [canonicalise(part, str(path)) for part in weather_grib.open_messages(path)]
    parts = _choose(parts, variables)
    names = sorted({str(name) for part in parts for name in part})
    source = f"{path}, whose variables are {', '.join(names)}: some of these"
    return _join(parts, source)


def _choose(
    parts: Sequence[xr.Dataset], variables: Sequence[str] | None
) -> Sequence[xr.Dataset]:
    """Returns parts of the wanted variables alone, all if there are none of these."""
    wanted = [[name for name in part if name in (variables or ())] for part in parts]
    return [part[own] for part, own in zip(parts, wanted, strict=True) if own] or parts


def canonicalise(
    fields: xr.Dataset,
    source: str = "fields",
    variables: Sequence[str] | None = None,
) -> xr.Dataset:
    """Returns fields under canonical names of dimensions and variables, in their units.

    Dimensions are `number`, `time` (when a forecast starts, or an analysis is valid),
    `lead_time`, `level` in hPa from above, `latitude` from north to south and
    `longitude` from 0 to 360 degrees, in this order; variables have ECMWF's short
    names, see `VARIABLES`. Those that it does not know keep name and unit. Of a single
    level, time or lead time there is a coordinate and no dimension.

    Args:
      fields: as cfgrib, CDO, WeatherBench 1 or 2, or the CF conventions name them.
      source: a name for messages.
      variables: canonical names of those wanted, the others are not looked at; all if
        there are none of these.

    Returns:
      A new dataset; `attrs["history"]` says what was changed.

    Raises:
      DataFormatError: no latitude or longitude, a unit that does not fit, times that
        are not in order, or an empty dimension.
    """
    notes: list[str] = []
    (fields,) = _choose([_rename(name_axes(fields, source), source)], variables)
    fields = _drop_others(_drop_unplaced(fields, notes))
    empty = [str(dim) for dim, size in fields.sizes.items() if size == 0]
    if empty:
        raise DataFormatError(f"{source}: no {' and no '.join(empty)} is selected")
    fields = turn(set_level(fields, source, notes), source, notes)
    converted = {
        str(name): _convert(each, source, notes) for name, each in fields.items()
    }
    fields = _check_order(fields.assign(converted), source)
    fields = _order(fields)
    for note in dict.fromkeys(notes):
        log.info("%s: %s", source, note)
    history = [fields.attrs["history"]] if "history" in fields.attrs else []
    fields.attrs["history"] = "\n".join(map(str, [*history, *dict.fromkeys(notes)]))
    return fields


def _order(fields: xr.Dataset) -> xr.Dataset:
    """Puts dimensions in order, and latitudes of which each had a file of its own."""
    if fields.sizes["latitude"] > 1:
        fields = fields.sortby("latitude", ascending=False)
    return fields.transpose(*(dim for dim in DIMS if dim in fields.dims), ...)


def _rename(fields: xr.Dataset, source: str) -> xr.Dataset:
    """Gives variables their short names."""
    short = {
        str(name): _short_name(str(name), field.attrs)
        for name, field in fields.data_vars.items()
    }
    names = {}
    for name, new in short.items():
        # A standard name that several have, such as at other heights, tells none.
        shared = list(short.values()).count(new) > 1 and _short_name(name, {}) == name
        if new != name and not shared:
            names[name] = new
    final = {str(name): names.get(str(name), str(name)) for name in fields.variables}
    for new in names.values():
        olds = [old for old, each in final.items() if each == new]
        if len(olds) > 1:
            raise DataFormatError(f"{source}: {' and '.join(olds)} are both {new}")
    return fields.rename(names)


def _short_name(name: str, attrs: Mapping[str, Any]) -> str:
    # Some files call heights "z".
    is_height = weather_units.spell(str(attrs.get("units", ""))) in ("m", "dam", "km")
    is_extreme = _EXTREME.search(str(attrs.get("cell_methods", "")))
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
        # A day's maximum has the same standard name as the temperature.
        if standard and attrs.get("standard_name") == standard and not is_extreme:
            return short
    return name


def _drop_unplaced(fields: xr.Dataset, notes: list[str]) -> xr.Dataset:
    """Drops what has no place, such as bounds of axes and names of projections."""
    odd = [
        name
        for name, field in fields.data_vars.items()
        if not {"latitude", "longitude"} <= set(field.dims)
    ]
    if odd:
        notes.append(f"{', '.join(map(str, odd))}: no field, and dropped")
    return fields.drop_vars(odd)


def _drop_others(fields: xr.Dataset) -> xr.Dataset:
    """Drops coordinates that are none of ours; variables keep their heights."""
    heights = {}
    for name in set(fields.coords) - set(fields.dims):
        alone = not fields[name].ndim
        # What is said of dates stays, such as which are for training.
        of_dates = fields[name].dims == ("time",) and name != "valid_time"
        is_number = alone and fields[name].dtype.kind in "iuf"
        if is_number and _HEIGHT.search(
            f"{name} {fields[name].attrs.get('standard_name')}"
        ):
            sign = -1 if fields[name].attrs.get("positive") == "down" else 1
            heights[name] = (
                f"{sign * float(fields[name]):g} {fields[name].attrs.get('units', '')}"
            )
        if not (of_dates or (name in DIMS and alone)):
            fields = fields.drop_vars([name])
    named = {}
    for name, field in fields.data_vars.items():
        listed = field.encoding.get("coordinates", " ".join(map(str, heights))).split()
        own = [height for each, height in heights.items() if each in listed]
        # Of these the name says how high they are, and files do not agree.
        if len(own) == 1 and name not in _SURFACE:
            named[name] = field.assign_attrs(vertical=own[0])
    return fields.assign(named)


def _convert(field: xr.DataArray, source: str, notes: list[str]) -> xr.DataArray:
    """Returns a variable in its canonical unit."""
    given = str(field.attrs.get("units", "")).strip()
    if field.name not in VARIABLES or not given:
        return field
    unit = VARIABLES[str(field.name)][2]
    # Of water a kilogram on a square metre is a millimetre.
    is_water = field.name == "tp" and weather_units.spell(given) == "kg m-2"
    change = weather_units.find_change("mm" if is_water else given, unit)
    if change is None:
        raise DataFormatError(
            f"{source}: expected {field.name} in {unit}, found {given!r}"
        )
    if change == (1.0, 0.0):
        return field.assign_attrs(units=unit)
    notes.append(f"{field.name}: from {given} to {unit}")
    factor, offset = change
    return (field * factor + offset).assign_attrs(field.attrs | {"units": unit})


def _check_order(fields: xr.Dataset, source: str) -> xr.Dataset:
    """Returns fields whose times rise; raises DataFormatError if they do not."""
    for dim in DIMS[:4]:
        if dim not in fields.coords:
            continue
        values = np.atleast_1d(fields[dim].to_numpy())
        if fields[dim].isnull().any():
            raise DataFormatError(f"{source}: {dim} is missing in some places")
        if dim == "number":
            values = np.sort(values)
        if dim == "lead_time" and (values < _NOW).any():
            raise DataFormatError(f"{source}: what is forecast is before its start")
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

    `canonicalise` of the result are the fields again. A prediction's `mean` and `std`
    get the names of its variable, such as `temperature` and `temperature_std`.

    Args:
      fields: with canonical names, or as `runs.Trained.predict` returns them.
    """
    pair = {"mean", "std"} <= set(fields.data_vars)
    if pair and (short := fields["mean"].attrs.get("short_name")):
        own = VARIABLES.get(short, (short, "", ""))[0]
        fields = fields.rename({"mean": own, "std": f"{own}_std"})
    long = {name: VARIABLES[name][0] for name in fields.data_vars if name in VARIABLES}
    dims = {"lead_time": "prediction_timedelta"} if "lead_time" in fields.dims else {}
    turned = fields.isel(latitude=slice(None, None, -1)).rename(long | dims)
    return turned.transpose(..., "longitude", "latitude")
