"""Leads, levels and analyses as inputs, spread as a target: where each number is."""

import functools

import numpy as np
import pytest
from scipy import ndimage

from hpcjax import data, metrics
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import ens10, forecast_inputs, lorenz96, postprocessing, weather
from tests.data import writers

LEAD = np.timedelta64(72, "h")
DOWN = slice(None, None, -1)


def load(change=None, **fields):
    """The writer's sixteen dates, of two leads and levels, and t850 as target."""
    cfg = ens10.MembersConfig(**{"members": 4, **fields})
    forecast, truth = (weather.canonicalise(each) for each in writers.forecasts())
    if change is not None:
        forecast, truth = change(forecast, truth)
    members, true = ens10.choose(forecast, truth, "t850", LEAD, "made")
    parts = postprocessing.split_by_part(forecast, "made")
    found = forecast_inputs.find_blocks(forecast, truth, members, LEAD, cfg)
    made = postprocessing.Forecasts(members, true, parts, *found)
    return postprocessing.make_dataset(made, cfg)


def batch(made, part="train"):
    source = getattr(made, part)
    return source.gather(np.arange(len(source)))


EVERYTHING = {"leads": (0,), "levels": "all", "control": True, "analysis": True}


@pytest.mark.acceptance("weather-uncertainty", 6)
def test_each_channel_is_what_its_name_says():
    made = load(**EVERYTHING)
    assert made.axes == (2, 2)
    x = batch(made)["x"]["fields"]
    names = made.train.channels
    assert x.shape[-1] == len(names) + 3 == 2 * 2 * 2 * 4 + 3
    assert names[:5] == [
        *(f"0 h 500 hPa {each} t" for each in ("mean", "deviation", "control")),
        *("0 h 500 hPa analysis t", "0 h 500 hPa mean z"),
    ]
    forecast, truth = (weather.canonicalise(each) for each in writers.forecasts())
    for at, name in enumerate(names):
        hours, _, level, _, statistic, variable = name.split()
        lead = np.timedelta64(int(hours), "h")
        own = forecast[variable].sel(lead_time=lead, level=float(level))[:4, :8]
        values = own.to_numpy().astype(np.float64)
        start = truth[variable].sel(level=float(level))[:8].to_numpy()
        raw = {
            "mean": values.mean(0),
            "deviation": values.std(0),
            "control": values[0],
            "analysis": start.astype(np.float64),
        }[statistic]
        expected = (raw - raw.mean(0)) / (raw.std(0) + 1e-3 * values.std())
        np.testing.assert_allclose(x[..., at], expected, atol=1e-3)


@pytest.mark.acceptance("weather-uncertainty", 6, 7)
@pytest.mark.acceptance("ens-postprocess", 9)
@pytest.mark.parametrize("standardise", ["point", "area"])
def test_inputs_hold_nothing_of_other_members_or_dates(standardise):
    def spoil(forecast, truth):
        late = forecast["part"] > 0
        known = (forecast["number"] <= 4) & ~late
        start = forecast["time"].to_numpy()[np.nonzero(late.to_numpy())[0][0]]
        return forecast.where(known, 9e3), truth.where(truth["time"] < start, -9e3)

    given = {**EVERYTHING, "standardise": standardise, "window": 3, "smoothing": 1.0}
    usual, spoilt = (
        batch(load(each, **given, learn="spread")) for each in (None, spoil)
    )
    assert not np.allclose(usual["spread"], spoilt["spread"])
    usual, spoilt = ({**each, **each["x"]} for each in (usual, spoilt))
    for name in ("members", "fields", "efi", "scale"):
        np.testing.assert_array_equal(usual[name], spoilt[name])


@pytest.mark.acceptance("weather-uncertainty", 6)
@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"learn": "truth"}, slice(4)),
        ({"learn": "spread"}, slice(None)),
        (
            {"learn": "both", "target_members": "others", "folds": 1},
            slice(4, None),
        ),
    ],
)
def test_the_target_is_the_deviation_of_the_members_asked_for(fields, chosen):
    found = batch(load(**fields))
    forecast = weather.canonicalise(writers.forecasts()[0])
    t = forecast["t"].sel(lead_time=LEAD, level=850.0)[:, :8].to_numpy()
    expected = t[chosen].astype(np.float64).std(0)
    np.testing.assert_allclose(
        found["spread"] * found["scale"][:, None, None], expected, atol=1e-4
    )
    shuffled = batch(load(**fields, shuffled=True))
    assert np.allclose(np.sort(found["spread"], 0), np.sort(shuffled["spread"], 0))
    assert not np.allclose(found["spread"], shuffled["spread"])


