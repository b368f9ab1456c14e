"""Grafting: SGD's length, the direction's direction."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import optim
from hpcjax.optim import norms
from tests.oracles import jorge as oracle

SHAPES = {"a": (4, 6), "b": (6,), "c": (2, 2, 3, 5), "d": ()}


def _gradients(step, dtype):
    rng = np.random.default_rng(step)
    return {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}


@pytest.mark.quick("float32")
@pytest.mark.acceptance("jorge", 8)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_length_is_that_of_the_sgd_step_and_direction_jorges(dtype):
    tolerance = {"float32": 1e-5, "float64": 1e-12}[dtype]
    with jax.enable_x64(dtype == "float64"):
        tx = optim.graft(
            optim.scale_by_jorge(update_every=2), optim.scale_by_momentum(0.9)
        )
        update = jax.jit(tx.update)
        state = tx.init(_gradients(0, dtype))
        buffers = {key: np.zeros(shape) for key, shape in SHAPES.items()}
        for step in range(12):
            gradients = _gradients(step, dtype)
            updates, state = update(gradients, state)
            for key in SHAPES:
                buffers[key] = 0.9 * buffers[key] + np.asarray(
                    gradients[key], np.float64
                )
                got = np.asarray(updates[key], np.float64)
                expected = np.linalg.norm(buffers[key])
                assert np.linalg.norm(got) == pytest.approx(expected, rel=tolerance)
                m = np.asarray(state.direction.momentum[key], np.float64)
                assert oracle.cosine(got, m) == pytest.approx(1, abs=1e-6)


@pytest.mark.acceptance("jorge", 8)
def test_the_optimizers_step_is_the_grafted_one_times_the_rate():
    params = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    whole = optim.jorge(0.25, update_every=2)
    parts = optim.graft(
        optim.scale_by_jorge(update_every=2), optim.scale_by_momentum(0.9)
    )
    one, two = whole.init(params), parts.init(params)
    for step in range(3):
        gradients = _gradients(step, "float32")
        got, one = jax.jit(whole.update)(gradients, one, params)
        expected, two = jax.jit(parts.update)(gradients, two)
    for key in SHAPES:
        np.testing.assert_allclose(got[key], -0.25 * expected[key], rtol=1e-5)


def test_global_norms():
    tx = optim.graft(optax.scale(2.0), optax.scale_by_sign(), layerwise=False)
    gradients = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([[4.0]])}
    updates, _ = tx.update(gradients, tx.init(gradients))
    length = np.sqrt(2)
    np.testing.assert_allclose(updates["a"], [0.6 * length, 0], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [[0.8 * length]], rtol=1e-6)


@pytest.mark.parametrize("layerwise", [True, False])
def test_zero_direction_is_no_step(layerwise):
    tx = optim.graft(optax.set_to_zero(), optax.identity(), layerwise)
    gradients = {"a": jnp.ones(3)}
    updates, _ = tx.update(gradients, tx.init(gradients))
    np.testing.assert_array_equal(updates["a"], 0)


def test_extra_arguments_reach_both():
    seen = []

    def update(updates, state, params=None, *, value):
        seen.append(value)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    tx = optim.graft(inner, inner)
    tx.update({"a": jnp.ones(2)}, tx.init({"a": jnp.ones(2)}), value=3)
    assert seen == [3, 3]


def test_a_gradient_that_is_no_number_makes_no_step_of_zero():
    bad, good = jnp.array([jnp.nan, 1.0]), jnp.ones(2)
    assert jnp.isnan(norms.cosine(bad, good))
    for tx in (
        optim.graft(optax.identity(), optax.identity()),
        optim.graft(optax.identity(), optax.identity(), layerwise=False),
        optim.scale_by_trust_ratio(),
    ):
        assert jnp.isnan(tx.update(bad, tx.init(good), good)[0]).all()
    for tx in (optim.scale_by_adagrad(), optim.scale_by_row_adagrad()):
        _, state = tx.update(jnp.full(2, jnp.nan), tx.init(good))
        assert jnp.isnan(tx.update(good, state)[0]).all()  # not the raw gradient
