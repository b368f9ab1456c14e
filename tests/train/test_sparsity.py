"""Training runs that prune, as a config asks for them, with every kind of optimizer."""

import chex
import jax
import numpy as np
import optax
import pytest

from hpcjax import core, optim, sharding, train
from hpcjax.averaging import LocalSgdConfig
from hpcjax.core import ConfigError, per_device
from hpcjax.core.structures import NM
from hpcjax.optim import DynamicConfig, PruneConfig, SparseStateConfig, sparsify
from hpcjax.optim.sparsify import OneShot, Uniform
from hpcjax.runs.training import TrainingConfig
from hpcjax.train import snapshot
from tests.train import combinations
from tests.train.combinations import ROWS, Row
from tests.train.test_combinations import arrays, numbers

STEPS = 4
HALF = {"distribution": Uniform(sparsity=0.5), "include": ("kernel",)}
AT_ONCE = HALF | {"schedule": OneShot(step=0)}
PRUNE = PruneConfig(schedule=OneShot(step=1), **HALF)
DYNAMIC = DynamicConfig(every=2, until=1.0, fraction=0.5, **HALF)
GROUPS = PruneConfig(
    structure=NM(n=1, m=2), schedule=OneShot(step=1), include=("query/kernel",)
)


def task_of(sparsity, row, steps=STEPS):
    model, own = combinations.problem(row.model)
    made = combinations.configs(row)
    method = train.compose(
        model,
        own,
        made["optimizer"],
        exchange=made["exchange"],
        backward=made["backward"],
        sparsity=sparsity,
        batch_size=ROWS,
        steps=steps,
        devices=row.devices,
    )
    return train.supervised(model, method, own)


@pytest.mark.slow
@pytest.mark.acceptance("sparsity", 6)
@pytest.mark.parametrize(
    ("sparsity", "optimizer", "exchange", "model", "devices"),
    [
        (PRUNE, "kfac", None, "mlp", 1),
        (DYNAMIC, "jorge", "ok_topk", "mlp", 4),
        (GROUPS, "adamw", None, "causal_lm", 1),
    ],
)
def test_what_is_pruned_is_zero_on_all_devices_and_after_a_resume(
    sparsity, optimizer, exchange, model, devices
):
    task = task_of(sparsity, Row(optimizer, exchange, None, None, None, model, devices))
    mesh = task.mesh(devices)
    state = train.init_state(task, 0, mesh)
    batches = [
        sharding.place_batch(task.dataset.train.gather(np.arange(ROWS) + at), mesh)
        for at in (0, ROWS, 0)
    ]
    step = train.train_step(task, mesh, state).lower(state, batches[0]).compile()
    for number, batch in enumerate(batches):
        if number == 2:
            kept = snapshot.take(state)
        state, metrics = step(state, batch)
        assert not np.any(metrics["nonfinite"])
    found = sparsify.get_masks(per_device.bare(state.opt_state), state.params)
    pruned = 0
    for leaf, mask in zip(*map(_leaves, (state.params, found)), strict=True):
        if mask is not None:
            assert not np.any(np.asarray(leaf)[~np.asarray(mask)])
            assert abs(np.mean(mask) - 0.5) <= 0.5 / mask.size
            pruned += 1
    assert pruned >= 1

    like = train.state_shapes(task, mesh)
    again, _ = step(snapshot.fit(arrays(kept), None, like, mesh), batches[2])
    chex.assert_trees_all_equal(numbers(again), numbers(state))


@pytest.mark.quick("static")
@pytest.mark.parametrize("name", ["static", "growing", "prune", "by gradients"])
def test_gradients_of_what_is_pruned_take_no_place_of_an_exchange(name):
    """And the network is sparse before the first step."""
    sparsity, quiet = {
        "static": (DynamicConfig(grow=None, **HALF), {0, 1, 2, 3}),
        "growing": (DYNAMIC, {0, 1, 3}),  # step 2 reads all
        "prune": (PruneConfig(**AT_ONCE), {0, 1, 2, 3}),
        "by gradients": (
            PruneConfig(score="gradient", schedule=OneShot(step=1), **HALF),
            {0, 1, 2, 3},
        ),
    }[name]
    task = task_of(sparsity, Row("sgd", "ok_topk", None, None, None, "mlp", 2))
    mesh = task.mesh(2)
    state = train.init_state(task, 0, mesh)
    if name in ("static", "growing"):
        assert not any_pruned(state.params, masks_of(state))
    step = train.train_step(task, mesh, state)
    for number in range(STEPS):
        before = masks_of(state)
        rows = task.dataset.train.gather(np.arange(ROWS) + ROWS * (number % 2))
        state, _ = step(state, sharding.place_batch(rows, mesh))
        (link,) = (
            each
            for each in jax.tree.leaves(
                per_device.bare(state.opt_state), is_leaf=is_link
            )
            if is_link(each)
        )
        kept_back = any_pruned(jax.tree.map(lambda r: r[0], link.residual), before)
        assert kept_back != (number in quiet), number


def is_link(node):
    return isinstance(node, optim.exchange.ExchangeLinkState)


def masks_of(state):
    found = sparsify.get_masks(per_device.bare(state.opt_state), state.params)
    return jax.device_get(found)


def any_pruned(tree, kept):
    """Says whether any number of a tree is not zero where it is pruned."""
    pairs = zip(*map(_leaves, (jax.device_get(tree), kept)), strict=True)
    return any(np.any(leaf[~mask]) for leaf, mask in pairs if mask is not None)


def _leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)


def test_what_does_not_go_together_is_refused_by_name():
    with pytest.raises(ConfigError, match="state=sparse and sparsity=prune both hold"):
        TrainingConfig(state=SparseStateConfig(), sparsity=PruneConfig())
    row = Row("sgd", None, None, None, None, "mlp", 1)
    with pytest.raises(ConfigError, match=r"before the end of the run: got last=10000"):
        task_of(PruneConfig(), row)
    model, own = combinations.problem("mlp")
    with pytest.raises(ConfigError, match="have no sparse mean"):
        train.compose(
            model,
            own,
            combinations.config("optimizer", "sgd"),
            averaged=LocalSgdConfig(workers=2),
            sparsity=DYNAMIC,
            batch_size=ROWS,
            steps=2,
            devices=2,
        )


@pytest.mark.quick("sparsity1")
@pytest.mark.parametrize("sparsity", [DYNAMIC, PruneConfig(score="random", **AT_ONCE)])
def test_runs_of_other_seeds_draw_other_masks(sparsity):
    """Seeds of a table would otherwise have their first masks in common."""
    one, other = first_masks(sparsity, 0), first_masks(sparsity, 1)
    assert np.any(one != other)
    np.testing.assert_array_equal(first_masks(sparsity, 1), other)


def first_masks(sparsity, seed):
    """The masks of one matrix after the first step of a run, from the same weights."""
    model, _ = combinations.problem("mlp")
    setup = core.RunShape(
        model=model,
        batch={},
        steps=STEPS,
        workers=1,
        devices=1,
        seed=core.RunSeed(seed),
        layer_flops=lambda rows: (),
    )
    tx = sparsity.build(core.Optimization(tx=optax.sgd(0.1)), setup).tx
    params, _ = model.init(jax.random.key(0))
    _, state = tx.update(params, tx.init(params), params)
    found = jax.tree.leaves(sparsify.get_masks(state, params))
    return np.concatenate([np.ravel(mask) for mask in found])
