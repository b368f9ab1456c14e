"""Weather files of every format and convention, whole and damaged."""

import itertools

import numpy as np
import pytest
import xarray as xr

from hpcjax import data, metrics
from hpcjax.core.errors import DataFormatError, DataMissing
from tests import guides
from tests.data import writers

eccodes = pytest.importorskip("eccodes")

DAYS, STEPS, MEMBERS, LEVELS = (20010104, 20020104), (0, 24, 48), (1, 2), (850, 500)
VARIABLES = {"z": 129, "t": 130}


def value_of(day, step, member, level, parameter):
    """A field of 6 by 8 points that tells which message it is of."""
    number = (day // 10_000 - 2000) * 1000 + step * 10 + member + level / 10_000
    return number + 100_000 * (parameter == 129) + np.arange(48.0)


def message(day, step, member, level, parameter):
    """One message of ENS-10's kind: perturbed forecast, GRIB 1, from north to south."""
    handle = eccodes.codes_grib_new_from_samples("regular_ll_pl_grib1")
    keys = {
        **{"centre": "ecmf", "table2Version": 128, "indicatorOfParameter": parameter},
        **{"dataDate": day, "dataTime": 0, "stepUnits": "h", "endStep": step},
        **{"level": level, "Ni": 8, "Nj": 6},
        "latitudeOfFirstGridPointInDegrees": 75.0,
        "latitudeOfLastGridPointInDegrees": -75.0,
        "longitudeOfFirstGridPointInDegrees": 0.0,
        "longitudeOfLastGridPointInDegrees": 315.0,
        "iDirectionIncrementInDegrees": 45.0,
        "jDirectionIncrementInDegrees": 30.0,
        "setLocalDefinition": 1,
        **{"localDefinitionNumber": 1, "type": "pf", "stream": "enfo"},
        **{"perturbationNumber": member, "numberOfForecastsInEnsemble": 2},
        "bitsPerValue": 24,
    }
    for key, value in keys.items():
        eccodes.codes_set(handle, key, value)
    values = value_of(day, step, member, level, parameter)
    eccodes.codes_set_values(handle, values)
    content = eccodes.codes_get_message(handle)
    eccodes.codes_release(handle)
    return content


@pytest.fixture(scope="module")
def messages():
    """All messages of a tiny file of ENS-10's form, by what they are of."""
    cells = itertools.product(DAYS, STEPS, MEMBERS, LEVELS, VARIABLES.values())
    return {cell: message(*cell) for cell in cells}


def write(path, contents):
    path.write_bytes(b"".join(contents))
    return path


@pytest.mark.acceptance("ens10", 2)
def test_every_message_of_a_grib_file_is_in_its_place(messages, tmp_path):
    cells = list(messages)
    order = np.random.default_rng(0).permutation(len(cells))
    shuffled = write(tmp_path / "a.grib", [messages[cells[at]] for at in order])
    fields = data.open_fields(shuffled)
    assert fields["z"].dims == (
        *("number", "time", "lead_time", "level"),
        *("latitude", "longitude"),
    )
    assert fields["level"].to_numpy().tolist() == [500, 850]
    assert fields["latitude"].to_numpy().tolist() == [75, 45, 15, -15, -45, -75]
    for day, step, member, level, parameter in cells:
        name = {129: "z", 130: "t"}[parameter]
        found = fields[name].sel(
            time=np.datetime64(f"{day // 10_000}-01-04"),
            lead_time=np.timedelta64(step, "h"),
            number=member,
            level=level,
        )
        expected = value_of(day, step, member, level, parameter)
        np.testing.assert_allclose(found.to_numpy().ravel(), expected, rtol=1e-6)


@pytest.mark.faults(9)
@pytest.mark.acceptance("ens10", 2)
def test_missing_and_doubled_messages_are_named(messages, tmp_path):
    lost = (DAYS[1], 24, 2, 850, 130)
    rest = [content for cell, content in messages.items() if cell != lost]
    path = write(tmp_path / "a.grib", rest)
    with pytest.raises(
        DataFormatError, match=r"no message of t, number=2, time=2002-01"
    ):
        data.open_fields(path)
    twice = write(tmp_path / "b.grib", [*messages.values(), messages[lost]])
    with pytest.raises(DataFormatError, match=r"2 messages of t, number=2"):
        data.open_fields(twice)
    whole = b"".join(messages.values())
    for name, content in {"cut": whole[:-50], "empty": b"GRIB"}.items():
        with pytest.raises(DataFormatError, match="damaged GRIB"):
            data.open_fields(write(tmp_path / name, [content]))


def test_a_file_may_be_a_part_and_several_are_joined(messages, tmp_path):
    paths = [
        write(
            tmp_path / f"{day}.grib",
            [c for cell, c in messages.items() if cell[0] == day],
        )
        for day in DAYS
    ]
    joined = data.open_fields(paths, ["t"])
    assert list(joined.data_vars) == ["t"]
    one = data.open_fields(write(tmp_path / "all.grib", messages.values()))
    np.testing.assert_array_equal(joined["t"], one["t"])
    with pytest.raises(DataFormatError, match="expected variables q, found z, t"):
        data.open_fields(paths[0], ["q"])


def small(**changes):
    """A field of the weather on 3 by 4 points at two times."""
    coords = {
        "time": np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]"),
        "latitude": [60.0, 0.0, -60.0],
        "longitude": [0.0, 90.0, 180.0, 270.0],
    } | changes
    values = np.arange(24.0).reshape(2, 3, 4)
    fields = xr.Dataset(coords=coords)
    fields["t2m"] = (("time", "latitude", "longitude"), values, {"units": "K"})
    return fields


