"""Training runs of pruned networks with compressed state, as a config asks for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import optim, sharding, train
from hpcjax.core import deferred, trees
from hpcjax.core.errors import ConfigError
from hpcjax.optim import SparseStateConfig, sparse_state
from hpcjax.runs.training import TrainingConfig
from tests.train import combinations, tiny
from tests.train.combinations import ROWS, Row

FLOAT32 = SparseStateConfig(dtype="float32", sparsity=0.5)


def task_of(model, state, devices, optimizer="adamw", exchange=None):
    network, own = combinations.problem(model)
    row = Row(optimizer, exchange, None, None, None, model, devices)
    made = combinations.configs(row)
    stacks = getattr(combinations.config("model", model), "stacks", ())
    method = train.compose(
        network,
        own,
        made["optimizer"],
        exchange=made["exchange"],
        state=dataclasses.replace(state, stacked=stacks),
        batch_size=ROWS,
        steps=2,
        devices=devices,
    )
    return train.supervised(network, method, own)


def take_steps(task, devices, count=2):
    """The states before and after each step, and the metrics of the last one."""
    mesh = task.mesh(devices)
    states = [jax.device_get(train.init_state(task, 0, mesh))]
    state = train.init_state(task, 0, mesh)
    metrics = None
    for number in range(count):
        rows = task.dataset.train.gather(np.arange(ROWS) + number % 2)
        batch = sharding.place_batch(rows, mesh)
        if metrics is None:
            step = train.train_step(task, mesh, state)
        state, metrics = step(state, batch)
        states.append(jax.device_get(state))
    return states, metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "exchange", "mode"),
    [
        ("mlp", 4, None, "dense"),
        ("causal_lm", 4, None, "rematerialize"),
        ("mlp", 4, "ok_topk", "dense"),
    ],
)
def test_a_run_is_that_of_masked_dense_parameters(model, devices, exchange, mode):
    state = dataclasses.replace(FLOAT32, mode=mode)
    task = task_of(model, state, devices, exchange=exchange)
    states, metrics = take_steps(task, devices)
    assert not np.any(metrics["nonfinite"])
    start, end = (
        deferred.realize(jax.tree.map(jnp.asarray, s.params))
        for s in (states[0], states[-1])
    )
    nodes = trees.flatten(states[0].params, deferred.is_deferred)
    pruned = [path for path, node in nodes.items() if deferred.is_deferred(node)]
    assert len(pruned) > 1
    masks = {path: trees.flatten(start)[path] != 0 for path in pruned}
    assert all(abs(mask.mean() - 0.5) < 0.1 for mask in masks.values())
    if exchange is not None:  # what it leaves out differs from a mean
        moved = jax.tree.leaves(jax.tree.map(jnp.array_equal, start, end))
        assert not all(moved)
        return
    expected = own_loop(task, start, states[0].model_state, masks)
    for path, leaf in trees.flatten(end).items():
        if path == "blocks/attention/key/bias":
            continue  # its gradient is rounding alone
        np.testing.assert_allclose(
            leaf, trees.flatten(expected)[path], atol=2e-6, err_msg=path
        )


def own_loop(task, params, model_state, masks):
    """Two steps of AdamW on masked dense parameters, on one device."""
    tx = optim.AdamWConfig().make(2)
    state = tx.init(params)

    def masked(tree):
        flat = trees.flatten(tree)
        return trees.unflatten(tree, {p: g * masks.get(p, 1) for p, g in flat.items()})

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            outputs, _ = task.model.apply(params, model_state, batch["x"], train=True)
            return task.objective(outputs, batch).means()["loss"]

        grads = masked(jax.grad(loss)(params))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(2):
        batch = task.dataset.train.gather(np.arange(ROWS) + number)
        params, state = step(params, state, batch)
    return params


SCALED = dataclasses.replace(
    FLOAT32, dtype="float16", loss_scale=sparse_state.LossScale(start=2.0**30)
)


@pytest.mark.acceptance("samo", 9)
def test_the_loop_goes_on_after_an_overflow_with_a_smaller_scale():
    """So large a scale overflows float16 until it has been halved often enough."""
    states, metrics = take_steps(task_of("mlp", SCALED, 4), 4, count=16)
    scales = [float(state.opt_state.scaling.scale) for state in states]
    assert scales[:3] == [2.0**30, 2.0**29, 2.0**28]
    good = next(n for n, scale in enumerate(scales) if scale == scales[-1])
    before, after = states[0], states[good]
    assert 3 < good < 16
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    jax.tree.map(
        np.testing.assert_array_equal, before.opt_state.master, after.opt_state.master
    )
    moved = states[-1].opt_state.master
    assert not np.array_equal(
        jax.tree.leaves(moved)[1], jax.tree.leaves(before.opt_state.master)[1]
    )
    assert int(states[-1].skipped) == 0
    assert float(metrics["loss_scale"]) == scales[-1]


def test_numbers_that_no_scale_makes_finite_reach_the_guard_of_the_loop():
    lowest = sparse_state.LossScale(start=2.0**30, least=2.0**30)
    state = dataclasses.replace(SCALED, loss_scale=lowest)
    states, metrics = take_steps(task_of("mlp", state, 4), 4, count=1)
    assert np.any(metrics["nonfinite"])
    assert int(states[-1].skipped) == 1


@pytest.mark.acceptance("samo", 10)
def test_a_run_is_resumed_bit_for_bit(tmp_path):
    def fit(folder, steps):
        config = train.TrainConfig(
            steps=steps, batch_size=ROWS, eval_every=2, checkpoint_every=2
        )
        records = tiny.Records()
        with train.Checkpoints(tmp_path / folder) as checkpoints:
            state = train.fit(
                task,
                config,
                seed=0,
                mesh=task.mesh(4),
                recorder=records,
                checkpoints=checkpoints,
            )
        return jax.device_get(state), [r for r in records if "val_loss" in r]

    task = task_of("mlp", SCALED, 4)
    whole, scores = fit("whole", 6)
    fit("parts", 4)
    resumed, again = fit("parts", 6)
    for kept, back in zip(*map(jax.tree.leaves, (whole, resumed)), strict=True):
        if not jnp.issubdtype(kept.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(kept, back)
    assert scores[-1]["val_loss"] == again[-1]["val_loss"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"optimizer": "kfac"}, "optimizer=kfac and state=sparse both have a backward"),
        (
            {"averaging": "wagma"},
            "averaging=wagma and state=sparse both hold the param",
        ),
        ({"backward": "partial"}, "backward=partial and state=sparse both have a back"),
    ],
)
def test_parts_that_go_with_no_compressed_state_are_told_before_jax(parts, message):
    given = {kind: combinations.config(kind, name) for kind, name in parts.items()}
    with pytest.raises(ConfigError, match=message):
        TrainingConfig(state=SparseStateConfig(), **given)


@pytest.mark.parametrize("optimizer", ["jorge", "shampoo"])
def test_an_optimizer_of_matrices_is_refused_by_name(optimizer):
    with pytest.raises(ConfigError, match=r"state=sparse.*elementwise"):
        task_of("mlp", FLOAT32, 1, optimizer)
