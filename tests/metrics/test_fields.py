"""Scores of labelled forecasts: conventions, matching, pieces, what is refused."""

import subprocess
import sys

import numpy as np
import pytest
import xarray as xr

from hpcjax import data, metrics
from hpcjax.core.errors import DataFormatError
from hpcjax.metrics import fields

LATITUDE, LONGITUDE = np.array([60.0, 20.0, -20.0, -60.0]), np.arange(0.0, 360, 60)


def hours(*numbers):
    return np.array(numbers, "timedelta64[h]").astype("timedelta64[ns]")


def make(times=5, members=4, seed=0):
    """Forecasts of two leads and levels around 54 000, and truth by valid time."""
    rng = np.random.default_rng(seed)
    start = np.datetime64("2020-01-01", "ns") + hours(*(24 * np.arange(times + 2)))
    grid = {"latitude": LATITUDE, "longitude": LONGITUDE, "level": [500.0, 850.0]}
    dims = ("time", "level", "latitude", "longitude")
    truth = 54_000 + 13 * rng.normal(size=(times + 2, 2, 4, 6))
    lead = hours(0, 24)
    at = np.arange(times)[:, None] + np.arange(2)
    drawn = truth[at] + 13 * rng.normal(size=(members, times, 2, 2, 4, 6))
    named = ("number", "time", "lead_time", "level", "latitude", "longitude")
    coords = {"number": np.arange(members), "time": start[:times], "lead_time": lead}
    units = {"units": "m**2 s**-2"}
    forecast = xr.Dataset(
        {"z": (named, drawn.astype("f4"), units)}, coords={**coords, **grid}
    )
    true = {"z": (dims, truth.astype("f4"), units)}
    return forecast, xr.Dataset(true, coords={"time": start, **grid})


def by_hand(forecast, truth):
    """Members [number, time, lead, level, lat, lon] and truth, in float64."""
    x = forecast["z"].to_numpy().astype(float)
    y = truth["z"].to_numpy().astype(float)
    return x, y[np.arange(x.shape[1])[:, None] + np.arange(2)]


def weigh():
    return metrics.latitude_weights(LATITUDE)[:, None]


def test_scores_are_the_weighted_means_of_their_definitions():
    forecast, truth = make()
    x, y = by_hand(forecast, truth)
    found = metrics.evaluate(forecast, truth, fields.SCORES[:-1])["z"]
    assert found.dims == ("score", "lead_time", "level")

    def mean(values):
        whole = np.broadcast_to(weigh(), values.shape)
        return np.average(values, axis=(0, 3, 4), weights=whole)

    error = x.mean(0) - y
    pairs = np.abs(x[:, None] - x[None]).sum((0, 1))
    crps = np.abs(x - y).mean(0) - pairs / (2 * 4 * 3)
    square, variance = mean(error**2), mean(x.var(0, ddof=1))
    expected = {
        "crps": mean(crps),
        "bias": mean(error),
        "mae": mean(np.abs(error)),
        "rmse": np.sqrt(square),
        "spread": np.sqrt(variance),
        "spread_skill_ratio": np.sqrt(5 / 4 * variance / square),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found.sel(score=name), values, rtol=1e-6, atol=1e-6)
    only = metrics.evaluate(forecast, truth, ["rmse"], by=["lead_time"])["z"]
    np.testing.assert_allclose(only[0], np.sqrt(square.mean(1)), rtol=1e-6)
    assert found.attrs["units"] == "m**2 s**-2"


def test_every_convention_is_an_argument_and_recorded():
    forecast, truth = make()
    x, y = by_hand(forecast, truth)
    how = fields.Conventions(
        weights="none",
        order="sqrt_per_time",
        estimator="unfair",
        finite_correction=False,
        ddof=1,
    )
    names = ("crps", "crps_gaussian", "rmse", "spread_skill_ratio")
    result = metrics.evaluate(forecast, truth, names, by=(), conventions=how)
    found = dict(zip(names, result["z"].to_numpy(), strict=True))
    error = x.mean(0) - y
    per_time = np.sqrt((error**2).mean((3, 4)))
    assert found["rmse"] == pytest.approx(per_time.mean(), rel=1e-6)
    ratio = np.sqrt(x.var(0, ddof=1).mean() / (error**2).mean())
    assert found["spread_skill_ratio"] == pytest.approx(ratio, rel=1e-6)
    assert result.attrs["order"] == "sqrt_per_time"
    assert result.attrs["estimator"] == "unfair"
    assert (result.attrs["members"], result.attrs["forecasts"]) == ("4", "5")
    usual = metrics.evaluate(forecast, truth, names, by=())["z"].to_numpy()
    assert found["crps"] > usual[0]
    assert abs(found["crps_gaussian"] - usual[1]) > 0.01


