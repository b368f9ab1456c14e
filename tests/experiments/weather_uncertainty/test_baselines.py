"""Baselines of the spread, on targets that a blend makes."""

import numpy as np
import pytest

from experiments.weather_uncertainty import baselines
from hpcjax.core.errors import ConfigError
from hpcjax.data import Lorenz96Config


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