def test_other_conventions_become_ours():
    ours = data.canonicalise(small())
    cdo = small().rename(latitude="lat", longitude="lon", t2m="T2M")
    western = small().roll(longitude=2)
    western = western.assign_coords(longitude=[-180.0, -90.0, 0.0, 90.0])
    southern = small().isel(latitude=slice(None, None, -1))
    celsius = small().assign(t2m=(small()["t2m"] - 273.15).assign_attrs(units="degC"))
    turned = small().transpose("longitude", "time", "latitude")
    long = small().rename(t2m="2m_temperature", time="valid_time")
    for other in (cdo, western, southern, celsius, turned, long):
        again = data.canonicalise(other)
        np.testing.assert_allclose(again["t2m"], ours["t2m"], rtol=1e-6)
        assert again["t2m"].dims == ("time", "latitude", "longitude")
        assert again["t2m"].attrs["units"] == "K"
    assert "from 0 to 360" in data.canonicalise(western).attrs["history"]
    assert "from degC to K" in data.canonicalise(celsius).attrs["history"]


def test_levels_of_pascals_and_heights_are_told_apart():
    forecast, _ = writers.forecasts()
    pascals = forecast.assign_coords(
        isobaricInhPa=("isobaricInhPa", [50_000.0, 85_000.0], {"units": "Pa"})
    ).rename(isobaricInhPa="plev")
    assert data.canonicalise(pascals)["level"].to_numpy().tolist() == [500, 850]
    for attrs in ({"units": "gpm"}, {"standard_name": "geopotential_height"}):
        z = forecast["z"].drop_attrs().assign_attrs(attrs)
        assert "gh" in data.canonicalise(forecast.assign(z=z))
    heights = forecast.assign(z=forecast["z"].assign_attrs(units="gpm"))
    assert set(data.canonicalise(heights).data_vars) == {"gh", "t", "t2m"}
    assert data.canonicalise(forecast)["lead_time"].dtype == "timedelta64[ns]"
    again = data.canonicalise(data.to_weatherbench(data.canonicalise(forecast)))
    xr.testing.assert_allclose(again, data.canonicalise(forecast))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.isel(time=[1, 0]), "2020-01-01.* comes after 2020-01-02.*sortby"),
        (lambda d: d.isel(time=[0, 0]), "is there twice: use drop_duplicates"),
        (lambda d: d.isel(time=slice(0)), "no time is selected"),
        (lambda d: d.rename(latitude="y"), "a dimension latitude and one longitude"),
        (
            lambda d: d.assign(t2m=d["t2m"].assign_attrs(units="Pa")),
            "expected t2m in K, found 'Pa'",
        ),
        (
            lambda d: d.expand_dims(step=[24, 48]),
            "expected lead times with a unit, such as 'hours'",
        ),
        (lambda d: d.assign(T2M=d["t2m"] + 1), "are both t2m"),
        (lambda d: d.drop_vars("latitude"), "latitude has no coordinates"),
        (
            lambda d: d.assign_coords(longitude=[0.0, 90.0, 450.0, 180.0]),
            "a longitude is there twice",
        ),
        (
            lambda d: d.assign_coords(latitude=[60.0, np.nan, -60.0]),
            "latitudes are not in order, or NaN",
        ),
        (
            lambda d: d.assign_coords(
                forecast_period=("time", np.array([0, 23], "timedelta64[h]"))
            ),
            "lead_time as two dimensions",
        ),
    ],
)
def test_what_cannot_be_is_named(change, message):
    with pytest.raises(DataFormatError, match=message):
        data.canonicalise(change(small()))


