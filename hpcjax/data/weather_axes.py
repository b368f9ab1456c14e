"""Which axes of a file are members, times, levels and places, as CF tells them."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core.errors import DataFormatError
from hpcjax.data import weather_units
from hpcjax.metrics.grids import are_radians

DIMS = ("number", "time", "lead_time", "level", "latitude", "longitude")

# Of each axis CF's standard name, and what files call it whose attributes say nothing:
# cfgrib, CDO, WeatherBench 1 and 2, and ERA5's stores.
_AXES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "number": (
        "realization",
        ("number", "realization", "member", "ensemble", "ens", "ensemble_member"),
    ),
    "start": (
        "forecast_reference_time",
        ("init_time", "initial_time", "forecast_reference_time"),
    ),
    "valid": ("time", ("time", "valid_time")),
    "lead_time": (
        "forecast_period",
        ("lead_time", "step", "prediction_timedelta", "forecast_period"),
    ),
    "level": (
        "air_pressure",
        ("level", "isobaricinhpa", "isobaricinpa", "plev", "pressure_level"),
    ),
    "latitude": ("latitude", ("latitude", "lat", "nav_lat")),
    "longitude": ("longitude", ("longitude", "lon", "nav_lon")),
}
_DEGREES = {
    "latitude": re.compile(r"degrees?_?(north|n)$", re.IGNORECASE),
    "longitude": re.compile(r"degrees?_?(east|e)$", re.IGNORECASE),
}
# Levels that are none of pressure, even where their unit is one.
_MODEL = re.compile(r"model|hybrid|sigma|theta|altitude|height|depth", re.IGNORECASE)
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second"), 1),
    **dict.fromkeys(("min", "minute"), 60),
    **dict.fromkeys(("h", "hr", "hour"), 3600),
    **dict.fromkeys(("d", "day"), 86_400),
}
_REGULAR = "expected a grid of latitudes by longitudes, such as cdo remapbil makes"


def name_axes(fields: xr.Dataset, source: str) -> xr.Dataset:
    """Returns fields whose axes have canonical names, and whose `time` is of starts.

    Args:
      fields: as they were read.
      source: a name for messages.

    Raises:
      DataFormatError: no latitude or longitude, places that are no grid, two axes of a
        kind, times or lead times without a unit, or such as are neither of starts nor
        of one start.
    """
    found = _find_axes(fields, source)
    fields = fields.set_coords([name for name in found.values() if name in fields])
    for axis in ("level", *_DEGREES):
        kind = fields[found[axis]].dtype if axis in found else np.dtype(float)
        if kind.kind not in "iuf":
            raise DataFormatError(f"{source}: expected {axis} in numbers, found {kind}")
    places = [fields[found[a]].dims for a in _DEGREES if found.get(a) in fields.coords]
    if len(places) == 2 and places[0] == places[1] and len(places[0]) == 1:
        raise DataFormatError(f"{source}: places of each {places[0][0]}: {_REGULAR}")
    for axis in _DEGREES:
        fields = _make_grid(fields, axis, found.get(axis), source)
    taken = {*_DEGREES, *(found.get(axis) for axis in ("start", "valid", "lead_time"))}
    for axis in ("number", "level"):
        if axis not in found:
            continue
        along = fields[found[axis]].dims
        if taken & {*along}:
            raise DataFormatError(
                f"{source}: {found[axis]} is of {along[0]}: expected {axis} as a "
                "dimension of its own"
            )
        fields = _name(fields, found[axis], axis)
    return _set_times(fields, found, source)


def _find_axes(fields: xr.Dataset, source: str) -> dict[str, str]:
    """Returns the name of each axis that is there."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(map(str, [*fields.variables, *fields.dims])):
        attrs = fields[name].attrs if name in fields.variables else {}
        axis = _tell_axis(name, attrs, name not in fields.data_vars)
        if axis is None or (axis in ("number", "level") and fields[name].ndim > 1):
            continue
        # A pressure alone is a level if it is called so.
        called = "standard_name" in attrs or name.lower() in _AXES["level"][1]
        if axis != "level" or fields[name].ndim or called:
            found.setdefault(axis, []).append(name)
    chosen = {}
    for axis, names in found.items():
        own = [name for name in names if name in fields.dims and name in fields.coords]
        if len(own) > 1:
            raise DataFormatError(f"{source}: {' and '.join(own)} are both {axis}")
        # Beside a time of its own, a time that is valid follows from that.
        known = [name for name in names if name in fields.variables] or names
        known.sort(key=lambda name: (fields[name].ndim == 0, name != "time"))
        chosen[axis] = (own or known)[0]
    return chosen


