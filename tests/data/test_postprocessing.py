"""Forecasts with members as examples: splits, statistics, generators, real tables."""

import lzma
import pickle

import numpy as np
import pytest
import xarray as xr

from hpcjax import data, metrics
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import ens10, ensembles, lorenz96, postprocessing, rain, weather
from tests.data import writers


def forecasts(change=None):
    """Sixteen dates of t at 850 hPa: eight for training, six and two held out."""
    pair = [weather.canonicalise(each) for each in writers.forecasts()]
    if change is not None:
        pair = change(*pair)
    lead = np.timedelta64(72, "h")
    members, truth = ens10.choose(*pair, "t850", lead, "made")
    parts = postprocessing.split_by_part(pair[0], "made")
    return postprocessing.Forecasts(members, truth, parts)


def make(forecasts, **fields):
    return postprocessing.make_dataset(forecasts, ens10.MembersConfig(**fields))


def gather(made, part="train"):
    source = made.train if part == "train" else made.validation
    return trees.flatten(source.gather(np.arange(len(source))))


def test_examples_are_standardised_members_and_truth():
    made = make(forecasts(), members=10)
    batch = gather(made)
    given = forecasts()
    t = given.members["t"].to_numpy()[:, :8].astype(np.float64)
    z = given.members["z"].to_numpy()[:, :8].astype(np.float64)
    y = given.truth.to_numpy()[:8].astype(np.float64)
    assert list(given.members) == ["t", "z"]
    unit = t.std()
    np.testing.assert_allclose(batch["scale"], unit, rtol=1e-6)
    standard = np.moveaxis((t - t.mean()) / unit, 0, -1)
    np.testing.assert_allclose(batch["x/members"][..., 0], standard, atol=1e-5)
    np.testing.assert_allclose(batch["y"], (y - t.mean()) / unit, atol=1e-5)
    inputs = np.stack(
        [
            stat
            for values in (t, z)
            for stat in (values.mean(0) / values.std(), values.std(0) / values.std())
        ],
        axis=-1,
    )
    expected = (inputs - inputs.mean(0)) / (inputs.std(0) + 1e-3)
    np.testing.assert_allclose(batch["x/fields"][..., :4], expected, atol=1e-4)
    place = batch["x/fields"][0, 0, 2, 4:]
    phi, lam = np.deg2rad([75.0, 90.0])
    sphere = [np.sin(phi), np.cos(phi) * np.sin(lam), np.cos(phi) * np.cos(lam)]
    np.testing.assert_allclose(place, sphere, atol=1e-6)


@pytest.mark.acceptance("ens10", 10)
def test_extremes_are_by_the_training_members():
    given = forecasts()
    made = make(given, members=10, holdout="test")
    found = gather(made, "test")["efi"]
    t = given.members["t"].to_numpy().astype(np.float64)
    climate = np.quantile(t[:, :8].reshape(-1, 6, 8), np.linspace(0, 1, 21), axis=0)
    p = np.linspace(0, 1, 21)
    for at in range(2):
        for row in range(6):
            for column in range(8):
                ranks = np.interp(
                    t[:, 14 + at, row, column], climate[:, row, column], p
                )
                expected = (4 / np.pi * np.arcsin(np.sqrt(ranks)) - 1).mean()
                assert found[at, row, column] == pytest.approx(expected, abs=1e-3)


@pytest.mark.acceptance("ens10", 4)
def test_training_batches_know_nothing_of_other_dates():
    def spoil(forecast, truth):
        late = np.nonzero(forecast["part"].to_numpy() > 0)[0]
        start = forecast["time"].to_numpy()[late[0]]
        forecast = forecast.where(forecast["part"] == 0, 9999.0)
        valid = truth["time"] >= start + np.timedelta64(3, "D")
        return forecast, truth.where(~valid, -9999.0)

    usual = gather(make(forecasts(), members=10))
    spoilt = gather(make(forecasts(spoil), members=10))
    for name, values in usual.items():
        np.testing.assert_array_equal(values, spoilt[name])


