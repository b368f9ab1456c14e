"""Baselines of the spread, on targets that a blend makes."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.weather_uncertainty import cost as costs
from configs.weather_uncertainty.baselines import CIRCLE
from experiments.weather_uncertainty import baselines, cost, tables
from hpcjax import runs
from hpcjax.core.errors import ConfigError
from hpcjax.data import Lorenz96Config
from tests.experiments import rows


def dates(count, seed, size=5):
    """Members, and a spread of their own, of what is around, and of places."""
    rng = np.random.default_rng(seed)
    members = rng.normal(size=(count, 4, 6, 3, 1))
    s = members[..., 0].std(-1)
    places = np.random.default_rng(9).uniform(1, 2, (4, 6))
    window = range(-(size // 2), size // 2 + 1)
    rows = [np.clip(np.arange(4) + at, 0, 3) for at in window]
    around = np.mean([s[:, each] for each in rows], 0)
    columns = [np.roll(around, at, 2) for at in window]
    spread = 0.2 + 0.5 * s + 0.4 * np.mean(columns, 0) + places
    return {"x": {"members": members}, "spread": spread}, s


def test_a_spread_that_is_not_learnt_is_refused():
    with pytest.raises(ConfigError, match="learn=spread or both"):
        baselines.run(baselines.Config(dataset=Lorenz96Config()), None)


def test_a_blend_with_neighbours_finds_what_made_the_spread():
    (train, _), (test, s) = dates(400, 0), dates(30, 1)
    found = baselines._predict(train, test, 3, 10)
    errors = {
        name: np.sqrt(np.mean((each - test["spread"]) ** 2))
        for name, each in found.items()
    }
    assert errors["blend, 5 points a side"] < 0.02
    assert errors["blend, 5 points a side"] < 0.5 * errors[baselines.BLEND]
    assert errors[baselines.BLEND] < 0.5 * errors[baselines.CLIMATE]
    np.testing.assert_allclose(found[baselines.SECOND], s * np.sqrt(3 * 9 / 20))
    climate = train["spread"].mean(0)
    np.testing.assert_allclose(found[baselines.CLIMATE][3], climate)
    # The blend is the one of least squares of all training points.
    points = [np.ones(train["spread"].size), np.ravel(dates(400, 0)[1])]
    points += [np.ravel(np.broadcast_to(climate, train["spread"].shape))]
    normal = np.array(points)
    weights = np.linalg.solve(normal @ normal.T, normal @ train["spread"].ravel())
    expected = weights[0] + weights[1] * s + weights[2] * climate
    np.testing.assert_allclose(found[baselines.BLEND], expected, rtol=1e-6)


def resample(known, everyone, spread, draws=40):
    """The RMSE left to one who knows each point's deviation, of Gaussian members."""
    rng = np.random.default_rng(0)
    squares = []
    for _ in range(draws):
        members = rng.normal(size=(everyone, *spread.shape)) * spread
        own, whole = members[:known].std(0), members.std(0)
        slope, shift = np.polyfit((own / spread).ravel(), (whole / spread).ravel(), 1)
        squares.append(((whole - slope * own - shift * spread) ** 2).mean())
    return np.sqrt(np.mean(squares))


@pytest.mark.slow
def test_a_network_leaves_more_than_the_floor_and_learns_from_its_own_dates(tmp_path):
    """On dates held out of the circle; how it compares to a blend changes by draw."""
    base, network, shuffled = (
        runs.run(f"weather_uncertainty/{name}", root=tmp_path, quiet=True).dataset
        for name in ("baselines", "circle", "circle:shuffled")
    )
    values = base["rmse"].values.ravel().tolist()
    found = dict(zip(baselines.METHODS, values, strict=True))
    rmse, other = (
        float(each["val_spread"].isel(eval_step=-1)) ** 0.5
        for each in (network, shuffled)
    )
    blend, floor = found[baselines.BLEND], found[baselines.FLOOR]
    assert floor < rmse < 1.1 * blend
    assert other > 1.5 * blend
    test = CIRCLE.load(tmp_path).validation.gather(np.arange(100))
    known = test["spread"] * test["scale"][0] * np.sqrt(20 / 19)
    assert floor == pytest.approx(resample(5, 20, known), rel=0.02)


