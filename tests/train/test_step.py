import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, optim, sharding, train
from hpcjax.core import PerDevice, per_device
from tests.train import tiny


def softmax_gradient(params, batch):
    """Gradient of the mean cross-entropy of softmax regression, float64 numpy."""
    x, y = batch["x"].astype(np.float64), batch["y"]
    kernel, bias = (
        np.asarray(params["dense"][n], np.float64) for n in ("kernel", "bias")
    )
    logits = x @ kernel + bias
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return {"kernel": x.T @ p / len(y), "bias": p.mean(0)}


def batch_of(size=16):
    return tiny.Points().gather(np.arange(size))


def run_steps(task, devices, count, batch=None):
    mesh = sharding.data_mesh(devices)
    state = train.init_state(task, 0, mesh)
    step = train.train_step(task, mesh, state)
    placed = sharding.place_batch(batch or batch_of(), mesh)
    for _ in range(count):
        state, metrics = step(state, placed)
    return state, metrics


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_a_step_is_gradient_descent_on_the_global_mean(devices):
    task = tiny.task(optax.sgd(0.5))
    mesh = sharding.data_mesh(devices)
    before = jax.device_get(train.init_state(task, 0, mesh).params)
    after, metrics = run_steps(task, devices, 1)
    grads = softmax_gradient(before, batch_of())
    for name, grad in grads.items():
        expected = np.asarray(before["dense"][name], np.float64) - 0.5 * grad
        np.testing.assert_allclose(after.params["dense"][name], expected, atol=2e-7)
    assert int(after.step) == 1
    assert set(metrics) >= {"loss", "error", "nonfinite"}


def test_devices_do_not_change_the_numbers_beyond_rounding():
    one, _ = run_steps(tiny.task(), 1, 10)
    eight, _ = run_steps(tiny.task(), 8, 10)
    chex.assert_trees_all_close(
        jax.device_get(one.params), jax.device_get(eight.params), atol=1e-6
    )


def test_a_step_compiles_once_and_keeps_its_shardings(compilations):
    task, mesh = tiny.task(), sharding.data_mesh(8)
    state = train.init_state(task, 0, mesh)
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = train.train_step(task, mesh, state)
    placed = sharding.place_batch(batch_of(), mesh)
    compilations.clear()
    for _ in range(3):
        state, _ = step(state, placed)
    assert len(compilations) == 1
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == before


def test_a_forgotten_exchange_is_an_error_that_says_so():
    full = tiny.task()
    alone = full.replace(method=optim.data_parallel(optax.sgd(0.1), mean=None))
    with pytest.raises(ValueError, match=r"parameters differ.*all_reduce_mean"):
        run_steps(alone, 8, 1)


@pytest.mark.faults(10)
@pytest.mark.parametrize("device", [0, 5])
def test_a_nonfinite_gradient_changes_nothing_on_any_device(device):
    task, mesh = tiny.task(optax.adam(0.1)), sharding.data_mesh(8)
    state, _ = run_steps(task, 8, 2)
    before = jax.device_get(dataclasses.replace(state, key=None))
    batch = batch_of()
    batch["x"][2 * device, 0] = np.inf  # rows 2d and 2d + 1 are device d's
    step = train.train_step(task, mesh, state)
    after, metrics = step(state, sharding.place_batch(batch, mesh))
    for name in ("params", "opt_state", "model_state"):
        chex.assert_trees_all_equal(
            jax.device_get(getattr(after, name)), getattr(before, name)
        )
    assert int(after.skipped) == 1
    assert int(after.step) == int(before.step) + 1
    names = train.step.list_guarded(after)
    counts = dict(zip(names, np.asarray(metrics["nonfinite"]), strict=True))
    assert counts["gradient dense/kernel"] == 1  # one device of eight
    assert counts["params dense/kernel"] == 8  # what they would all have taken over


def error_feedback(density: float, axis: str) -> optax.GradientTransformationExtraArgs:
    """Sends the largest entries of each device's corrected gradient, keeps the rest."""

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return PerDevice(value=zeros, axis=axis)

    def update(updates, state, params=None, **extra_args):
        corrected = jax.tree.map(jnp.add, state.value, updates)

        def largest(leaf):
            kept = max(1, round(density * leaf.size))
            threshold = jnp.sort(jnp.abs(leaf).ravel())[-kept]
            return jnp.where(jnp.abs(leaf) >= threshold, leaf, 0)

        sent = jax.tree.map(largest, corrected)
        residual = jax.tree.map(jnp.subtract, corrected, sent)
        mean = jax.tree.map(lambda leaf: jax.lax.pmean(leaf, axis), sent)
        return mean, PerDevice(value=residual, axis=axis)

    return optax.GradientTransformationExtraArgs(init, update)


def sparse_task():
    tx = optax.chain(error_feedback(0.3, "data"), optax.trace(0.9), optax.scale(-0.2))
    return tiny.task().replace(method=optim.data_parallel(tx, mean=None))


