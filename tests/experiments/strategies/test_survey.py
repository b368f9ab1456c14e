"""`strategies/survey` and `strategies/images`: formulas, and VGG's gate in small."""

import dataclasses
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from flax import nnx

from experiments.strategies import survey_tables as survey
from experiments.strategies import tables, ways
from hpcjax import core, data, sharding
from hpcjax.models import VggConfig, modules
from hpcjax.optim import SgdConfig
from hpcjax.runs import discover, program
from hpcjax.sharding import ZeroConfig
from hpcjax.train.config import TrainConfig
from tests.conftest import REPOSITORY

VGG = program.ProgramConfig(
    dataset=data.MnistConfig(pad=2),
    model=VggConfig(depth=11, width=1, sync_axis="data"),
    optimizer=SgdConfig(lr=0.001, momentum=0.9),
    train=TrainConfig(batch_size=32, steps=20),
    devices=8,
    taken=1,
)


def take(**changes):
    """What a run finds, on noise in place of the images."""
    told = dataclasses.replace(VGG, **changes)
    noise = data.noise_images(64, (32, 32, 1), 10, seed=0)
    context = types.SimpleNamespace(mesh=sharding.data_mesh(8), data_root=REPOSITORY)
    with mock.patch.object(data.MnistConfig, "load", return_value=noise):
        return program.run(told, context)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_a_step_of_a_small_vgg_is_one_devices(stage):
    """One step: rounding grows from step to step, see the page."""
    found = take(parallel=stage and ZeroConfig(stage=stage))
    assert found["apart"] <= 1e-5
    assert found["distance"] <= 1e-6


def wide_statistic(shape, initializer):
    like = jax.ShapeDtypeStruct(shape, "float64")
    return nnx.BatchStat(like, initializer=initializer)


def take_wide(**changes):
    """The gate of the definition, with float64 in the place of float32."""
    steep = SgdConfig(lr=0.1, momentum=0.9)
    wide = core.Policy(param="float64", compute="float64", output="float64")
    with (
        jax.enable_x64(True),
        mock.patch.object(jnp, "float32", jnp.float64),
        mock.patch.object(modules, "statistic", wide_statistic),
        mock.patch.object(core, "Policy", return_value=wide),
    ):
        return take(taken=20, optimizer=steep, **changes)


@pytest.mark.slow
@pytest.mark.acceptance("how-to-train", 1)
@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_20_steps_of_a_small_vgg_are_one_devices_where_little_is_rounded(stage):
    """In float32 they part, see the page; what is computed else would here too."""
    found = take_wide(parallel=stage and ZeroConfig(stage=stage))
    assert found["apart"] <= 1e-10
    assert found["distance"] <= 1e-10


@pytest.mark.slow
@pytest.mark.acceptance("how-to-train", 1)
def test_statistics_of_a_devices_own_rows_are_not():
    model = dataclasses.replace(VGG.model, sync_axis=None)
    assert take_wide(model=model)["apart"] > 1e-3


# 8 blocks of width 256 and as many numbers again; 8 layers' sums of 256 tokens.
STACK, ROW = 8 * (12 * 256**2 + 13 * 256), 256 * 256
WANTED = {
    ways.DP: (3, 7 / 4),
    ways.ZERO3: (3 / 8, 21 / 8),
    ways.F1B1: (3 * (1 / 8 + 1 / 2), 7 / 8 + 1 / 8 + 44 * ROW / 16 / (2 * STACK)),
    ways.GRID: (3 / 8, 49.5 * ROW / (2 * STACK)),
    ways.STASH: (4.5, 7 / 4),
}


def made(name):
    held, sent = WANTED[name]
    psi = 4 * 2 * STACK
    figures = {"psi": psi, "state": held * psi}
    sizes = {"axis": ["data", "stage", "several"], "kind": ["any"], "part": ["rest"]}
    figures["sent"] = (tuple(sizes), psi * sent * np.array([[[0.9]], [[0.1]], [[0]]]))
    return xr.Dataset(figures, sizes).expand_dims(seed=[0])


def test_formulas_are_evaluated_as_they_are_printed():
    table = survey.survey({name: made(name) for name in WANTED})
    for ours, theirs in (("held", "state"), ("volume", "sent")):
        np.testing.assert_allclose(table[ours], table[theirs])
    assert table["sends"].sel(row=ways.F1B1) == "1.75 rest + 0.25 stack + 2.75 row"
    assert table["parallelism"].values.tolist() == ["data x stage"] * len(WANTED)
    said = table["synchronous"].values.tolist()
    assert said == ["yes"] * 4 + ["NO"]


@pytest.mark.acceptance("how-to-train", 8)
def test_no_table_times_a_step_of_simulated_devices():
    """What is said in seconds here is modelled."""
    own = discover.find_tables(REPOSITORY, "strategies")
    assert {*own} == {
        f"strategies/{x}" for x in ("compare", "images", "survey", "zero")
    }
    for table in own.values():
        assert not table.benchmark
        assert all("modelled" in table.columns[name] for name in table.times)
        assert not any("serialised" in head for head in table.columns.values())
    assert {*tables.COMPARE.times} == {"slow_step"}