def _tell_axis(name: str, attrs: Mapping[str, Any], is_coordinate: bool) -> str | None:
    standard, units = (str(attrs.get(key, "")) for key in ("standard_name", "units"))
    # A rotated pole's "grid_latitude" is no latitude.
    if standard.startswith(("grid_", "projection_")):
        return None
    if standard:
        found = [axis for axis, (known, _) in _AXES.items() if standard == known]
    else:
        found = [axis for axis, known in _DEGREES.items() if known.match(units)]
    if is_coordinate:
        found += ["level"] * (not standard and weather_units.is_pressure(units))
        found += [axis for axis, (_, names) in _AXES.items() if name.lower() in names]
        found += ["valid"] * (attrs.get("axis") == "T")
    else:
        # A field may be of times that are valid, or of pressures.
        found = [axis for axis in found if axis not in ("valid", "level")]
    return found[0] if found else None


def _name(fields: xr.Dataset, old: str, new: str) -> xr.Dataset:
    """Gives a coordinate its canonical name, and the dimension that it is along."""
    if old in fields.coords and fields[old].ndim == 1 and fields[old].dims[0] != old:
        fields = fields.swap_dims({fields[old].dims[0]: old})
    return fields if old == new else fields.rename({old: new})


def _make_grid(
    fields: xr.Dataset, axis: str, name: str | None, source: str
) -> xr.Dataset:
    """Makes latitudes or longitudes a dimension."""
    if name is None:
        raise DataFormatError(
            f"{source}: expected a dimension latitude and one longitude, found "
            f"{', '.join(map(str, fields.sizes))}"
        )
    if name not in fields.coords:
        raise DataFormatError(f"{source}: {axis} has no coordinates")
    values = fields[name]
    if values.ndim == 2:
        # Those of a regular grid may be written out for each point.
        across = values.dims[1 if axis == "latitude" else 0]
        row = values.isel({across: 0}, drop=True)
        if bool((abs(values - row) < 1e-4).all()):
            fields = fields.drop_vars(name).assign_coords({name: row.variable})
            values = fields[name]
    if values.ndim != 1:
        dims = ", ".join(map(str, values.dims)) or "one point"
        raise DataFormatError(f"{source}: {name} is of {dims}: {_REGULAR}")
    return _name(fields, name, axis)


def _set_times(fields: xr.Dataset, found: dict[str, str], source: str) -> xr.Dataset:
    """Makes `time` that of starts or analyses, and `lead_time` how much later it is."""
    start, valid, lead = (found.get(axis) for axis in ("start", "valid", "lead_time"))
    for name in (start, valid):
        if name in fields.coords:
            _check_dates(fields[name], source)
    if lead in fields.coords:
        fields = fields.assign_coords({lead: _read_leads(fields[lead], source)})
    later = _find_later(fields, start, valid, lead, source)
    if later is not None and later.size:
        fields = _split(fields, [start, valid, lead], later, source)
    else:
        if start is not None and valid is not None:
            fields = fields.drop_vars(valid)
        for name, axis in ((start or valid, "time"), (lead, "lead_time")):
            fields = fields if name is None else _name(fields, name, axis)
    standard = {"lead_time": "forecast_period", "time": "forecast_reference_time"}
    if "lead_time" not in fields.coords:
        standard["time"] = "time"
    return fields.assign_coords(
        {
            axis: fields[axis].assign_attrs(standard_name=name)
            for axis, name in standard.items()
            if axis in fields.coords
        }
    )