def test_a_network_is_worth_as_many_members_as_err_like_it():
    """Of a line between the raw spreads of two, five and eight."""
    figures = {"method": baselines.METHODS}
    raw = {2: 0.2, 5: 0.1, 8: 0.06}
    made = {
        f"{n} members": rows.run(figures, rmse=("method", [e] * len(baselines.METHODS)))
        for n, e in raw.items()
    }
    field = {
        name: ("y x", np.full((2, 3), 0.1)) for name in ("truth", "raw", "predicted")
    }
    seconds = {"member": 2.0, "network": 1.0, "train": 3.0}
    times = {n: ("world repetition", np.full((2, 3), s)) for n, s in seconds.items()}
    labels = {"world": ["circle", "globe"], "eval_step": [1]}
    for name, rmse in ((tables.CNN, 0.08), (tables.OTHERS, 0.3)):
        square = ("eval_step", [rmse**2])
        made[name] = rows.run(labels, val_spread=square, **field, **times)
    found = tables.cost(made).sel
    assert float(found(row=tables.CNN)[tables.WORTH]) == pytest.approx(6.5)
    assert float(found(row=tables.OTHERS)[tables.WORTH]) == 2
    circle = found(row="network on a circle")
    assert float(circle["ratio"]) == 0.5
    assert float(circle["part"]) == pytest.approx(100 * 5.5 / 20)
    assert float(circle["train"]) == 3000


@pytest.mark.slow
@pytest.mark.acceptance("weather-uncertainty", 11)
def test_a_step_of_the_globes_network_is_timed(capsys):
    """Of 32×64 points, two levels and eight dates; on a GPU 352×704 remain to be."""
    cfg = dataclasses.replace(costs.circle, repetitions=2)
    deep = cost._on_noise(cfg)
    x = deep.dataset.train.gather(np.arange(8))["x"]
    assert x["fields"].shape == (8, 32, 64, 3 * 2 * 2 * 5 + 3)
    assert (cfg.deep.base, cfg.deep.poolings, deep.dataset.axes) == (8, 3, (3, 2))
    apply = cost._predictor(deep, *deep.model.init(jax.random.key(0)))
    found = cost._time(cfg, deep, apply, (lambda: 0, 1))
    with capsys.disabled():
        print(f"\na step: {found['train'].min():.2f} s")
    assert (found["train"] > 0).all()


def test_a_gain_is_over_the_blend_of_the_same_draw():
    figures = {"method": baselines.METHODS}

    def blend(rmse):
        each = [1.0 if name != baselines.BLEND else rmse for name in baselines.METHODS]
        return rows.run(figures, rmse=("method", each))

    def network(rmse):
        return rows.run({"eval_step": [1]}, val_spread=("eval_step", [rmse**2]))

    made = {name: blend(0.2) for name in tables.MEMBERS}
    made |= {"network, 5 members": network(0.3), tables._SHUFFLED: network(0.8)}
    for number in range(1, 9):
        made[f"blend, draw {number}"] = blend(0.1 * number)
        made[f"network, draw {number}"] = network(0.1)
    table = tables.draws(made)
    gain = table["gain"].sel(row=[f"draw {n}" for n in range(1, 9)])
    np.testing.assert_allclose(gain, 1 / np.arange(1, 9), rtol=1e-6)
    assert float(table["gain"].sel(row="network, 5 members")) == pytest.approx(1.5)
    claim = tables.CIRCLE.tiers["cpu"].claims["blend"]
    assert claim.ours(table) == pytest.approx((1 / 4 + 1 / 5) / 2)
    assert float(table["rmse"].sel(row="blend, 5 members")) == 0.2
