"""What `smoe/heat` says of forecasts and maps that are known."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest

from configs.smoe import heat as configs
from experiments.smoe import heat as experiment
from experiments.smoe import tables
from hpcjax import data, models, sharding, train
from hpcjax.core import ConfigError
from hpcjax.data import heat
from hpcjax.runs import training
from hpcjax.runs.tables import judge as judge_table
from tests.experiments import rows
from tests.train import tiny

SMALL = data.HeatConfig(size=16, runs=10, holdout_runs=2, steps=25)
CFG = dataclasses.replace(configs.smoe, dataset=SMALL)
MATERIALS = heat.place_materials(16, 3)


def judge(forecast):
    source = SMALL.load().validation
    return experiment.judge(forecast, source, MATERIALS, CFG)


def test_the_truth_leaves_nothing_and_persistence_all():
    diffusivity = np.asarray(SMALL.diffusivities)[MATERIALS][..., None]

    def true(x):
        u = np.asarray(x[..., 0], np.float64)
        return heat.diffuse(u, diffusivity[..., 0])[..., None]

    exact = judge(true)
    assert exact["close"] == exact["early"] == 100.0
    assert exact["close_by_material"] == [100.0] * 3
    assert exact["worst"] == 100.0
    assert exact["left"] < 1e-9
    still = judge(lambda x: x)
    assert still["left"] == 1.0
    assert still["early"] < still["close"] < 99.5
    assert still["worst"] == min(still["close_by_material"])


@pytest.mark.acceptance("smoe", 6)
def test_no_single_stencil_passes_for_a_mixture():
    stencil = experiment.fit_stencil(SMALL.load().train)
    scores = judge(lambda x: experiment._convolve(x, stencil))
    assert scores["left"] < 1.0
    assert min(scores["close_by_material"]) < 90.0
    first = heat.stencil(SMALL.diffusivities[0])
    scores = judge(lambda x: experiment._convolve(x, first))
    assert scores["close_by_material"][0] == 100.0
    assert max(scores["close_by_material"][1:]) < 99.0


def test_experts_are_matched_with_materials():
    order = np.array([2, 0, 1])  # the expert of each material
    kernel = np.zeros((3, 3, 1, 3))
    for material, expert in enumerate(order):
        kernel[:, :, 0, expert] = heat.stencil(SMALL.diffusivities[material])
    gate = np.eye(3)[order[MATERIALS]]
    params = {"gate": gate, "kernel": kernel}
    found = experiment.compare_map(params, MATERIALS, SMALL.diffusivities)
    assert found == {"agreement": 1.0, "filter_error": 0.0, "kept": 27 + 256}
    gate[0, 0] = np.eye(3)[order[(MATERIALS[0, 0] + 1) % 3]]
    kernel[1, 2, 0, 0] += 0.25
    found = experiment.compare_map(params, MATERIALS, SMALL.diffusivities)
    assert found["agreement"] == 255 / 256
    assert found["filter_error"] == 0.25


def test_forecasts_beside_networks_are_rows_without_a_map():
    """Medians of the seeds, and claims that no forecast without places may pass."""
    labels = {"forecast": experiment.FORECASTS, "material": SMALL.diffusivities}
    close = ("forecast", [100.0, 50.0, 33.0])
    ours = {"close": close, "worst": close, "left": ("forecast", [1e-9, 1.0, 0.8])}
    theirs = ours | {"left": ("forecast", [0.9, 1.0, 0.8])}
    given = {
        "SMoE": {"agreement": 1.0, "filter_error": 0.0, **ours},
        **dict.fromkeys(("locally connected", "CoordConv", "CNN"), theirs),
        "SMoE, end to end": {"agreement": 0.4, "filter_error": 1.0, **theirs},
        "SMoE, undamped": {"agreement": 0.4, "filter_error": 1.0, **theirs},
    }
    sizes = {"parameters": 9, "kept": 9, "close_by_material": "forecast material"}
    runs = {
        name: rows.run(labels, seeds=(0, 1, 2), **figures | sizes)
        for name, figures in given.items()
    }
    own = runs["SMoE"] = runs["SMoE"].copy(deep=True)
    own["close"][:, 0] = [97.0, 100.0, 98.0]
    made = tables.HEAT.reduce(runs)
    assert made["row"].values.tolist()[:3] == ["SMoE", "persistence", "one stencil"]
    assert made["close"].sel(row="SMoE") == 98.0
    assert made["close_low"].sel(row="SMoE") == 97.0
    assert np.isnan(made["agreement"].sel(row=["CNN", "persistence"])).all()
    tier = tables.HEAT.tier("cpu")
    found = {each.name: each for each in judge_table(tier, made)}
    assert found["damping"].holds
    assert found["damping"].ours == pytest.approx(9e8)
    # A peer that is worse than a stencil has not learned.
    assert not found["CNN"].holds
    assert found["CNN"].unlearned == ("CNN",)


@pytest.mark.acceptance("smoe", 12)
def test_only_heat_is_judged_by_material():
    with pytest.raises(ConfigError, match="dataset must be heat"):
        experiment.Config(model=models.UNetConfig(), dataset=data.PhantomsConfig())


@pytest.mark.slow
@pytest.mark.acceptance("smoe", 6)
def test_a_mixture_finds_the_stencils_and_where_they_apply():
    cfg = configs.smoe
    made = training.task(cfg, pathlib.Path())
    state = train.fit(
        made, cfg.train, seed=0, mesh=sharding.data_mesh(1), recorder=tiny.Records()
    )
    materials = heat.place_materials(cfg.dataset.size, 3)
    params = jax.device_get(state.params)
    found = experiment.compare_map(params, materials, cfg.dataset.diffusivities)
    assert found["agreement"] == 1.0
    assert found["filter_error"] < 1e-3
