"""Files as archives deliver them: every value where and when it is, or refused."""

import importlib.util
import pathlib
import tempfile

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import data, metrics
from hpcjax.core.errors import DataFormatError, HpcjaxError
from hpcjax.data import weather_units
from tests.data.weather_files import (
    LEVELS,
    LONGITUDE,
    PACKED,
    READ,
    SIZES,
    and_u,
    as_valid,
    days,
    grib,
    hours,
    make,
    netcdf,
    sampled,
    unlabelled,
    value_at,
    write,
)
from tests.data.weather_refused import REFUSED

pytest.importorskip("eccodes")
pytest.importorskip("zarr")


@pytest.mark.parametrize("name", READ)
def test_every_value_is_at_its_labels(name, tmp_path):
    paths = write(READ[name], tmp_path)
    group = "a" if name in ("group", "zarr group") else None
    fields = data.open_fields(paths if len(paths) > 1 else paths[0], group=group)
    assert fields.data_vars
    for field in fields.data_vars.values():
        expected = value_at(field.coords).transpose(*field.dims)
        np.testing.assert_allclose(field, expected, atol=1e-3, err_msg=name)
    if name in SIZES:
        assert fields["t"].sizes[SIZES[name][0]] == SIZES[name][1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_named(name, tmp_path):
    message, case = REFUSED[name]
    paths = write(case, tmp_path)
    group = "a" if name.endswith(" group") else None
    with pytest.raises(HpcjaxError, match=message) as caught:
        data.open_fields(paths if len(paths) > 1 else paths[0], group=group).load()
    assert caught.value.exit_code in (2, 3)


def test_other_calendars_are_read_by_cftime(tmp_path):
    for calendar in ("noleap", "360_day"):
        units = {"units": "days since 2020-02-28", "calendar": calendar}
        netcdf(unlabelled(make(time=days(4)), units))(tmp_path)
        if importlib.util.find_spec("cftime") is None:
            message = f"'{calendar}', are read by cftime: pip install"
            with pytest.raises(HpcjaxError, match=message):
                data.open_fields(tmp_path / "0.nc")
            continue
        times = data.open_fields(tmp_path / "0.nc")["time"].to_numpy()
        expected = (3, 1) if calendar == "noleap" else (2, 29)
        assert (times[1].month, times[1].day) == expected


def test_parts_of_a_grib_file_are_chosen_by_their_variables(tmp_path):
    analysis, forecast = {"shortName": "t"}, {"shortName": "u", "endStep": 6}
    (path,) = grib(analysis, forecast)(tmp_path)
    for name, lead in (("t", 0), ("u", 6)):
        fields = data.open_fields(path, [name])
        assert fields["lead_time"] == np.timedelta64(lead, "h")
    truth = data.open_fields(grib({"shortName": "t", "dataTime": 600})(tmp_path)[0])
    forecast = data.open_fields(grib({"shortName": "t", "endStep": 6})(tmp_path)[0])
    found = metrics.evaluate(forecast, truth, ["bias"], by=())["t"]
    # What was forecast six hours before, by its lead and by its start.
    np.testing.assert_allclose(found, 0.6, atol=1e-3)
    with pytest.raises(DataFormatError, match="lacks 2020-01-01T06"):
        metrics.evaluate(forecast, data.open_fields(path, ["t"]), ["bias"])


def test_heights_and_units_of_one_side_are_no_pair(tmp_path):
    keys = {"shortName": "u", "typeOfLevel": "heightAboveGround"}
    low, high = (
        data.open_fields(grib({**keys, "level": level})(tmp_path)[0])
        for level in (80, 120)
    )
    assert (low["u"].attrs["vertical"], high["u"].attrs["vertical"]) == (
        "80 m",
        "120 m",
    )
    with pytest.raises(DataFormatError, match="forecasts are at 80 m, truth at 120 m"):
        metrics.evaluate(low, high, ["bias"])
    bare = low.assign(u=low["u"].drop_attrs().assign_attrs(vertical="80 m"))
    with pytest.raises(DataFormatError, match=r"in m s\*\*-1, the other in no unit"):
        metrics.evaluate(low, bare, ["bias"])


def test_dropped_and_turned_axes_are_logged(caplog):
    with caplog.at_level("INFO"):
        fields = data.canonicalise(make(longitude=np.arange(0.0, 361, 45)), "mine")
    assert "mine: longitude: 360 is the first again, and dropped" in caplog.text
    levels = LEVELS.assign_coords(level=[50_000.0, 85_000.0])
    assert "taken for Pa" in data.canonicalise(levels).attrs["history"]
    # Nearly nothing below zero is the first meridian, not the last.
    near = np.array([-1e-15, *LONGITUDE[1:]])
    assert data.canonicalise(make(longitude=near))["longitude"][0] == 0
    xr.testing.assert_allclose(fields, data.canonicalise(make()))


def test_unwanted_variables_may_be_in_some_files_alone(tmp_path):
    first, later = (make(lead_time=each) for each in hours(0, 6))
    paths = write(netcdf(first, and_u(later)), tmp_path)
    assert data.open_fields(paths, ["t"])["t"].sizes["lead_time"] == 2
    with pytest.raises(DataFormatError, match="do not fit together"):
        data.open_fields(paths)


def test_the_maximum_of_a_day_is_no_temperature():
    highest = make().rename(t="tasmax")
    assert "t" in data.canonicalise(highest)
    highest["tasmax"].attrs["cell_methods"] = "area: mean time: maximum"
    assert "tasmax" in data.canonicalise(highest)


def test_a_gaussian_grid_may_have_rounded_increments(tmp_path):
    (path,) = sampled("regular_gg_pl_grib2")(tmp_path)
    fields = data.open_fields(path)
    np.testing.assert_allclose(fields["longitude"], np.arange(128) * 2.8125)


UNITS = {
    ("m**2 s**-2", "J kg-1"): (1, 0),
    ("m2/s2", "m^2 s^-2"): (1, 0),
    ("mbar", "Pa"): (100, 0),
    ("dam", "m"): (10, 0),
    ("g/kg", "kg kg**-1"): (1e-3, 0),
    ("hPa/h", "Pa s**-1"): (1 / 36, 0),
    ("degF", "K"): (5 / 9, 459.67 * 5 / 9),
    **dict.fromkeys([("deg C", "K"), ("degrees Celsius", "K")], (1, 273.15)),
    ("degree_Kelvin", "K"): (1, 0),
    ("K", "Pa"): None,
}


@pytest.mark.parametrize("pair", UNITS)
def test_units_are_converted_by_what_they_are(pair):
    found = weather_units.find_change(*pair)
    assert found == (UNITS[pair] and pytest.approx(UNITS[pair]))


def test_water_is_a_depth():
    rain = make().rename(t="tp")
    rain["tp"] = rain["tp"].drop_attrs().assign_attrs(units="kg m**-2")
    np.testing.assert_allclose(data.canonicalise(rain)["tp"] * 1e3, rain["tp"])


@st.composite
def archives(draw):
    """A canonical field of any axes, and the files that an archive makes of it."""
    axes = {
        "number": draw(st.sampled_from([None, 3, [1, 2]])),
        "time": draw(st.sampled_from([days(1)[0], days(2)])),
        "lead_time": draw(st.sampled_from([None, hours(6)[0], hours(0, 6, 12)])),
        "level": draw(st.sampled_from([None, 500.0, [500.0, 850.0]])),
    }
    longitude = draw(st.sampled_from([LONGITUDE, np.arange(0.0, 361, 45)]))
    fields = make(
        longitude=longitude, **{dim: x for dim, x in axes.items() if x is not None}
    )
    parts = [fields]
    along = [dim for dim in fields["t"].dims if dim not in ("latitude", "longitude")]
    for dim in draw(st.sets(st.sampled_from(along), max_size=2)) if along else ():
        parts = [x.isel({dim: n}) for x in parts for n in range(x.sizes[dim])]
    return fields, draw(st.permutations([disguise(draw, each) for each in parts]))


def disguise(draw, fields):
    """The same field in another order, convention and precision."""
    if draw(st.booleans()):
        fields = fields.isel(latitude=slice(None, None, -1))
    if draw(st.booleans()) and fields.sizes["longitude"] == 8:
        fields = fields.roll(longitude=4, roll_coords=True)
        west = (fields["longitude"] + 180) % 360 - 180
        fields = fields.assign_coords(longitude=west)
    if draw(st.booleans()):
        fields = fields.assign_coords(
            {dim: fields[dim].astype("f4") for dim in ("latitude", "longitude")}
        )
    starts_once = "lead_time" in fields["t"].dims and not fields["time"].ndim
    if starts_once and draw(st.booleans()):
        fields = as_valid(fields)
    if "level" in fields.coords and draw(st.booleans()):
        pascals = (fields["level"].dims, fields["level"].values * 100, {"units": "Pa"})
        fields = fields.assign_coords(level=pascals).rename(level="plev")
    fields = fields.transpose(*draw(st.permutations(fields["t"].dims)))
    how = draw(st.sampled_from([{}, {"dtype": "f4"}, PACKED]))
    engine = draw(st.sampled_from(["h5netcdf", "scipy", "zarr"]))
    return fields, how, engine


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(archives())
def test_any_archive_is_the_field_that_it_was_made_of(archive):
    fields, parts = archive
    with tempfile.TemporaryDirectory() as folder:
        paths = [pathlib.Path(folder) / f"{at}" for at in range(len(parts))]
        for path, (part, how, engine) in zip(paths, parts, strict=True):
            if engine == "zarr":
                part.to_zarr(path, encoding={"t": how}, consolidated=False)
            else:
                part.to_netcdf(path, engine=engine, encoding={"t": how})
        found = data.open_fields(paths if len(paths) > 1 else paths[0])["t"].load()
    assert found.size == fields["t"].size * 8 // fields.sizes["longitude"]
    np.testing.assert_allclose(
        found, value_at(found.coords).transpose(*found.dims), atol=2e-3
    )


def test_variables_that_are_not_asked_for_may_be_of_any_unit(tmp_path):
    fields = make(time=days(3))
    fields["w"] = fields["t"].assign_attrs(units="m s-1", standard_name="")
    fields.to_netcdf(tmp_path / "both.nc", engine="h5netcdf")
    assert [*data.open_fields(tmp_path / "both.nc", ["t"])] == ["t"]
    with pytest.raises(DataFormatError, match="w"):
        data.open_fields(tmp_path / "both.nc")