def simulate_error_feedback(params, batch, devices, steps):
    """The same twenty lines in float64 numpy, device by device."""
    names = ("kernel", "bias")
    params = {n: np.asarray(params["dense"][n], np.float64) for n in names}
    residual = [{n: np.zeros_like(params[n]) for n in names} for _ in range(devices)]
    momentum = {n: np.zeros_like(params[n]) for n in names}
    rows = len(batch["y"]) // devices
    for _ in range(steps):
        sent = []
        for d in range(devices):
            part = {k: v[d * rows : (d + 1) * rows] for k, v in batch.items()}
            grads = softmax_gradient({"dense": params}, part)
            kept = {}
            for n in names:
                corrected = residual[d][n] + grads[n]
                count = max(1, round(0.3 * corrected.size))
                threshold = np.sort(np.abs(corrected).ravel())[-count]
                kept[n] = np.where(np.abs(corrected) >= threshold, corrected, 0)
                residual[d][n] = corrected - kept[n]
            sent.append(kept)
        for n in names:
            momentum[n] = 0.9 * momentum[n] + np.mean([s[n] for s in sent], 0)
            params[n] = params[n] - 0.2 * momentum[n]
    return params, residual


def test_per_device_state_in_a_chain_equals_a_numpy_simulation():
    task = sparse_task()
    start = jax.device_get(train.init_state(task, 0, sharding.data_mesh(8)).params)
    state, _ = run_steps(task, 8, 20)
    params, residual = simulate_error_feedback(start, batch_of(), 8, 20)
    stored = state.opt_state[0].value["dense"]
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(state.params["dense"][name], params[name], atol=5e-6)
        assert stored[name].shape == (8, *params[name].shape)
        assert stored[name].sharding.spec == jax.sharding.PartitionSpec("data")
        expected = np.stack([r[name] for r in residual])
        np.testing.assert_allclose(stored[name], expected, atol=5e-6)
    assert np.std(stored["kernel"], axis=0).max() > 1e-3  # devices really differ


@pytest.mark.faults(10)
def test_per_device_state_is_untouched_by_a_skipped_step():
    task, mesh = sparse_task(), sharding.data_mesh(8)
    state, _ = run_steps(task, 8, 3)
    before = jax.device_get(state.opt_state)
    batch = batch_of()
    batch["x"][3, 1] = np.nan
    step = train.train_step(task, mesh, state)
    after, _ = step(state, sharding.place_batch(batch, mesh))
    chex.assert_trees_all_equal(jax.device_get(after.opt_state), before)


def test_bare_state_that_differs_between_devices_is_an_error():
    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates, state, params=None, **extra_args):
        mean = jax.tree.map(lambda u: jax.lax.pmean(u, "data"), updates)
        return mean, updates

    tx = optax.GradientTransformationExtraArgs(init, update)
    task = tiny.task().replace(method=optim.data_parallel(tx, mean=None))
    with pytest.raises(ValueError, match=r"optimizer state differ.*PerDevice"):
        run_steps(task, 8, 1)


def test_per_device_specs_reach_through_wrappers():
    inner = error_feedback(0.3, "data")
    wrapped = optax.chain(
        optax.named_chain(("sparse", inner), ("momentum", optax.trace(0.9))),
        optax.inject_hyperparams(optax.scale)(step_size=-0.1),
    )
    params = {"dense": {"kernel": jnp.zeros((4, 3))}}
    specs = per_device.specs(wrapped.init(params))
    flat = jax.tree.leaves(
        specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec)
    )
    assert flat.count(jax.sharding.PartitionSpec("data")) == 1


def test_supervised_averages_before_a_nonlinear_optimizer():
    """Signs of the mean differ from the mean of signs, so the order shows."""
    task = tiny.task(optax.chain(optax.scale_by_sign(), optax.scale(-0.1)))
    before = jax.device_get(train.init_state(task, 0, sharding.data_mesh(8)).params)
    after, _ = run_steps(task, 8, 1)
    grads = softmax_gradient(before, batch_of())
    for name, grad in grads.items():
        expected = np.asarray(before["dense"][name]) - 0.1 * np.sign(grad)
        np.testing.assert_allclose(after.params["dense"][name], expected, atol=1e-6)


def counting():
    """A linear model that keeps of its inputs a mean, and what each device has seen."""
    plain = tiny.linear()

    def init(key):
        own = PerDevice(value=jnp.zeros(4), axis="data", resize="reset")
        return plain.init(key)[0], {"mean": jnp.zeros(4), "own": own}

    def apply(params, state, x, *, train, key=None, taps=None):
        y, _ = plain.apply(params, {}, x, train=train)
        if train:
            own = dataclasses.replace(state["own"], value=state["own"].value + x.sum(0))
            return y, {"mean": x.mean(0), "own": own}
        return y + 0 * state["own"].value[:3], state

    return core.Model(init, apply)


def test_a_model_may_keep_what_differs_between_devices():
    task = train.supervised(counting(), optax.sgd(0.1), tiny.dataset())
    mesh = sharding.data_mesh(4)
    state = train.init_state(task, 0, mesh)
    assert state.model_state["own"].value.shape == (4, 4)
    step = train.train_step(task, mesh, train.state_shapes(task, mesh))
    batch = batch_of(16)
    for _ in range(2):
        state, _ = step(state, sharding.place_batch(batch, mesh))
    rows = np.asarray(batch["x"]).reshape(4, 4, 4)
    kept = state.model_state
    np.testing.assert_allclose(kept["own"].value, 2 * rows.sum(1), rtol=1e-5)
    np.testing.assert_allclose(kept["mean"], rows.mean((0, 1)), rtol=1e-5)
    again = per_device.resize(kept, sharding.data_mesh(2))
    np.testing.assert_array_equal(again["own"].value, np.zeros((2, 4)))
    placed = sharding.place_batch(batch | {"weight": np.ones(16, "f4")}, mesh)
    totals = train.eval_step(task, mesh)(state.params, kept, placed)
    assert float(totals.count) == 16
    assert np.isfinite(float(totals.sums["loss"]))