def test_anomalies_are_of_the_climatology_that_is_given():
    forecast, truth = make()
    x, y = by_hand(forecast, truth)
    usual = truth.mean("time")
    f, a = x.mean(0) - usual["z"].to_numpy(), y - usual["z"].to_numpy()
    sums = [(weigh() * each).sum((3, 4)) for each in (f * a, f * f, a * a)]
    expected = (sums[0] / np.sqrt(sums[1] * sums[2])).mean(0)
    found = metrics.evaluate(forecast, truth, ["acc"], climatology=usual)["z"]
    # The climatology itself is rounded at 54 000.
    np.testing.assert_allclose(found[0], expected, rtol=1e-3)
    with pytest.raises(ValueError, match="acc needs a climatology"):
        metrics.evaluate(forecast, truth, ["acc"])
    lost = usual.copy(deep=True)
    lost["z"][0, 1, 2] = np.nan
    with pytest.raises(DataFormatError, match="z is NaN in 10 points"):
        metrics.evaluate(forecast, truth, ["acc"], climatology=lost)
    mask = xr.ones_like(usual["z"].isel(level=0, drop=True))
    mask[1, 2] = 0
    skipped = metrics.evaluate(forecast, truth, ["acc"], climatology=lost, skipna=True)
    masked = metrics.evaluate(forecast, truth, ["acc"], climatology=usual, mask=mask)
    np.testing.assert_allclose(skipped["z"][..., 0], masked["z"][..., 0], rtol=1e-6)
    np.testing.assert_allclose(skipped["z"][..., 1], found[..., 1], rtol=1e-6)
    turned = usual.isel(latitude=slice(None, None, -1))
    with pytest.raises(DataFormatError, match="reversed"):
        metrics.evaluate(forecast, truth, ["acc"], climatology=turned)
    how = fields.Conventions(order="last")
    with pytest.raises(ValueError, match="order must be"):
        metrics.evaluate(forecast, truth, conventions=how)


@pytest.mark.acceptance("forecast-metrics", 9)
def test_order_and_names_change_no_score(tmp_path):
    forecast, truth = make()
    expected = metrics.evaluate(forecast, truth)["z"]
    turned = forecast.transpose("longitude", "latitude", "level", ...)
    np.testing.assert_array_equal(metrics.evaluate(turned, truth)["z"], expected)
    both = [each.isel(latitude=slice(None, None, -1)) for each in (forecast, truth)]
    np.testing.assert_allclose(metrics.evaluate(*both)["z"], expected, rtol=1e-6)
    renamed = [data.to_weatherbench(each) for each in (forecast, truth)]
    assert "geopotential" in renamed[0]
    assert "prediction_timedelta" in renamed[0].dims
    again = [data.canonicalise(each) for each in renamed]
    np.testing.assert_allclose(metrics.evaluate(*again)["z"], expected, rtol=1e-6)
    with pytest.raises(DataFormatError, match=r"reversed, use sortby\('latitude'\)"):
        metrics.evaluate(both[0], truth)


def test_pieces_of_any_size_give_the_same(monkeypatch):
    forecast, truth = make(times=7)
    whole = metrics.evaluate(forecast, truth)["z"]
    monkeypatch.setattr(fields, "_PIECE", 1)
    np.testing.assert_allclose(metrics.evaluate(forecast, truth)["z"], whole, rtol=1e-6)


def test_what_is_nan_is_masked_or_skipped_or_refused():
    forecast, truth = make()
    spoilt = truth.copy(deep=True)
    spoilt["z"][3, :, 1, 2] = np.nan
    with pytest.raises(DataFormatError, match=r"z is NaN in 4 points .* 2020-01-03"):
        metrics.evaluate(forecast, spoilt)
    mask = xr.DataArray(
        np.ones((4, 6)),
        coords={"latitude": LATITUDE, "longitude": LONGITUDE},
        dims=("latitude", "longitude"),
    )
    mask[1, 2] = 0
    masked = metrics.evaluate(forecast, spoilt, mask=mask)
    same = metrics.evaluate(forecast, truth, mask=mask)
    np.testing.assert_array_equal(masked["z"], same["z"])
    skipped = metrics.evaluate(forecast, spoilt, skipna=True)
    assert float(skipped.attrs["skipped"]) == pytest.approx(4 / (5 * 2 * 2 * 24))
    assert np.isfinite(skipped["z"]).all()


def test_a_single_time_and_lead_time_are_matched_all_the_same():
    forecast, truth = make()
    day = forecast.isel(lead_time=[1])
    expected = metrics.evaluate(day, truth, ["rmse"], by=())["z"]
    scalar = forecast.isel(lead_time=1)
    found = metrics.evaluate(scalar, truth, ["rmse"], by=())["z"]
    np.testing.assert_allclose(found, expected)
    one = truth.isel(time=3)
    with pytest.raises(DataFormatError, match="lacks 2020-01-01"):
        metrics.evaluate(forecast, one, ["rmse"])
    first = forecast.isel(time=[2], lead_time=[1])
    np.testing.assert_allclose(
        metrics.evaluate(first, one, ["rmse"], by=())["z"],
        metrics.evaluate(first, truth, ["rmse"], by=())["z"],
    )


