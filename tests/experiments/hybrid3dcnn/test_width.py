"""Boxes of universes, the peer that is fitted on them, and the claims of the table."""

import jax
import numpy as np
import pytest
import xarray as xr

from experiments.hybrid3dcnn import width, width_tables
from hpcjax.core import ConfigError
from hpcjax.data import UniversesConfig
from hpcjax.runs.tables import judge

SMALL = UniversesConfig(count=4, width=8)


def fake(level, seeds=3):
    """A run's errors, level for all parameters; 0.33 of the mean."""
    noise = np.linspace(-0.001, 0.001, seeds)[:, None] + np.zeros(4)
    names = [f"{kind}{n}" for kind in ("", "ridge_") for n in ("averaged", "single")]
    dims = "seed", "parameter"
    return xr.Dataset(
        dict.fromkeys(names, (dims, level + noise))
        | {"mean": (dims, 0.33 + 0 * noise)}
        | {"cells": (("seed", "y", "x"), np.zeros((seeds, 2, 2)))},
        {"parameter": list(width.PARAMETERS)},
    )


@pytest.mark.parametrize(
    ("levels", "failing"),
    [
        ((0.25, 0.2, 0.18), set()),
        ((0.2, 0.2, 0.18), {"to 8", "single"}),
        ((0.32, 0.2, 0.2), {"to 16", "mean"}),
    ],
)
def test_claims_are_of_falling_errors(levels, failing):
    runs = {
        name: fake(level)
        for name, level in zip(width_tables.NETWORK.values(), levels, strict=True)
    }
    runs[width_tables.OTHERS] = fake(0.331, 1)
    table = width_tables.width(runs)
    found = judge(width_tables.WIDTH.tier("cpu"), table)
    assert {each.name for each in found if not each.holds} == failing
    if not failing:
        assert len(width_tables.draw(table).axes) == 3


def test_boxes_are_those_of_the_data_set():
    cfg = width.Config(universes=SMALL, width=4)
    found = width.cut(cfg, SMALL.load().train)
    wanted = UniversesConfig(count=4, width=8, boxes=2).load().train
    assert np.array_equal(found["x"], wanted.volumes)
    assert np.array_equal(found["y"], wanted.numbers)


def test_the_peer_learns_of_variance_and_scale():
    rng = np.random.default_rng(0)
    scale, mixed = rng.uniform(0.5, 2, (2, 400, 1, 1, 1, 1))
    noise = rng.normal(size=(400, 4, 4, 4, 1))
    smooth = (noise + np.roll(noise, 1, 1) + np.roll(noise, 1, 2)) / np.sqrt(3)
    x = scale * (noise + (mixed > 1) * (smooth - noise))
    y = np.stack([scale.ravel() ** 2, mixed.ravel() > 1], 1).astype(float)
    predict = width.fit_ridge({"x": x[:300], "y": y[:300]})
    errors = np.mean((predict(x[300:]) - y[300:]) ** 2, 0)
    assert np.all(errors < 0.5 * y.var(0))


def test_networks_go_down_to_two_cells_and_widths_are_told():
    for side in (4, 8, 16):
        cfg = width.Config(width=side)
        shapes = jax.eval_shape(width.network(cfg).init, jax.random.key(0))[0]
        convs = [name for name in shapes if name.startswith("conv") and "kern" in name]
        assert 2 ** (len(convs) + 1) == side
        assert shapes["fc_0/kernel"].shape[0] == 8 * 8 * 2 ** (len(convs) - 1)
    for wrong in (6, 32):
        with pytest.raises(ConfigError, match="width must be a power of two that div"):
            width.Config(width=wrong)