@pytest.mark.acceptance("ens10", 4)
def test_years_are_those_for_which_forecasts_are_valid():
    starts = np.array(["2013-12-30", "2013-12-31", "2015-12-31"], "datetime64[ns]")
    valid = starts + np.timedelta64(48, "h")
    parts = postprocessing.split_by_year(valid, (2014, 2015), (2016, 2017))
    assert parts.tolist() == ["validation", "validation", "test"]
    late = postprocessing.split_by_year(
        np.array(["2018-02-01"], "datetime64[ns]"), (2014,), (2016,)
    )
    assert late.tolist() == [""]


@pytest.mark.acceptance("ens10", 3)
def test_start_dates_are_mondays_and_thursdays():
    dates = data.start_dates()
    assert len(dates) == 105
    assert {day.item().strftime("%a") for day in dates} == {"Mon", "Thu"}
    assert str(dates[-1] + np.timedelta64(2, "D")) == "2019-01-02"


@pytest.mark.acceptance("ens10", 5)
def test_five_members_hold_nothing_of_the_others():
    def spoil(forecast, truth):
        return forecast.where(forecast["number"] <= 2, 1e9), truth

    made = [gather(make(forecasts(change), members=2)) for change in (None, spoil)]
    for name, values in made[0].items():
        np.testing.assert_array_equal(values, made[1][name])
    more = gather(make(forecasts(), members=10))
    assert not np.allclose(more["x/fields"], made[0]["x/fields"], atol=0.01)


def test_dates_of_two_parts_never_overlap():
    for sizes in (*ensembles.SIZES.values(), {"train": 14, "validation": 3, "test": 3}):
        starts = ensembles.number_states(sizes)
        days = {part: ensembles.EVERY * at for part, at in starts.items()}
        for one, other in (("train", "validation"), ("validation", "test")):
            apart = days[other].min() - days[one].max()
            assert apart >= ensembles.APART > ensembles.LEADS[-1] / 24
        for at in starts["test"][:2]:
            pairs = ensembles.draw_pairs(int(at), starts["train"], 11)
            assert set(pairs.ravel()) <= set(starts["train"])
            assert (pairs[:, 0] != pairs[:, 1]).all()
    times = np.arange("2020-01-01", "2020-02-01", dtype="datetime64[D]")
    lead = np.timedelta64(3, "D")
    parts = postprocessing.split_in_time(times, lead, 0.2)
    last = times[parts == "train"].max() + lead
    assert last < times[parts == "validation"].min()
    assert (parts == "").sum() == 3


def test_what_is_nan_is_no_part_of_the_score():
    def spoil(forecast, truth):
        land = xr.zeros_like(truth["t"], bool)
        land[{"latitude": 2, "longitude": 3}] = True
        return forecast, truth.assign(t=truth["t"].where(~land))

    made = make(forecasts(spoil), members=10, weights="cos")
    batch = gather(made)
    assert (batch["area"][:, 2, 3] == 0).all()
    assert (batch["area"] > 0).sum() == 8 * 47
    assert all(np.isfinite(values).all() for values in batch.values())

    def lose(forecast, truth):
        return forecast, truth.assign(t=truth["t"] * np.nan)

    with pytest.raises(DataFormatError, match="no point that is not NaN"):
        make(forecasts(lose), members=10)


def test_a_point_without_a_climate_is_not_scored():
    def lose(forecast, truth):
        forecast = forecast.copy(deep=True)
        train = forecast["time"][postprocessing.split_by_part(forecast, "") == "train"]
        where = forecast["time"].isin(train) & (forecast["latitude"] == 75.0)
        return forecast.assign(t=forecast["t"].where(~where)), truth

    made = make(forecasts(lose), members=10)
    batch = gather(made, "validation")
    row = list(forecasts().truth["latitude"].to_numpy()).index(75.0)
    scored = np.arange(batch["area"].shape[1]) != row
    assert (batch["area"] == scored[:, None]).all()
    assert all(np.isfinite(values).all() for values in batch.values())


def test_one_lost_date_spoils_no_other():
    def lose(forecast, truth):
        forecast = forecast.copy(deep=True)
        forecast["t"][2, 3, :, :, 0, 0] = np.nan
        return forecast, truth

    usual = gather(make(forecasts(), members=10))
    batch = gather(make(forecasts(lose), members=10))
    lost = np.zeros(8, bool)
    lost[3] = True
    np.testing.assert_array_equal(batch["area"][:, 0, 0], ~lost)
    assert all(np.isfinite(values).all() for values in batch.values())
    close = np.abs(batch["x/fields"] - usual["x/fields"])[~lost, 0, 0]
    assert close.max() < 1.5