@pytest.mark.acceptance("weather-uncertainty", 7)
@pytest.mark.acceptance("ens-postprocess", 4)
@pytest.mark.parametrize("years", ["paper", "pooled"])
def test_statistics_of_an_area_are_scipys(years):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 8, 12, 3)) * (1 + np.arange(12)[:, None]) + 4
    cfg = ens10.MembersConfig(standardise="area", window=3, smoothing=1.5)
    groups = x if years == "paper" else x.reshape(1, 10, 8, 12, 3)
    sums = (groups.sum(1), (groups**2).sum(1), np.isfinite(groups).sum(1))
    mean, std = forecast_inputs.describe_dates(forecast_inputs.Sums(*sums), cfg)

    def around(values):
        """The mean of a window, that wraps in longitude."""
        rows = ndimage.uniform_filter1d(values, 3, axis=-3, mode="nearest")
        return ndimage.uniform_filter1d(rows, 3, axis=-2, mode="wrap")

    first, second = around(groups.mean(1)), around((groups**2).mean(1))
    for found, own in ((mean, first), (std, np.sqrt(second - first**2))):
        smooth = ndimage.gaussian_filter1d(own.mean(0), 1.5, axis=1, mode="wrap")
        smooth = ndimage.gaussian_filter1d(smooth, 1.5, axis=0, mode="nearest")
        np.testing.assert_allclose(found, smooth, atol=1e-5)


def test_each_date_is_unknown_to_one_part_of_the_means():
    given = {"learn": "both", "fold_dates": 1, "folds": 3}
    made = load(**given)
    assert (made.folds, made.joint) == (3, None)
    assert made.channels == tuple(made.train.channels)
    assert batch(made)["fold"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert set(batch(made, "validation")["fold"].tolist()) == {-1}
    joint = load(**{**given, "learn": "joint"})
    assert joint.joint
    assert batch(joint)["around"].tolist() == batch(made)["fold"].tolist()
    assert batch(joint)["asked"][0].tolist() == [1, 0, 0]
    assert not batch(load(learn="joint", folds=1))["around"].any()
    assert (load().folds, load().joint) == (None, None)
    with pytest.raises(DataFormatError, match="more than 75 dates for training"):
        load(learn="both")


def test_a_deviation_of_nothing_is_raised_and_counted(caplog):
    cfg = ens10.MembersConfig(standardise="area", window=1, smoothing=0.0)
    ones = np.ones((1, 2, 3, 1))
    with caplog.at_level("INFO", logger=forecast_inputs.__name__):
        _, std = forecast_inputs.describe_dates(forecast_inputs.Sums(*3 * [ones]), cfg)
    assert std.min() == pytest.approx(1e-3)
    assert "6 deviations of 6" in caplog.text


def test_turned_dates_keep_their_places_and_v_its_sense():
    names = ["24 h mean v", "24 h deviation v10", "24 h 500 hPa control v10"]
    rng = np.random.default_rng(0)
    x = {
        "members": rng.normal(size=(9, 4, 5, 3, 2)).astype("f4"),
        "fields": rng.normal(size=(9, 4, 5, 6)).astype("f4"),
    }
    given = {"x": x, "y": x["fields"][..., 2], "scale": np.ones(9)}
    turn = functools.partial(forecast_inputs.roll, names, ["v10", "t"])
    draws = data.example_rng(1, 0).random((9, 4))
    found = turn(mirror=True)(given, data.example_rng(1, 0), None)
    assert set((draws[:, 1] < 0.5).tolist()) == {True, False}
    for at, (share, south, *_) in enumerate(draws):
        own = np.roll(x["fields"][at], -int(share * 5), axis=1)
        member = np.roll(x["members"][at], -int(share * 5), axis=1)
        if south < 0.5:
            own, member = own[::-1] * [-1, 1, -1, 1, 1, 1], member[::-1] * [-1, 1]
        np.testing.assert_allclose(found["x"]["fields"][at, ..., :3], own[..., :3])
        np.testing.assert_allclose(found["x"]["members"][at], member)
        np.testing.assert_allclose(found["y"][at], own[..., 2])
    np.testing.assert_array_equal(found["x"]["fields"][..., 3:], x["fields"][..., 3:])
    np.testing.assert_array_equal(found["scale"], given["scale"])
    flat = turn(mirror=False)(given, data.example_rng(1, 0), None)
    assert np.allclose(
        flat["x"]["fields"][..., :3].sum(2), x["fields"][..., :3].sum(2), atol=1e-5
    )
    assert load(roll="turn").augment is not None
    others = ["mean u v", "24 h deviation v", "mean v of mean v", "my mean v"]
    assert forecast_inputs._signs(others).tolist() == [1, 1, 1, 1]


def test_the_circle_has_places_days_and_more_members():
    made = data.Lorenz96Config(
        train=6, validation=1, members=2, simulated=4, leads=(24,), lead_days=2
    )
    sizes, rest = (6, 1, 1), (2, 4, 0)
    forecast, truth = lorenz96.simulate(sizes, *rest)
    assert dict(forecast.sizes)["lead_time"] == 3
    opened = made.open(None)
    for at, block in enumerate(opened.blocks):
        own = forecast["x"].isel(lead_time=1 + at).to_numpy()
        np.testing.assert_array_equal(block.members["x"].to_numpy(), own)
    np.testing.assert_array_equal(opened.truth, truth["x"].isel(lead_time=2))
    start = np.abs(forecast["x"] - truth["x"]).isel(lead_time=0)
    more = lorenz96.simulate(sizes, *rest, share=0.01, contrast=2.0)
    wider = np.abs(more[0]["x"] - more[1]["x"]).isel(lead_time=0)
    ratio = float(np.median(wider) / np.median(start))
    assert ratio == pytest.approx(0.01 / 0.003, rel=0.25)
    forced = lorenz96._force(2.0)
    assert forced[0] == pytest.approx(21.0)
    assert forced[9] == pytest.approx(20 + 2 * 1.5)
    assert forced[27] == pytest.approx(20 - 2 * 0.5)
    assert (lorenz96._force(0.0) == 20).all()
    assert not np.allclose(more[1]["x"], truth["x"])


@pytest.mark.acceptance("weather-uncertainty", 8)
@pytest.mark.parametrize("nested", [True, False])
def test_factors_are_those_of_gaussian_members(nested):
    members = np.random.default_rng(0).standard_normal((1_000_000, 15), dtype="f4")
    known, ten = members[:, :5], members[:, :10] if nested else members[:, 5:]
    own, whole = known.std(1, dtype="f8"), ten.std(1, dtype="f8")
    second = metrics.spread_factor(5, 10) * own
    assert (second**2).mean() / (whole**2).mean() == pytest.approx(1, abs=0.003)
    assert second.mean() / whole.mean() == pytest.approx(0.966, abs=0.002)
    third = metrics.spread_factor(5, 10, "deviation") * own
    assert third.mean() / whole.mean() == pytest.approx(1, abs=0.002)


def test_the_floor_is_lower_where_inputs_are_in_the_target():
    known = {(10, True): 0.1655, (10, False): 0.2205, (20, True): 0.1398}
    for (m, nested), expected in known.items():
        found = metrics.spread_floor(5, m, nested=nested)
        assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"leads": (24,)}, r"0, 72 hours: got 24"),
        (
            {"members": 9, "learn": "spread", "target_members": "others"},
            "needs 2 more than members=9: found 10",
        ),
        ({"members": 10, "learn": "spread"}, "1 more than members=10: found 10"),
    ],
)
def test_what_the_forecasts_lack_is_named(fields, message):
    with pytest.raises(DataFormatError, match=message):
        load(**fields)