def _find_later(
    fields: xr.Dataset, start: Any, valid: Any, lead: Any, source: str
) -> xr.Variable | None:
    """Returns how much later than starts times are valid, None if `time` is no such."""
    if valid not in fields.coords:
        return None
    times = fields[valid]
    if lead in fields.dims:
        if lead not in fields.coords:
            return None
        if start is not None and not (times == fields[start] + fields[lead]).all():
            raise DataFormatError(f"{source}: {valid} is not {start} and {lead}")
        known = start is None and times.dims == (lead,)
        return fields[lead].variable if known else None
    if start is not None and (lead is None or start not in fields.dims):
        later = times.variable - fields[start].variable
        if lead is not None and not (later == fields[lead].variable).all():
            raise DataFormatError(f"{source}: {valid} is not {start} and {lead}")
        return later
    if start is not None or lead is None:
        return None
    standard = [fields[name].attrs.get("standard_name") for name in (lead, valid)]
    # One for each time, or CF's names for what is valid and how long after its start.
    told = fields[lead].ndim or standard == ["forecast_period", "time"]
    return fields[lead].variable if told else None


def _split(
    fields: xr.Dataset, names: list[Any], later: xr.Variable, source: str
) -> xr.Dataset:
    """Returns fields with starts and lead times instead of the times that are valid."""
    valid = fields[names[1]].variable
    pair = valid - later, later
    start, lead = xr.broadcast(*map(xr.DataArray, pair))
    starts, leads = (np.atleast_1d(each.to_numpy()) for each in (start, lead))
    # A time of one analysis is an axis rather than its lead time.
    shared = [(each == each.flat[0]).all() for each in (leads, starts)]
    if lead.ndim > 1 or not any(shared):
        raise DataFormatError(
            f"{source}: expected time, when forecasts start, and lead_time as two dim"
            f"ensions, found a lead time for each of {', '.join(map(str, lead.dims))}"
        )
    fields = fields.drop_vars([name for name in names if name is not None])
    axis, one = ("time", "lead_time") if shared[0] else ("lead_time", "time")
    values = {"time": starts, "lead_time": leads}
    if lead.ndim:
        if lead.dims != (axis,):
            fields = fields.rename({lead.dims[0]: axis})
        fields = fields.assign_coords({axis: (axis, values[axis])})
    else:
        fields = fields.assign_coords({axis: values[axis][0]})
    return fields.assign_coords({one: values[one][0]})


def _check_dates(times: xr.DataArray, source: str) -> None:
    """Raises DataFormatError if times have no unit."""
    # Of other calendars dates are cftime's.
    dated = times.dtype == object and hasattr(times.to_numpy().flat[:1][0], "calendar")
    if times.dtype.kind != "M" and not dated:
        raise DataFormatError(
            f"{source}: expected times with a unit, such as 'hours since …', found "
            f"{np.atleast_1d(times.to_numpy())[:3].tolist()}"
        )


def _read_leads(leads: xr.DataArray, source: str) -> xr.Variable:
    """Returns lead times, to the second, for float32 rounds parts of days."""
    unit = str(leads.attrs.get("units", "")).lower()
    seconds = _SECONDS.get(unit) or _SECONDS.get(unit.removesuffix("s"))
    values = leads.to_numpy()
    if values.dtype.kind == "m":
        values, seconds = values / np.timedelta64(1, "s"), 1
    if not seconds or values.dtype.kind not in "iuf":
        raise DataFormatError(
            f"{source}: expected lead times with a unit, such as 'hours', found "
            f"{np.atleast_1d(values)[:3].tolist()} {unit}"
        )
    missing = np.isnan(values)
    rounded = np.rint(np.where(missing, 0, values) * seconds).astype("m8[s]")
    values = np.where(missing, np.timedelta64("NaT"), rounded).astype("m8[ns]")
    attrs = {key: value for key, value in leads.attrs.items() if key != "units"}
    return xr.Variable(leads.dims, values, attrs)


