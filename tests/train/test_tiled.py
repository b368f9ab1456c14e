"""Training runs whose optimizer state is in tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import sharding, train
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.optim import AdamWConfig, LambConfig, LossScale, TiledConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.loop import compile_step
from tests.train import combinations, tiny

ROWS, STEPS = 24, 6
ADAMW = AdamWConfig(lr=0.01, weight_decay=0.1, clip_norm=0.5)


def task_of(state=None, optimizer=ADAMW, devices=1):
    plain = tiny.task()
    method = train.compose(
        plain.model,
        plain.dataset,
        optimizer,
        state=state,
        batch_size=ROWS,
        steps=STEPS,
        devices=devices,
    )
    return train.supervised(plain.model, method, plain.dataset)


def fit(task, folder=None, devices=1, **options):
    config = train.TrainConfig(
        steps=STEPS, batch_size=ROWS, eval_every=6, checkpoint_every=2, **options
    )
    records, given = tiny.Records(), {"seed": 0, "mesh": task.mesh(devices)}
    if folder is None:
        return train.fit(task, config, recorder=records, **given), records
    with train.Checkpoints(folder) as checkpoints:
        given["checkpoints"] = checkpoints
        return train.fit(task, config, recorder=records, **given), records


def assert_trees_equal(ours, other):
    wanted = trees.flatten(other)
    assert wanted.keys() == trees.flatten(ours).keys()
    for path, leaf in trees.flatten(ours).items():
        assert leaf.dtype == wanted[path].dtype, path
        np.testing.assert_array_equal(leaf, wanted[path], err_msg=path)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_goes_on_with_another_tile_and_space(tmp_path, devices):
    """Its norm is clipped; whole it is that of the same optimizer without tiles."""
    host = task_of(TiledConfig(tile=6, space="host"), devices=devices)
    whole, _ = fit(host, tmp_path, devices=devices)
    kinds = {
        path: leaf.sharding.memory_kind
        for path, leaf in trees.flatten(whole.opt_state).items()
        if leaf.ndim
    }
    assert set(kinds.values()) == {"pinned_host"}
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.forget_after(4)
    other = task_of(TiledConfig(tile=4), devices=devices)
    resumed, records = fit(other, tmp_path, devices=devices)
    assert [r["step"] for r in records if "loss" in r] == [5, 6]
    assert_trees_equal(
        (whole.params, whole.opt_state), (resumed.params, resumed.opt_state)
    )
    plain, _ = fit(task_of(devices=devices), devices=devices)
    for path, leaf in trees.flatten(plain.params).items():
        ours = trees.flatten(whole.params)[path]
        np.testing.assert_allclose(ours, leaf, rtol=1e-5, atol=1e-7)


@pytest.mark.acceptance("axonn-myelin", 6)
def test_an_overflow_changes_nothing_but_counters_and_the_scale():
    scale = LossScale(start=2.0**12, every=200)
    task = task_of(TiledConfig(tile=3, dtype="float16", loss_scale=scale), devices=2)
    mesh, around = task.mesh(2), task.method.around
    before = jax.device_get(train.init_state(task, 0, mesh))
    state = around.start(train.init_state(task, 0, mesh), None)
    rows = task.dataset.train.gather(np.arange(ROWS))
    rows["x"] = rows["x"] * np.float32([1, 1, 1, 1e4])  # the last tile's alone
    batch = sharding.place_batch(rows, mesh)
    step, _ = compile_step(task, mesh, state, batch)
    for number in range(1, 4):
        state, metrics = step(state, batch)
        assert float(metrics["loss_scale"]) == 2.0 ** (12 - number)
        assert not np.any(metrics["nonfinite"])
    kept = around.pause(state)
    assert int(kept.step) == 3
    inner = kept.opt_state.inner, before.opt_state.inner
    assert_trees_equal((kept.params, inner[0]), (before.params, inner[1]))
    state = around.start(kept, None)
    for _ in range(40):
        state, _ = step(state, batch)
    moved = around.pause(state).params
    kernels = (tree["dense"]["kernel"] for tree in (moved, before.params))
    assert not np.array_equal(*kernels)
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {jnp.dtype("float32")}


def test_a_batch_that_scores_nothing_changes_nothing_but_the_step():
    """Nor moves momentum parameters, nor counts towards a larger scale."""
    scale = LossScale(start=2.0**8, every=2)
    task = task_of(TiledConfig(tile=3, dtype="bfloat16", loss_scale=scale))
    mesh, around = task.mesh(1), task.method.around
    state = around.start(train.init_state(task, 0, mesh), None)
    rows = task.dataset.train.gather(np.arange(ROWS))
    weights = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    one, none = (
        sharding.place_batch({**rows, "weight": weight}, mesh) for weight in weights
    )
    step, _ = compile_step(task, mesh, state, one)
    state, _ = step(state, one)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, none)
    assert bool(metrics["unscored"])
    assert_trees_equal((state.params, state.opt_state), before)
    assert (int(state.step), int(state.skipped)) == (2, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"optimizer": "kfac"}, "optimizer=kfac and state=tiled both have a backward"),
        ({"averaging": "wagma"}, "averaging=wagma and state=tiled both hold the par"),
        ({"exchange": "ok_topk"}, "exchange=ok_topk and state=tiled both"),
        ({"parallel": "zero"}, "state=tiled and parallel=zero both average"),
    ],
)
def test_parts_that_go_with_no_tiles_are_told_before_jax(parts, message):
    given = {kind: combinations.config(kind, name) for kind, name in parts.items()}
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(state=TiledConfig(), **given)


def test_an_optimizer_with_norms_is_refused():
    with pytest.raises(ConfigError, match="state in tiles needs an optimizer"):
        task_of(TiledConfig(), LambConfig())


def test_a_model_with_frozen_parameters_is_refused():
    model = tiny.task().model._replace(frozen=("^dense/",))
    with pytest.raises(ConfigError, match=r"moves all parameters: got frozen"):
        train.compose(
            model,
            tiny.task().dataset,
            ADAMW,
            state=TiledConfig(),
            batch_size=ROWS,
            steps=STEPS,
            devices=1,
        )
