"""Training in which the network sees other weights than are trained, from a config."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import sharding, train
from hpcjax.averaging import LocalSgdConfig
from hpcjax.collectives import OkTopkConfig
from hpcjax.compress import SharingConfig
from hpcjax.core import ConfigError, keys, per_device
from hpcjax.core.model import added_loss
from hpcjax.core.parts import classes
from hpcjax.core.structures import NM
from hpcjax.optim import (
    DynamicConfig,
    L0Config,
    MovementConfig,
    PruneConfig,
    SgdConfig,
    SparseStateConfig,
    StraightThroughConfig,
    TopKastConfig,
    VariationalDropoutConfig,
)
from hpcjax.optim.sparsify import Uniform
from hpcjax.optim.sparsify.schedules import OneShot
from hpcjax.runs.training import with_stacks
from hpcjax.train import snapshot
from tests.train import combinations
from tests.train.combinations import ROWS
from tests.train.test_combinations import arrays, numbers

VIEWS = {
    name: cls for name, cls in classes("sparsity").items() if hasattr(cls, "apply_to")
}
# Weights large enough that the penalty shows.
OPTIONS = {
    "l0": {"weight": 0.01},
    "variational_dropout": {"weight": 0.01, "start_at": -3.0},
    "soft_threshold": {"start_at": -2.0},
    "straight_through": {"decay": 0.1},
}


def task_of(sparsity, optimizer, family="mlp", devices=2, **parts):
    model, own = combinations.problem(family)
    stacks = getattr(classes("model")[family], "stacks", ())
    sparsity, optimizer = (
        with_stacks(part, stacks)
        for part in (sparsity, combinations.config("optimizer", optimizer))
    )
    model = sparsity.apply_to(model)
    method = train.compose(
        model,
        own,
        optimizer,
        sparsity=sparsity,
        batch_size=ROWS,
        steps=2,
        devices=devices,
        **parts,
    )
    return train.supervised(model, method, own), sparsity


def stepper(task, devices):
    """State, compiled step and a batch."""
    mesh = task.mesh(devices)
    state = train.init_state(task, 0, mesh)
    batch = sharding.place_batch(task.dataset.train.gather(np.arange(ROWS)), mesh)
    step = train.train_step(task, mesh, state).lower(state, batch).compile()
    return mesh, state, step, batch


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_a_step_is_that_of_the_view_and_its_penalty(name):
    """By optax and `jax.grad`, device by device; SGD shows gradients as they are."""
    sparsity = VIEWS[name](include=("kernel",), **OPTIONS.get(name, {}))
    task, _ = task_of(sparsity, "sgd")
    _, first, step, batch = stepper(task, 2)
    start = jax.tree.map(jnp.array, first.params)
    own = keys.derive(first.key, "step", first.step)
    placed = jax.device_get(batch)
    state, metrics = step(first, batch)

    plain, _ = combinations.problem("mlp")
    optimizer = combinations.config("optimizer", "sgd").make(2)
    viewed = sparsity.make(optimizer)
    held = start
    if viewed.beside:
        kernels, beside = {"dense_0", "head"}, f"kernel_{viewed.beside}"
        assert set(held) == kernels
        held = {
            "weights": {
                at: {k: v for k, v in held[at].items() if k != beside} for at in kernels
            },
            viewed.beside: {f"{at}/kernel": held[at][beside] for at in kernels},
        }

    def loss(held, rank, rows):
        key = jax.random.fold_in(own, rank)
        seen = viewed.view(held, keys.derive(key, "sparsity"))
        outputs, _ = plain.apply(seen, {}, rows["x"], train=True, key=key)
        totals = task.objective(outputs, rows)
        return totals.means()["loss"] + viewed.penalty(held)

    halves = [
        {key: jnp.split(leaf, 2)[rank] for key, leaf in placed.items()}
        for rank in range(2)
    ]
    parts = [jax.grad(loss)(held, rank, rows) for rank, rows in enumerate(halves)]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    updates, _ = viewed.tx.update(mean, viewed.tx.init(held), held)
    expected = optax.apply_updates(held, updates)
    if viewed.beside:
        expected = {
            at: {**leaves, beside: expected[viewed.beside][f"{at}/kernel"]}
            for at, leaves in expected["weights"].items()
        }
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(expected), rtol=1e-5, atol=1e-6
    )
    fined = name in ("l0", "variational_dropout")
    assert ("added_loss" in metrics) == fined
    if fined:
        np.testing.assert_allclose(
            metrics["added_loss"], viewed.penalty(held), rtol=1e-5
        )
        assert float(metrics["added_loss"]) > 1e-3


def test_evaluation_sees_no_noise_and_keeps_the_state():
    sparsity = VariationalDropoutConfig(include=("kernel",), start_at=-1.0)
    plain, own = combinations.problem("mlp")
    model = sparsity.apply_to(plain)
    params, state = model.init(jax.random.key(0))
    x = jnp.asarray(own.train.gather(np.arange(4))["x"])
    given, key = {"x": x, "train": False}, jax.random.key(1)
    outputs, kept = model.apply(params, state, **given, key=key)
    weights, masks = sparsity.read_network(params, ())
    expected, _ = plain.apply(weights, {}, **given)
    np.testing.assert_array_equal(outputs, expected)
    chex.assert_trees_all_equal(kept, state)
    dropped = [~np.asarray(mask) for mask in jax.tree.leaves(masks)]
    assert any(each.any() for each in dropped)
    noisy, new = model.apply(params, state, x, train=True, key=key)
    assert np.abs(np.asarray(noisy) - np.asarray(expected)).max() > 0.01
    assert float(added_loss(new)) > 0


def test_a_view_that_prunes_nothing_is_refused():
    plain, _ = combinations.problem("mlp")
    model = L0Config(exclude=(".*",)).apply_to(plain)
    with pytest.raises(ConfigError, match="none of the parameters is pruned"):
        model.init(jax.random.key(0))


@pytest.mark.parametrize(
    "parts",
    [
        {"sparsity": DynamicConfig()},
        {"sparsity": PruneConfig(schedule=OneShot())},
        {"state": SparseStateConfig()},
    ],
)
def test_what_would_prune_nothing_of_shared_stores_is_refused(parts):
    plain, own = combinations.problem("mlp")
    model = SharingConfig(budget=0.5).apply_to(plain)

    def begin(key):
        method = train.compose(
            model, own, SgdConfig(), **parts, batch_size=8, steps=2, devices=1, seed=0
        )
        return method.init(model.init(key)[0])

    with pytest.raises(ConfigError, match=r"none of the parameters is .*stores"):
        jax.eval_shape(begin, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sparsity", "optimizer", "family", "parts"),
    [
        (
            StraightThroughConfig(structure=NM(n=1, m=2), include=("dense.*kernel",)),
            *("kfac", "mlp", {}),
        ),
        (
            MovementConfig(distribution=Uniform(sparsity=0.5), include=("kernel",)),
            *("adamw", "causal_lm", {}),
        ),
        (
            TopKastConfig(forward=0.5, backward=0.25, include=("kernel",)),
            *("adamw", "mlp", {"averaged": LocalSgdConfig(workers=2)}),
        ),
        (
            L0Config(include=("kernel",)),
            *("jorge", "mlp", {"exchange": OkTopkConfig(density=0.5)}),
        ),
    ],
)
def test_views_go_with_other_parts_and_resume(sparsity, optimizer, family, parts):
    task, sparsity = task_of(sparsity, optimizer, family, **parts)
    mesh, state, step, batch = stepper(task, 2)
    state, metrics = step(state, batch)
    assert not np.any(metrics["nonfinite"])
    kept = snapshot.take(state)
    state, _ = step(state, batch)
    again = snapshot.fit(arrays(kept), None, train.state_shapes(task, mesh), mesh)
    again, _ = step(again, batch)
    chex.assert_trees_all_equal(numbers(again), numbers(state))
    params = per_device.bare(jax.device_get(state.params))
    if "averaged" in parts:
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], params)
    _, masks = sparsity.read_network(params, state.opt_state)
    shares = [float(np.mean(mask)) for mask in jax.tree.leaves(masks)]
    assert shares
    if not isinstance(sparsity, L0Config):
        np.testing.assert_allclose(shares, 0.5, atol=0.1)