def set_level(fields: xr.Dataset, source: str, notes: list[str]) -> xr.Dataset:
    """Returns fields whose levels are in hPa, from above."""
    if "level" not in fields.coords:
        return fields
    level = fields["level"]
    units = str(level.attrs.get("units", ""))
    told = level.attrs.get("standard_name", level.attrs.get("long_name", ""))
    if _MODEL.search(str(told)):
        raise DataFormatError(f"{source}: expected levels of pressure, found {told}")
    if not units and float(level.max()) > 2000:
        units = "Pa"
        notes.append(f"level: up to {float(level.max()):g}, taken for Pa")
    changed = weather_units.find_change(units or "hPa", "hPa")
    if changed is None:
        raise DataFormatError(f"{source}: expected levels in hPa or Pa, found {units}")
    values = level.to_numpy().astype(float) * changed[0]
    fields = fields.assign_coords(level=(level.dims, values, {"units": "hPa"}))
    return fields.sortby("level") if level.ndim else fields


def turn(fields: xr.Dataset, source: str, notes: list[str]) -> xr.Dataset:
    """Puts latitudes from north to south, and longitudes from 0 to 360."""
    latitude, longitude = (
        _in_degrees(fields[dim], source, notes) for dim in ("latitude", "longitude")
    )
    steps = np.diff(latitude)
    if not (np.all(steps > 0) or np.all(steps < 0)):
        raise DataFormatError(f"{source}: latitudes are not in order, or NaN")
    if not np.abs(latitude).max() <= 90.001:
        raise DataFormatError(
            f"{source}: expected latitudes from -90 to 90 degrees, found "
            f"{latitude.min():g} to {latitude.max():g}"
        )
    if "units" not in fields["latitude"].attrs and are_radians(latitude):
        raise DataFormatError(
            f"{source}: latitudes of {latitude.min():.4g} to {latitude.max():.4g} are "
            "radians: give them units, 'radians' or 'degrees_north'"
        )
    east = longitude % 360
    # A thousandth of a cell, or what float32 rounds.
    close = max(np.abs(np.diff(longitude)).min(initial=1.0) / 1000, 4e-5)
    # What is next to nothing below zero is zero.
    east = np.where(360 - east < close, 0.0, east)
    fields = fields.assign_coords(
        latitude=("latitude", np.clip(latitude, -90, 90), {"units": "degrees_north"}),
        longitude=("longitude", east, {"units": "degrees_east"}),
    )
    if steps.size and steps[0] > 0:
        fields = fields.isel(latitude=slice(None, None, -1))
        notes.append("latitude: now from north to south")
    if np.abs(east - longitude).max(initial=0) > close:
        notes.append("longitude: now from 0 to 360 degrees")
    if abs(abs(longitude[-1] - longitude[0]) - 360) < close:
        fields, east = fields.isel(longitude=slice(-1)), east[:-1]
        notes.append(f"longitude: {longitude[-1]:g} is the first again, and dropped")
    gaps = np.diff(np.sort(east))
    if not (np.isfinite(east).all() and (gaps > close).all()):
        raise DataFormatError(
            f"{source}: a longitude is there twice, or NaN: use "
            "drop_duplicates('longitude') after assign_coords(longitude=… % 360)"
        )
    if np.any(np.diff(east) < 0):
        fields = fields.isel(longitude=np.argsort(east, kind="stable"))
    return fields


def _in_degrees(axis: xr.DataArray, source: str, notes: list[str]) -> np.ndarray:
    values = axis.to_numpy().astype(float)
    units = str(axis.attrs.get("units", "degrees")).lower()
    if units in ("radian", "radians", "rad"):
        notes.append(f"{axis.name}: from radians to degrees")
        return np.rad2deg(values)
    if not units.startswith(("deg", "°")):
        raise DataFormatError(
            f"{source}: expected {axis.name} in degrees, found {units}"
        )
    return values