def test_parts_are_by_their_flags():
    flags = {"flag_values": [1, 2, 3], "flag_meanings": "train validation test"}
    fields = xr.Dataset({"part": ("time", [1, 2, 2], flags)})
    parts = postprocessing.split_by_part(fields, "made").tolist()
    assert parts == ["train", "validation", "validation"]


def test_what_is_no_forecast_is_no_input():
    pair = [weather.canonicalise(each) for each in writers.forecasts()]
    mask = xr.zeros_like(pair[0]["t2m"][0, 0, 0]).drop_vars(("number", "time"))
    more = pair[0].assign(land=mask, crs=((), 0))
    lead = np.timedelta64(72, "h")
    members, _ = ens10.choose(more, pair[1], "t2m", lead, "made")
    assert list(members) == ["t2m"]
    single = pair[0].isel(lead_time=0)
    with pytest.raises(
        DataFormatError, match=r"lead times \[0.0\] hours, not \[72.0\]"
    ):
        ens10.choose(single, pair[1], "t2m", lead, "made")
    many = pair[1].expand_dims(number=2)
    with pytest.raises(DataFormatError, match="the truth has 2 members"):
        ens10.choose(pair[0], many, "t2m", lead, "made")


def test_the_score_is_in_the_targets_own_unit():
    made = make(forecasts(), members=10, weights="cell_area")
    batch = made.train.gather(np.arange(8))

    class Raw:
        mean = batch["x"]["members"][..., 0].mean(-1)
        std = batch["x"]["members"][..., 0].std(-1)

    totals = metrics.gaussian_totals(Raw, batch)
    given = forecasts()
    t = given.members["t"].to_numpy()[:, :8].astype(np.float64)
    y = given.truth.to_numpy()[:8].astype(np.float64)
    crps = np.asarray(metrics.crps_gaussian(t.mean(0), t.std(0), y), np.float64)
    rows = metrics.latitude_weights(given.members["latitude"].to_numpy())[:, None]
    weights = np.broadcast_to(rows, y.shape)
    assert float(totals.count) == 8
    for name, values in {
        "loss": crps,
        "eecrps": np.abs(batch["efi"]) * crps,
        "square": (t.mean(0) - y) ** 2,
        "variance": t.var(0),
    }.items():
        expected = 8 * np.average(values, weights=weights)
        assert float(totals.sums[name]) == pytest.approx(expected, rel=1e-4)


def test_the_control_pairs_forecasts_with_other_truths():
    usual, shuffled = (
        gather(make(forecasts(), members=10, shuffled=each)) for each in (False, True)
    )
    np.testing.assert_array_equal(usual["x/members"], shuffled["x/members"])
    assert not np.allclose(usual["y"], shuffled["y"])
    np.testing.assert_allclose(np.sort(usual["y"], 0), np.sort(shuffled["y"], 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "t700"}, "expected one of t2m, t500, t850, z500, z850"),
        ({"lead_hours": 48}, r"holds lead times \[0.0, 72.0\] hours, not \[48.0\]"),
        ({"members": 12}, "expected 12 members, found 10"),
    ],
)
def test_what_the_store_lacks_is_named(change, message, tiny_root):
    fields = {"members": 3, **change}
    with pytest.raises(DataFormatError, match=message):
        data.Ens10Config(**fields).load(tiny_root)


def test_a_file_of_ones_own_needs_a_truth_and_a_lead_time(tiny_root):
    path = "weather-file/forecast.nc"
    with pytest.raises(ConfigError, match=r"dataset\.truth must name a file"):
        data.WeatherFileConfig(path=path).load(tiny_root)
    many = tiny_root / "two-leads.nc"
    writers.forecasts()[0].to_netcdf(many, engine="h5netcdf")
    both = {"path": str(many), "truth": "weather-file/truth.nc"}
    with pytest.raises(ConfigError, match="lead_hours must choose a lead time"):
        data.WeatherFileConfig(**both).load(tiny_root)
    made = data.WeatherFileConfig(**both, lead_hours=72, members=2).load(tiny_root)
    # Sixteen dates: the last three are held out, and the three before overlap them.
    assert (len(made.train), len(made.validation)) == (10, 3)


