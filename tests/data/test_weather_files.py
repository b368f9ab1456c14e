"""Files as archives deliver them: every value where and when it is, or refused."""

import importlib.util

import numpy as np
import pytest
import xarray as xr

from hpcjax import data, metrics
from hpcjax.core.errors import DataFormatError, HpcjaxError
from hpcjax.data import weather_units
from tests.data.weather_files import (
    LEVELS,
    LONGITUDE,
    READ,
    REFUSED,
    SIZES,
    days,
    grib,
    make,
    netcdf,
    unlabelled,
    value_at,
    write,
)

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


UNITS = {
    ("m**2 s**-2", "J kg-1"): (1, 0),
    ("m2/s2", "m^2 s^-2"): (1, 0),
    ("mbar", "Pa"): (100, 0),
    ("dam", "m"): (10, 0),
    ("g/kg", "kg kg**-1"): (1e-3, 0),
    ("hPa/h", "Pa s**-1"): (1 / 36, 0),
    ("degF", "K"): (5 / 9, 459.67 * 5 / 9),
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
