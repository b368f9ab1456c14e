"""What the network sees, its gradients and penalties, against formulas and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax.core import ConfigError
from hpcjax.core.keys import BatchKey
from hpcjax.core.model import Model
from hpcjax.core.structures import NM
from hpcjax.optim import sparsify
from hpcjax.optim.sparsify import Uniform
from hpcjax.optim.sparsify._noise import chance_of_gates, dropout_divergence

HALF = Uniform(sparsity=0.5)
PARAMS = {
    "bias": jnp.array([0.3, -0.2]),
    "kernel": jnp.array([[0.5, -2.0], [1.5, 0.1], [-0.7, 3.0], [0.2, -0.9]]),
}
SLOPE = {"bias": jnp.array([1.0, 2.0]), "kernel": jnp.arange(1.0, 9.0).reshape(4, 2)}
W, G = np.asarray(PARAMS["kernel"]), np.asarray(SLOPE["kernel"])
KEPT = np.abs(W) >= 0.8  # four of eight


def pulled_back(viewed, trained, key=None):
    """What is seen, and the gradient of Σ slope · seen."""

    def loss(trained):
        seen = viewed.view(trained, key)
        return sum(jnp.vdot(SLOPE[name], seen[name]) for name in seen), seen

    grads, seen = jax.grad(loss, has_aux=True)(trained)
    return seen, grads


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_ste_sees_the_largest_and_trains_all(decay):
    viewed = sparsify.ste(optax.sgd(1.0), decay, distribution=HALF)
    seen, grads = pulled_back(viewed, PARAMS)
    np.testing.assert_array_equal(seen["kernel"], np.where(KEPT, W, 0))
    np.testing.assert_array_equal(grads["kernel"], G)
    updates, _ = viewed.tx.update(grads, viewed.tx.init(PARAMS), PARAMS)
    expected = -(G + decay * np.where(KEPT, 0, W))
    np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], -SLOPE["bias"])


@pytest.mark.acceptance("sparsity", 4)
def test_ste_sees_n_of_m():
    viewed = sparsify.ste(optax.sgd(1.0), structure=NM(n=1, m=4))
    seen = viewed.view(PARAMS)["kernel"]
    assert (np.count_nonzero(seen, axis=0) == 1).all()
    np.testing.assert_array_equal(seen, np.where(np.abs(W) == np.abs(W).max(0), W, 0))


def test_topkast_trains_what_it_sees_and_some_more():
    viewed = sparsify.topkast(optax.sgd(1.0), 0.75, 0.5, decay=0.1)
    seen, grads = pulled_back(viewed, PARAMS)
    a = np.abs(W) >= 2.0
    np.testing.assert_array_equal(seen["kernel"], np.where(a, W, 0))
    np.testing.assert_array_equal(grads["kernel"], np.where(KEPT, G, 0))
    updates, _ = viewed.tx.update(grads, viewed.tx.init(PARAMS), PARAMS)
    pull = np.where(a, 0.1, 0.4) * W
    np.testing.assert_allclose(
        updates["kernel"], -np.where(KEPT, G + pull, 0), rtol=1e-6
    )
    np.testing.assert_array_equal(viewed.masks(PARAMS)["kernel"], a)
    momentum = sparsify.topkast(optax.sgd(1.0, 0.9), 0.75, 0.5)
    state = momentum.tx.init(PARAMS)
    state = jax.tree.map(jnp.ones_like, state)  # of weights that have left B
    updates, _ = momentum.tx.update(grads, state, PARAMS)
    assert not np.any(np.asarray(updates["kernel"])[~KEPT])
    with pytest.raises(ConfigError, match="backward must be at most forward"):
        sparsify.topkast(optax.sgd(1.0), 0.5, 0.75)


def test_movement_learns_scores_by_what_moves_away_from_zero():
    viewed = sparsify.movement(optax.sgd(1.0), distribution=HALF)
    trained = viewed.start(PARAMS)
    order = jnp.array([[1.0, 8], [2, 7], [3, 6], [4, 5]])
    trained["scores"]["kernel"] = order
    seen, grads = pulled_back(viewed, trained)
    kept = np.asarray(order) >= 5
    np.testing.assert_array_equal(seen["kernel"], np.where(kept, W, 0))
    np.testing.assert_array_equal(seen["bias"], PARAMS["bias"])
    np.testing.assert_allclose(grads["scores"]["kernel"], G * W, rtol=1e-6)
    np.testing.assert_array_equal(grads["weights"]["kernel"], np.where(kept, G, 0))
    np.testing.assert_array_equal(viewed.masks(trained)["kernel"], kept)
    assert viewed.masks(trained)["bias"] is None
    # Large scores do not round the gate away.
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), trained)
    half["scores"]["kernel"] = half["scores"]["kernel"] * 300
    expected = np.where(kept, half["weights"]["kernel"], 0)
    np.testing.assert_array_equal(viewed.view(half)["kernel"], expected)


def test_soft_thresholds_are_of_each_layer_of_a_stack():
    stack = {"blocks": jnp.arange(1.0, 13.0).reshape(3, 2, 2), "head": jnp.ones((2, 2))}
    viewed = sparsify.soft_threshold(optax.sgd(1.0), 0.0, stacked=("blocks",))
    trained = viewed.start(stack)
    assert {p: s.shape for p, s in trained["s"].items()} == {"blocks": (3,), "head": ()}
    trained["s"]["blocks"] = jnp.array([-50.0, 0.0, 50.0])
    seen = viewed.view(trained)
    over = np.array([0.0, 0.5, 1.0])[:, None, None]
    np.testing.assert_allclose(seen["blocks"], stack["blocks"] - over, rtol=1e-6)
    np.testing.assert_allclose(seen["head"], 0.5)
    with pytest.raises(ConfigError, match="start_at must be finite"):
        sparsify.soft_threshold(optax.sgd(1.0), np.nan)


@pytest.mark.quick("-3.0", "2.0")
@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.parametrize("log_alpha", [-6.0, -3.0, 0.0, 2.0])
def test_the_expected_number_of_gates_is_that_of_a_million_samples(log_alpha):
    def share(key, dtype=jnp.float32):
        gates = sparsify.hard_concrete(jnp.full(10**6, log_alpha, dtype), key)
        return jnp.mean(gates > 0), gates.min(), gates.max()

    found, low, high = jax.jit(share)(jax.random.key(3))
    expected = float(chance_of_gates(jnp.array(log_alpha)))
    assert abs(float(found) - expected) <= 0.01 * expected
    assert (low, high) == (0.0, 1.0)
    # In half precision, too.
    half, *_ = jax.jit(lambda key: share(key, jnp.bfloat16))(jax.random.key(3))
    assert abs(float(half) - expected) <= 0.01 * expected
    # The formula, by numpy.
    by_hand = 1 / (1 + np.exp(-(log_alpha - 2 / 3 * np.log(0.1 / 1.1))))
    np.testing.assert_allclose(expected, by_hand, rtol=1e-5)


def test_l0_sees_gated_weights_and_is_fined_for_open_gates():
    viewed = sparsify.l0(optax.sgd(1.0), weight=0.5, start_at=0.5)
    trained = viewed.start(PARAMS)
    np.testing.assert_allclose(viewed.view(trained)["kernel"], W / 2, rtol=1e-6)
    one = float(chance_of_gates(jnp.array(0.0)))
    np.testing.assert_allclose(viewed.penalty(trained), 0.5 * 8 * one, rtol=1e-5)
    trained["log_alpha"]["kernel"] = jnp.where(KEPT, 5.0, -5.0)
    np.testing.assert_array_equal(viewed.view(trained)["kernel"], np.where(KEPT, W, 0))
    np.testing.assert_array_equal(viewed.masks(trained)["kernel"], KEPT)
    trained = viewed.start(PARAMS)
    first, grads = pulled_back(viewed, trained, jax.random.key(0))
    other = viewed.view(trained, jax.random.key(1))
    assert not np.array_equal(first["kernel"], other["kernel"])
    assert np.any(np.asarray(grads["log_alpha"]["kernel"]))


@pytest.mark.acceptance("sparsity", 1)
def test_the_divergence_of_dropout_is_its_formula():
    log_alpha = np.linspace(-8, 8, 33)
    alpha = np.exp(log_alpha)
    rise = 0.63576 / (1 + np.exp(-(1.87320 + 1.48695 * log_alpha)))
    expected = -(rise - 0.5 * np.log(1 + 1 / alpha) - 0.63576)
    with jax.enable_x64(True):
        found = dropout_divergence(jnp.asarray(log_alpha))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.all(np.diff(expected) < 0)  # more noise, less divergence


def test_variational_dropout_prunes_what_is_noise():
    viewed = sparsify.vardrop(optax.sgd(1.0), weight=0.1, start_at=-2.0)
    trained = viewed.start(PARAMS)
    # log α = −2 − log θ² is above 3 where |θ| < e^(−2.5) = 0.082.
    trained["weights"] = {**PARAMS, "kernel": PARAMS["kernel"].at[0, 0].set(0.08)}
    kept = np.ones((4, 2), bool)
    kept[0, 0] = False
    np.testing.assert_array_equal(viewed.masks(trained)["kernel"], kept)
    assert viewed.view(trained)["kernel"][0, 0] == 0
    weights = np.asarray(trained["weights"]["kernel"])
    alphas = jnp.asarray(-2 - np.log(weights**2))
    fine = 0.1 * float(dropout_divergence(alphas).sum())
    np.testing.assert_allclose(viewed.penalty(trained), fine, rtol=1e-5)
    draws = jax.jit(jax.vmap(lambda k: viewed.view(trained, k)["kernel"]))(
        jax.random.split(jax.random.key(0), 4000)
    )
    np.testing.assert_allclose(draws.mean(0), weights, atol=0.05)
    np.testing.assert_allclose(draws.std(0), np.exp(-1.0), rtol=0.1)


def test_noise_of_weights_is_noise_of_products():
    x = jnp.array([1.0, -2.0, 0.5, 3.0])
    log_var = jnp.log(jnp.linspace(0.1, 0.8, 8).reshape(4, 2))

    def draw(key):
        return sparsify.local_reparametrization(x, PARAMS["kernel"], log_var, key)

    draws = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(0), 4000))
    variance = np.asarray(x) ** 2 @ np.exp(np.asarray(log_var))
    np.testing.assert_allclose(draws.mean(0), np.asarray(x) @ W, atol=0.15)
    np.testing.assert_allclose(draws.var(0), variance, rtol=0.1)


def test_soft_thresholds_are_learned():
    viewed = sparsify.soft_threshold(optax.sgd(1.0), start_at=0.0)  # σ(0) = ½
    trained = viewed.start(PARAMS)
    seen, grads = pulled_back(viewed, trained)
    over = np.abs(W) > 0.5
    np.testing.assert_allclose(
        seen["kernel"], np.where(over, W - 0.5 * np.sign(W), 0), rtol=1e-6
    )
    np.testing.assert_array_equal(viewed.masks(trained)["kernel"], over)
    # dσ/ds = ¼ at 0: each weight above the threshold shrinks by that.
    expected = -0.25 * np.sum(np.where(over, G * np.sign(W), 0))
    np.testing.assert_allclose(grads["s"]["kernel"], expected, rtol=1e-6)


def test_powerprop_moves_small_weights_less():
    viewed = sparsify.powerprop(optax.sgd(1.0), 3.0, distribution=HALF)
    trained = viewed.start(PARAMS)
    seen, grads = pulled_back(viewed, trained)
    np.testing.assert_allclose(seen["kernel"], W, rtol=1e-5)
    np.testing.assert_allclose(grads["kernel"], 3 * np.abs(W) ** (2 / 3) * G, rtol=1e-5)
    np.testing.assert_array_equal(seen["bias"], PARAMS["bias"])
    np.testing.assert_array_equal(viewed.masks(trained)["kernel"], KEPT)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (sparsify.ste, {"decay": -1.0}),
        (sparsify.topkast, {"decay": float("nan")}),
        (sparsify.l0, {"weight": -0.1}),
        (sparsify.l0, {"weight": 0.1, "start_at": 1.0}),
        (sparsify.vardrop, {"weight": float("inf")}),
        (sparsify.vardrop, {"weight": 0.1, "start_at": float("nan")}),
    ],
)
def test_values_out_of_range_are_refused_by_name(make, wrong):
    name = list(wrong)[-1]
    with pytest.raises(ConfigError, match=f"{name} must be"):
        make(optax.sgd(0.1), **wrong)


@pytest.mark.parametrize("view", [sparsify.vardrop, sparsify.l0])
def test_weights_bear_the_same_noise_however_rows_are_shared_out(view):
    """Each row has a number of its own, which is for what is drawn by row alone."""

    def apply(params, state, x, **_):
        return x @ params["kernel"], state

    viewed = view(optax.sgd(0.1), weight=0.1)
    model = sparsify.view_model(Model(lambda key: (PARAMS, {}), apply), viewed)
    params, state = model.init(jax.random.key(0))
    key, rows = jax.random.key(1), [jnp.arange(2), jnp.arange(2, 4)]
    keys = [key, *(BatchKey(key=key, rows=own) for own in rows)]
    x = jnp.ones((2, 4))
    whole, *parts = (
        model.apply(params, state, x, train=True, key=own)[0] for own in keys
    )
    for part in parts:
        np.testing.assert_array_equal(part, whole)
    assert not np.allclose(whole, model.apply(params, state, x, train=False)[0])