def test_the_toy_ensemble_is_biased_and_too_sure():
    made = lorenz96.simulate((30, 8, 8), 3, 10, 0)
    members, truth = made[0]["x"].to_numpy(), made[1]["x"].to_numpy()
    ratio = float(metrics.spread_skill_ratio(members, truth))
    assert 0.4 < ratio < 0.9
    assert members.std() == pytest.approx(truth.std(), rel=0.05)
    # Lorenz (1996): X is around 3, with a deviation of 5 to 7, for F = 20.
    assert 4 < truth.std() < 8


class Trap:
    """Would run code if it were unpickled."""

    def __reduce__(self):
        return print, ("rain", "2005-01-01")


def test_a_pickled_table_becomes_text_and_nothing_is_run(tmp_path, capsys):
    days, names = ["2005-01-01", "2011-02-03"], ["rain", "rainfc.1"]
    names += [f"rainfc.{number}" for number in range(2, 12)]
    block = np.array([[4.0, *range(1, 12)], [0.0, *[0.5] * 11]])
    content = pickle.dumps([*days, *names, block.T.tobytes()])
    source = tmp_path / "RainIbk.pickle.xz"
    source.write_bytes(lzma.compress(content))
    said = []
    rain.build("rain-ibk", tmp_path, said.append)
    assert said == ["rain-ibk: 2 days from 2005-01-01 to 2011-02-03"]
    days, values, members = rain.read(tmp_path / "rain.csv")
    assert str(days[1])[:10] == "2011-02-03"
    assert values.tolist() == [4.0, 0.0]
    assert members[0].tolist() == list(range(1, 12))
    assert not source.exists()
    source.write_bytes(lzma.compress(pickle.dumps(Trap())))
    with pytest.raises(DataFormatError, match="expected RainIbk"):
        rain.build("rain-ibk", tmp_path, said.append)
    assert capsys.readouterr().out == ""
    (tmp_path / "rain.csv").write_text("date,rain\n2005-01-01,-1\n")
    with pytest.raises(DataFormatError, match="expected the columns date, rain"):
        rain.read(tmp_path / "rain.csv")


@pytest.mark.slow
def test_the_generator_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    pytest.importorskip("dinosaur")
    for name, value in {"SPIN_UP": 1, "MEMBERS": 2, "LEADS": (0, 24)}.items():
        monkeypatch.setattr(ensembles, name, value)
    monkeypatch.setattr(ensembles, "SIZES", {"a": {"train": 3, "test": 1}})
    lon, lat = np.arange(0, 360, 3.75), np.linspace(-87, 87, 48)
    hill = 2000 * np.exp(-((lon[:, None] - 90) ** 2 + (lat - 35) ** 2) / 400)
    terrain = xr.Dataset({"orog": (("lon", "lat"), hill)}, {"lon": lon, "lat": lat})
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        terrain.to_netcdf(tmp_path / name / "terrain.nc", engine="h5netcdf")
    said = []
    ensembles.build("a", tmp_path / "whole", said.append)
    assert "4 of 4 dates" in said
    assert said[-1].startswith("t850 after 24 h: spread")
    write, done = ensembles._write, []

    def stop_after_two(store, row, *fields):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(row)
        write(store, row, *fields)

    monkeypatch.setattr(ensembles, "_write", stop_after_two)
    with pytest.raises(KeyboardInterrupt):
        ensembles.build("a", tmp_path / "stopped", said.append)
    monkeypatch.setattr(
        ensembles, "_write", lambda *given: (done.append(given[1]), write(*given))
    )
    ensembles.build("a", tmp_path / "stopped", said.append)
    assert done == [0, 1, 2, 3]
    for group in ("forecast", "truth"):
        one, other = (
            data.open_fields(tmp_path / name / "ens10.zarr", group=group)
            for name in ("whole", "stopped")
        )
        xr.testing.assert_identical(one.load(), other.load())
    t = one["t"].sel(level=850)
    assert 200 < float(t.min()) < float(t.max()) < 330
    assert set(one.coords) >= {"part", "time"}
