"""Training runs whose layers share weights, as a config asks for them."""

import dataclasses

import jax
import numpy as np
import pytest

from hpcjax import sharding, train
from hpcjax.collectives import OkTopkConfig
from hpcjax.compress import SharingConfig, sharing
from hpcjax.core import ConfigError
from hpcjax.models import MlpConfig
from hpcjax.optim import JorgeConfig
from hpcjax.runs import training
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

CONFIG = TrainingConfig(
    model=MlpConfig(widths=(12, 12, 12)),
    optimizer=JorgeConfig(lr=0.05, update_every=1),
    exchange=OkTopkConfig(density=0.5),
    sharing=SharingConfig(budget=0.5, templates=4),
    train=TrainConfig(steps=4, batch_size=32, eval_every=4),
)


@pytest.mark.slow
def test_a_run_trains_what_is_shared_with_any_optimizer_and_exchange(tmp_path):
    task = training.task(CONFIG, tmp_path, devices=2)
    mesh = task.mesh(2)
    state = train.init_state(task, 0, mesh)
    (kept,) = state.params["shared"].values()
    plain, _ = jax.eval_shape(CONFIG.model.make((8, 8, 1), 10).init, jax.random.key(0))
    layers = sharing.list_layers(plain)
    whole = sum(layer.size for layer in layers)
    options = sharing.SharingOptions(templates=4)
    plan = sharing.make_plan(layers, (0,) * 4, round(0.5 * whole), options)
    assert list(state.params["shared"]) == [plan.digest]
    batch = task.dataset.train.gather(np.arange(32))
    step = train.train_step(task, mesh, state)
    before = jax.tree.map(np.asarray, kept)
    losses = []
    for _ in range(8):
        state, metrics = step(state, sharding.place_batch(batch, mesh))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]
    (after,) = state.params["shared"].values()
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"budget": 1e-4, "upsample": "none"}, "the budget must be at least"),
        ({"include": ("table",)}, "matches 'table'"),
        ({"groups": "random", "count": 9}, "number of layers, 4"),
        ({"groups": "given", "labels": (0, 1)}, "one number for each of the 4 layers"),
    ],
)
def test_what_cannot_be_shared_is_refused(changed, words, tmp_path):
    broken = dataclasses.replace(CONFIG, sharing=SharingConfig(**changed))
    with pytest.raises(ConfigError, match=words):
        training.task(broken, tmp_path, devices=2)


def test_labels_are_of_given_groups():
    with pytest.raises(ConfigError, match=r"groups='all', labels=\(0, 1\)"):
        SharingConfig(labels=(0, 1))


def test_runs_of_other_seeds_draw_other_groups():
    model = CONFIG.model.make((8, 8, 1), 10)
    drawn = SharingConfig(budget=1.0, groups="random", count=2)
    plans = set()
    for seed in range(8):
        params, _ = jax.eval_shape(drawn.apply_to(model, seed).init, jax.random.key(0))
        plans |= set(params["shared"])
    assert len(plans) > 1
