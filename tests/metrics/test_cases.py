"""Regions, dates and cases: which points count, and for how much."""

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from hpcjax import metrics
from hpcjax.core.errors import DataFormatError

LATITUDE = np.array([80.0, 60, 40, 20, 0, -20, -40, -60, -80])
LONGITUDE = np.arange(0.0, 360, 30)
CASE = {"region": (60.0, 0.0, 330.0, 60.0), "dates": slice("2020-01-02", "2020-01-03")}
ROWS, COLUMNS, DAYS = slice(1, 5), [0, 1, 2, 11], slice(1, 3)


def make(members=3):
    rng = np.random.default_rng(0)
    coords = {
        "time": np.arange("2020-01-01", "2020-01-05", dtype="M8[D]").astype("M8[ns]"),
        "latitude": LATITUDE,
        "longitude": LONGITUDE,
    }
    dims = tuple(coords)
    truth = rng.normal(size=(4, 9, 12)).astype("f4")
    drawn = truth + rng.normal(size=(members, *truth.shape)).astype("f4")
    forecast = xr.Dataset({"t": (("number", *dims), drawn)}, coords)
    return forecast, xr.Dataset({"t": (dims, truth)}, coords)


def weigh(values):
    """The mean over a case, of areas between the middles of all latitudes."""
    bounds = np.deg2rad([90, *(LATITUDE[1:] + LATITUDE[:-1]) / 2, -90])
    area = -np.diff(np.sin(bounds))[ROWS, None]
    chosen = values[DAYS, ROWS][..., COLUMNS]
    return np.average(chosen, weights=np.broadcast_to(area, chosen.shape))


def test_a_case_is_of_its_points_each_with_its_own_area():
    forecast, truth = make()
    found = metrics.evaluate(forecast, truth, ["bias", "mae"], by=(), **CASE)
    error = (forecast["t"].mean("number") - truth["t"]).to_numpy()
    np.testing.assert_allclose(
        found["t"], [weigh(error), weigh(np.abs(error))], rtol=1e-5
    )
    assert found.attrs["region"] == str(CASE["region"])
    assert "2020-01-03" in found.attrs["dates"]
    whole = metrics.evaluate(forecast, truth, ["bias"], by=())["t"]
    globe = (90.0, -90.0, -180.0, 180.0)
    around = metrics.evaluate(forecast, truth, ["bias"], by=(), region=globe)["t"]
    assert float(around[0]) == float(whole[0])
    usual = truth.mean("time")
    acc = metrics.evaluate(
        forecast, truth, ["acc"], by=(), climatology=usual, region=(60, 0, 0, 90)
    )
    assert -1 <= float(acc["t"][0]) <= 1


def test_a_case_stands_beside_everywhere():
    forecast, truth = make()
    mean, std = forecast["t"].mean("number"), forecast["t"].std("number")
    better = (mean + truth["t"]) / 2
    gaussian = xr.Dataset(
        {"mean": better.assign_attrs(short_name="t"), "std": 0 * std + 0.5}
    )
    found = metrics.case_study({"raw": forecast, "ours": gaussian}, truth, **CASE)
    z = (truth["t"] - better).to_numpy() / 0.5
    crps = 0.5 * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z))
    crps -= 0.5 / np.sqrt(np.pi)
    own = found["t"].sel(forecast="ours", score="crps_gaussian")
    assert float(own.sel(where="case")) == pytest.approx(weigh(crps), rel=1e-4)
    members = metrics.evaluate(forecast, truth, ["rmse"], by=())["t"]
    rmse = found["t"].sel(score="rmse", where="everywhere")
    assert float(rmse.sel(forecast="raw")) == pytest.approx(float(members[0]))
    gain = found["t_gain"].sel(score="rmse", forecast="ours")
    np.testing.assert_allclose(gain, 50, atol=1e-3)
    assert not found["t_gain"].sel(forecast="raw").any()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"region": (0, 10, 0, 10)}, ValueError, "northern, southern"),
        ({"region": (10, 0, 0, np.nan)}, ValueError, "northern, southern"),
        (
            {"region": (15, 5, 0, 90)},
            DataFormatError,
            "no point of latitudes 80 to -80",
        ),
        ({"dates": "2020-01-02"}, ValueError, "a slice of the forecasts' times"),
        ({"dates": slice("2021", "2022")}, DataFormatError, "no time is selected"),
    ],
)
def test_what_is_no_case_is_named(given, error, message):
    with pytest.raises(error, match=message):
        metrics.evaluate(*make(), ["bias"], **given)


def test_what_a_gaussian_does_not_have_is_refused():
    forecast, truth = make()
    with pytest.raises(ValueError, match="a region or dates"):
        metrics.case_study({"raw": forecast}, truth)
    pair = xr.Dataset({"mean": truth["t"], "std": truth["t"]})
    with pytest.raises(ValueError, match="attribute short_name"):
        metrics.case_study({"ours": pair}, truth, **CASE)
    named = pair.assign(mean=pair["mean"].assign_attrs(short_name="t"))
    with pytest.raises(ValueError, match=r"scores of crps_gaussian.*spread"):
        metrics.case_study({"ours": named}, truth, ["spread"], **CASE)