@pytest.mark.faults(9)
def test_netcdf_and_zarr_are_opened_by_what_they_are(tmp_path):
    small().to_netcdf(tmp_path / "a", engine="h5netcdf")
    small().to_netcdf(tmp_path / "b", engine="scipy", format="NETCDF3_64BIT")
    small().to_zarr(tmp_path / "c", consolidated=False)
    for name in "abc":
        xr.testing.assert_allclose(
            data.open_fields(tmp_path / name), data.canonicalise(small())
        )
    (tmp_path / "d").write_text("latitude,longitude")
    with pytest.raises(DataFormatError, match="expected GRIB, netCDF or zarr"):
        data.open_fields(tmp_path / "d")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataFormatError, match="expected a zarr store, found a folder"):
        data.open_fields(tmp_path / "folder")
    (tmp_path / "e").write_bytes((tmp_path / "a").read_bytes()[:2000])
    with pytest.raises(DataFormatError, match="damaged netCDF"):
        data.open_fields(tmp_path / "e")
    with pytest.raises(DataMissing, match="there is no file"):
        data.open_fields(tmp_path / "f")


def test_a_file_of_ones_own_is_scored_with_one_import(messages, tmp_path):
    path = write(tmp_path / "a.grib", messages.values())
    forecast = data.open_fields(path)
    truth = forecast.isel(number=0) - 1.0
    found = metrics.evaluate(forecast, truth, ["bias", "spread"])
    # Members 1 and 2 differ by one; the truth is one below the first.
    np.testing.assert_allclose(found["t"].sel(score="bias"), 1.5, rtol=1e-4)
    np.testing.assert_allclose(found["t"].sel(score="spread"), np.sqrt(0.5), rtol=1e-3)


def test_the_guides_code_scores_a_forecast(messages, tmp_path, monkeypatch):
    write(tmp_path / "my-forecast.grib", messages.values())
    member = data.open_fields(tmp_path / "my-forecast.grib").isel(number=0)
    valid = member.isel(lead_time=0).drop_vars(["number", "lead_time"])
    leads = member["lead_time"].values
    truth = [valid.assign_coords(time=valid["time"].values + lead) for lead in leads]
    analysis = xr.concat(truth, "time").sortby("time")
    analysis.to_netcdf(tmp_path / "analysis.nc", engine="h5netcdf")
    monkeypatch.chdir(tmp_path)
    scores = guides.run("weather.md")["scores"]
    assert set(scores.data_vars) == {"z", "t"}
    assert scores["t"].dims == ("score", "lead_time")
    assert np.isfinite(scores["t"].sel(score=["crps", "rmse"])).all()
