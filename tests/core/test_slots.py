"""Slots: a layer must be observed once in a pass, however the pass is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core
from hpcjax.core import LayerSpec, Model

X = jnp.ones((6, 4))
W = jnp.eye(4)


def moment(x, g):
    return {"a": x.reshape(-1, 4).T @ x.reshape(-1, 4), "g": g.sum()}


def taps_of(forward, depth=None, **options):
    """The tap of one layer, `forward(layer, x)` with `layer(x)`, `layer(x, tap)`."""

    def apply(params, state, x, *, train, key=None, taps=None):
        given = (taps or {}).get("layer")

        def layer(x, tap=given):
            return core.observe(tap, x, x @ params)[0]

        return (forward(layer, x) if depth is None else forward(layer, x, given)), state

    model = Model(None, apply, (LayerSpec("layer", "dense", {"depth": depth}),))
    taps = core.make_slots(model, {"layer": moment}, W, {}, X, **options)
    return model, taps


def slots(forward, depth=None, **options):
    return taps_of(forward, depth, **options)[1]["layer"].slot


def scanned(layer, x):
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, 3)[0]


def in_jit(layer, x):
    once = jax.jit(layer)
    return once(once(x))


def in_branch(layer, x):
    return jax.lax.cond(x.sum() > 0, lambda x: layer(layer(x)), layer, x)


def in_remat(layer, x):
    return jax.checkpoint(lambda x: layer(layer(x)))(x)


def in_branches(layer, x):
    twice = functools.partial(in_remat, layer)
    return jax.lax.cond(x.sum() > 0, lambda x: layer(layer(x)), twice, x)


@pytest.mark.parametrize(
    "forward", [lambda layer, x: layer(layer(x)), scanned, in_jit, in_branch, in_remat]
)
def test_a_layer_that_is_used_again_is_named(forward):
    with pytest.raises(ValueError, match="'layer' is used again"):
        slots(forward)


@pytest.mark.parametrize("forward", [scanned, in_jit, in_remat, in_branches])
def test_uses_of_a_shared_layer_can_be_averaged(forward):
    model, taps = taps_of(forward, average_uses=True)
    w, uses = 1.5 * W, 3 if forward is scanned else 2

    def loss(taps):
        return model.apply(w, {}, X, train=True, taps=taps)[0].sum()

    found = jax.jit(jax.grad(loss))(taps)["layer"].slot
    # The inputs of use k are 1.5ᵏ, and g there 1.5 to the uses behind it.
    inputs = sum(6 * 1.5 ** (2 * k) for k in range(uses)) / uses
    errors = sum(24 * 1.5**k for k in range(uses)) / uses
    np.testing.assert_allclose(found["a"], np.full((4, 4), inputs), rtol=1e-6)
    np.testing.assert_allclose(found["g"], errors, rtol=1e-6)


def test_uses_that_have_no_mean_are_refused():
    with pytest.raises(ValueError, match=r"equally often .* got 1 times in one and 2"):
        slots(in_branch, average_uses=True)
    with pytest.raises(ValueError, match=r"one shape: got \[\(3, 4\), \(6, 4\)\]"):
        slots(lambda layer, x: layer(layer(x)[:3]), average_uses=True)
    with pytest.raises(ValueError, match=r"observed within jax\.vmap"):
        slots(
            lambda layer, x: jax.vmap(lambda x: layer(layer(x)))(x), average_uses=True
        )
    with pytest.raises(ValueError, match="'layer' is used again"):
        slots(
            lambda layer, x, tap: unrolled(layer, layer(x), tap), 3, average_uses=True
        )


def test_a_stack_in_one_branch_is_used_once():
    def either(layer, x, tap):
        return jax.lax.cond(x.sum() > 0, lambda x: by_scan(layer, x, tap), jnp.tanh, x)

    assert slots(either, depth=3)["a"].shape == (3, 4, 4)


@pytest.mark.parametrize(
    "forward",
    [
        lambda layer, x: layer(x),
        lambda layer, x: jax.jit(layer)(x),
        lambda layer, x: jax.checkpoint(layer)(x),
        lambda layer, x: jax.lax.cond(x.sum() > 0, layer, layer, x),
        lambda layer, x: jax.lax.scan(lambda x, _: (layer(x), None), x, None, 1)[0],
    ],
)
def test_one_use_is_one_use_wherever_it_is(forward):
    found = slots(forward)
    assert found["a"].shape == (4, 4)
    assert found["g"].shape == ()


def by_scan(layer, x, tap):
    return jax.lax.scan(lambda x, one: (layer(x, one), None), x, tap)[0]


def unrolled(layer, x, tap):
    for number in range(3):
        x = layer(x, jax.tree.map(lambda leaf, i=number: leaf[i], tap))
    return x


@pytest.mark.parametrize("forward", [by_scan, unrolled])
def test_a_stack_is_used_once_for_each_of_its_layers(forward):
    assert slots(forward, depth=3)["a"].shape == (3, 4, 4)
    with pytest.raises(ValueError, match="'layer' is used again"):
        slots(lambda layer, x, tap: forward(layer, forward(layer, x, tap), tap), 3)


def test_single_examples_are_refused():
    with pytest.raises(ValueError, match=r"'layer' is observed within jax\.vmap"):
        slots(lambda layer, x: jax.vmap(layer)(x))


def test_a_layer_that_is_never_observed_is_named():
    with pytest.raises(ValueError, match=r"never observes: \['layer'\]"):
        slots(lambda layer, x: x)