def test_what_cannot_be_asked_is_refused():
    def one_level(forecast, truth):
        return forecast.sel(level=[850.0]), truth.sel(level=[850.0])

    def no_z(forecast, truth):
        return forecast, truth.drop_vars("z")

    def south(forecast, truth):
        return forecast.isel(latitude=slice(4)), truth.isel(latitude=slice(4))

    def east(forecast, truth):
        return forecast.isel(longitude=slice(4)), truth.isel(longitude=slice(4))

    def upward(forecast, truth):
        return forecast.isel(latitude=DOWN), truth.isel(latitude=DOWN)

    with pytest.raises(DataFormatError, match=r"north to south.* found -75 to 75"):
        load(upward)
    with pytest.raises(DataFormatError, match="two levels or more"):
        load(one_level, levels="all")
    with pytest.raises(DataFormatError, match="alike in north and south: found 75"):
        load(south, roll="mirror")
    with pytest.raises(DataFormatError, match="all the way round: found 0 to 135"):
        load(east, roll="turn")
    with pytest.raises(DataFormatError, match="the truth has no z"):
        load(no_z, analysis=True)
    with pytest.raises(ConfigError, match="window must be odd"):
        ens10.MembersConfig(window=4)
    with pytest.raises(ConfigError, match="structure must be zero but for"):
        ens10.MembersConfig(structure=4.3)
    with pytest.raises(ConfigError, match="target_members must be all but for"):
        ens10.MembersConfig(target_members="others")
    with pytest.raises(ConfigError, match="members must be an integer >= 2"):
        ens10.MembersConfig(members=1)