def test_leads_of_the_truth_are_matched_by_value():
    forecast, truth = make()
    at = xr.DataArray(np.arange(5)[:, None] + np.arange(2), dims=("start", "lead_time"))
    own = truth.isel(time=at).drop_vars("time").rename(start="time")
    own = own.assign_coords(time=forecast["time"], lead_time=forecast["lead_time"])
    expected = metrics.evaluate(forecast, truth)["z"]
    turned = own.isel(lead_time=[1, 0])
    np.testing.assert_allclose(metrics.evaluate(forecast, turned)["z"], expected)


def test_small_integers_do_not_wrap_and_no_time_counts_without_points():
    forecast, truth = make()
    small = [(each - 53_900).clip(0, 250).astype("uint8") for each in (forecast, truth)]
    wide = [each.astype("float64") for each in small]
    np.testing.assert_allclose(
        metrics.evaluate(*small)["z"], metrics.evaluate(*wide)["z"], rtol=1e-6
    )
    lost = forecast.copy(deep=True)
    lost["z"][:, 2] = np.nan
    how = fields.Conventions(order="sqrt_per_time")
    kept = forecast.isel(time=[0, 1, 3, 4])
    found = metrics.evaluate(lost, truth, ["rmse"], conventions=how, skipna=True)
    expected = metrics.evaluate(kept, truth, ["rmse"], conventions=how)
    np.testing.assert_allclose(found["z"], expected["z"], rtol=1e-6)


def lose_one(forecast):
    forecast = forecast.copy(deep=True)
    forecast["z"][1, 0, 0, 0, 0, 0] = np.nan
    return forecast


CHANGES = {
    "level": lambda f, t: (f, t.assign_coords(level=[50000.0, 85000.0])),
    "time": lambda f, t: (f, t.isel(time=slice(3))),
    "name": lambda f, t: (f, t.rename(z="gh")),
    "grid": lambda f, t: (f.isel(longitude=slice(5)), t),
    "members": lambda f, t: (f.isel(number=[0]), t),
    "leads": lambda f, t: (f.assign_coords(lead_time=[0, 24]), t),
    "units": lambda f, t: (f, t.assign(z=t["z"].assign_attrs(units="m"))),
    "empty": lambda f, t: (f.isel(time=slice(0)), t),
    "twice": lambda f, t: (f, t.isel(time=[0, 0, 1, 2, 3, 4, 5, 6])),
    "member": lambda f, t: (lose_one(f), t),
}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("level", "hPa and Pa"),
        ("time", r"lacks 2020-01-04.*it has 2020-01-01"),
        ("name", "no variable in common: z and gh"),
        ("grid", "forecasts have 5 from 0 to 240, truth 6 from 0 to 300"),
        ("members", "crps needs at least 2 members, got 1"),
        ("leads", "lead times must have a unit"),
        ("units", r"is in m\*\*2 s\*\*-2, the other in m"),
        ("empty", "no time is selected"),
        ("twice", "has a time twice"),
        ("member", "z is NaN in 1 points"),
    ],
)
def test_what_does_not_fit_is_named(case, message):
    with pytest.raises((DataFormatError, ValueError), match=message):
        metrics.evaluate(*CHANGES[case](*make()))


def test_an_unknown_score_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown score 'rsme'.*rmse"):
        metrics.evaluate(*make(), ["rsme"])


SCORE_STORE = """
import resource, sys
import xarray as xr
from hpcjax import data, metrics

forecast, truth = (data.open_fields(sys.argv[1], group=each) for each in ("f", "t"))
assert forecast["z"].nbytes > 4e9
found = metrics.evaluate(forecast, truth, ["crps", "mae"], by=())["z"]
print(*found.values, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.acceptance("forecast-metrics", 12)
def test_a_store_of_four_gigabytes_is_scored_in_one(tmp_path):
    zarr = pytest.importorskip("zarr")
    times, rows, columns = 260, 721, 600
    dims = ("number", "time", "latitude", "longitude")
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + hours(*range(times)),
        "latitude": np.linspace(90, -90, rows),
        "longitude": np.linspace(0, 359, columns),
    }
    for group, value, members in (("f", 3.0, 10), ("t", 1.0, 0)):
        xr.Dataset(coords=coords).to_zarr(tmp_path, group=group, consolidated=False)
        shape = (members, times, rows, columns)[0 if members else 1 :]
        # No chunk is written: all are read as the value that fills them.
        zarr.open_group(tmp_path, path=group).create_array(
            "z",
            shape=shape,
            chunks=(*shape[:-3], 1, rows, columns),
            dtype="float32",
            fill_value=value,
            dimension_names=dims[0 if members else 1 :],
            attributes={"_FillValue": "AAAAAAAA+H8="},
        )
    done = subprocess.run(
        [sys.executable, "-c", SCORE_STORE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    crps, mae, peak = map(float, done.stdout.split())
    assert (crps, mae) == (pytest.approx(2), pytest.approx(2))
    assert peak < 1e6  # KiB


def test_what_is_no_number_is_not_scored():
    forecast, truth = make()
    for dtype in ("m8[ns]", "c8", str):
        with pytest.raises(DataFormatError, match="z must be numbers: got"):
            metrics.evaluate(forecast.astype(dtype), truth, ["bias"])
