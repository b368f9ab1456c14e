"""LAMB against the formula, against optax, and layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import optim
from hpcjax.core.errors import ConfigError

NO_BIAS = (("bias", False), (".*", True))
SHAPES = {"kernel": (3, 4), "bias": (4,), "still": (2,)}


def gradients(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {name: 3 * rng.normal(size=shape) for name, shape in SHAPES.items()}
        for _ in range(count)
    ]


def start():
    rng = np.random.default_rng(9)
    params = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    return params | {"still": np.zeros(2)}  # has no length: its ratio is one


def formula(params, steps, *, lr, b1, b2, eps, decay, excluded, clip):
    """Algorithm 2 of the paper, parameter by parameter, in numpy float64."""
    params = {name: value.copy() for name, value in params.items()}
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for t, gradient in enumerate(steps, 1):
        total = np.sqrt(sum(np.square(g).sum() for g in gradient.values()))
        for name, theta in params.items():
            g = gradient[name] / max(1.0, total / clip)
            first[name] = b1 * first[name] + (1 - b1) * g
            second[name] = b2 * second[name] + (1 - b2) * g**2
            u = first[name] / (1 - b1**t)
            u = u / (np.sqrt(second[name] / (1 - b2**t)) + eps)
            if name not in excluded:
                u = u + decay * theta
                length, own = np.linalg.norm(u), np.linalg.norm(theta)
                u = u * (own / length if own > 0 else 1.0)
            params[name] = theta - lr * u
    return params


def train(tx, params, steps):
    params = jax.tree.map(jnp.asarray, params)
    state, update = tx.init(params), jax.jit(tx.update)
    for gradient in steps:
        updates, state = update(jax.tree.map(jnp.asarray, gradient), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("clip", [None, 1.0])
def test_lamb_is_that_of_the_paper(clip):
    steps = gradients(6)
    values = {"b1": 0.8, "b2": 0.9, "eps": 1e-3}
    expected = formula(
        *(start(), steps),
        **(values | {"lr": 0.1, "decay": 0.2, "excluded": {"bias"}}),
        clip=clip or np.inf,
    )
    with jax.enable_x64(True):
        rules = {"decay_rules": NO_BIAS, "trust_rules": NO_BIAS}
        tx = optim.lamb(0.1, weight_decay=0.2, clip_norm=clip, **values, **rules)
        found = train(tx, start(), steps)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-10)


def test_lamb_is_optaxs():
    steps = gradients(5, seed=3)
    ours = train(optim.lamb(0.05, weight_decay=0.1), start(), steps)
    theirs = train(optax.lamb(0.05, weight_decay=0.1), start(), steps)
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_norms_hold_where_those_of_optax_do_not(size):
    """Why LAMB is not optax's: a float32 square of these entries is 0 or infinite."""
    params, gradient = {"w": jnp.full(4, size)}, {"w": jnp.ones(4)}

    def step(tx):
        return tx.update(gradient, tx.init(params), params)[0]["w"]

    # The update has the length of the parameter, times the rate.
    ours = step(optim.lamb(0.5, weight_decay=0.0))
    np.testing.assert_allclose(ours / size, -0.5, rtol=1e-5)
    assert not np.allclose(step(optax.lamb(0.5)) / size, -0.5)


def test_a_stack_of_layers_is_scaled_layer_by_layer():
    rng = np.random.default_rng(0)
    # Layers of very different size: their norms must not be taken together.
    scale = np.array([1, 10, 100])
    params = {
        "blocks": {
            "kernel": rng.normal(size=(3, 4, 5)) * scale[:, None, None],
            "norm": rng.normal(size=(3, 4)) * scale[:, None],
        }
    }
    steps = [jax.tree.map(lambda p: rng.normal(size=p.shape), params) for _ in range(3)]
    with jax.enable_x64(True):
        found = train(optim.lamb(0.1, stacked=("^blocks/",)), params, steps)
        merged = train(optim.lamb(0.1), params, steps)
        for layer in range(3):
            part = [
                jax.tree.map(lambda p, i=layer: p[i], tree) for tree in (params, *steps)
            ]
            alone = train(optim.lamb(0.1), part[0], part[1:])
            for name, value in alone["blocks"].items():
                np.testing.assert_allclose(
                    found["blocks"][name][layer], value, rtol=1e-12
                )
                assert not np.allclose(merged["blocks"][name][layer], value)


def test_a_step_is_as_long_as_its_parameter_says():
    params = {"a": jnp.asarray([3e25, 4e25]), "b": jnp.asarray([3e-25, 4e-25])}
    gradient = {"a": jnp.asarray([1e-25, 0.0]), "b": jnp.asarray([0.0, 1e25])}
    tx = optim.scale_by_trust_ratio()
    updates, _ = tx.update(gradient, tx.init(params), params)
    np.testing.assert_allclose(updates["a"], [5e25, 0], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], [0, 5e-25], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stacked": ("^layers/",)}, r"stacked must match parameters.*\^layers/"),
        ({"trust_rules": (("norm", False), (".*", True))}, "match no parameter"),
        ({"trust_rules": (("bias", False),)}, "matched by no rule"),
    ],
)
def test_rules_must_fit(options, words):
    with pytest.raises(ConfigError, match=words):
        optim.lamb(0.1, **options).init({"bias": jnp.ones(2), "kernel": jnp.ones(2)})


def test_ratios_need_parameters():
    tx = optim.scale_by_trust_ratio()
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
