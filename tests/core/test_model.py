"""Taps: what is observed is what autodiff gives, and observing changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.core import model as models
from hpcjax.core.model import SEEN, LayerSpec, Model, Tap
from hpcjax.core.slots import make_slots


def inputs_and_gradients(x, g):
    return {"x": x, "g": g}


def factor(x, g):
    return jnp.asarray(g.T @ g)


def init(key):
    first, second = jax.random.split(key)
    return {
        "one": jax.random.normal(first, (4, 5)),
        "two": jax.random.normal(second, (5, 3)),
    }, {}


def apply(params, state, x, *, train, key=None, taps=None):
    taps, seen = taps or {}, {}
    for path in ("one", "two"):
        y, record = models.observe(taps.get(path), x, x @ params[path])
        if record is not None:
            seen[path] = record
        x = jnp.tanh(y)
    return x, {**state, SEEN: seen} if seen else state


LAYERS = (LayerSpec("one", "dense", {}), LayerSpec("two", "dense", {}))
MODEL = Model(init, apply, LAYERS)


@pytest.fixture
def problem():
    params, state = init(jax.random.key(0))
    return params, state, jax.random.normal(jax.random.key(1), (6, 4))


def loss(params, taps, state, x):
    return MODEL.apply(params, state, x, train=True, taps=taps)[0].sum()


def test_slots_receive_inputs_and_output_gradients(problem):
    params, state, x = problem
    wanted = {"one": inputs_and_gradients, "two": factor}
    taps = make_slots(MODEL, wanted, params, state, x)
    gradient, statistics = jax.grad(loss, argnums=(0, 1))(params, taps, state, x)
    plain = jax.grad(loss)(params, None, state, x)
    for path, leaf in plain.items():
        np.testing.assert_array_equal(gradient[path], leaf)
    one = statistics["one"].slot
    np.testing.assert_array_equal(one["x"], x)
    np.testing.assert_allclose(one["x"].T @ one["g"], plain["one"], rtol=1e-5)
    hidden = np.tanh(np.asarray(x, np.float64) @ np.asarray(params["one"], np.float64))
    output = np.tanh(hidden @ np.asarray(params["two"], np.float64))
    g = 1 - output**2
    np.testing.assert_allclose(statistics["two"].slot, g.T @ g, rtol=1e-4)


def test_forward_records_are_returned_in_the_state(problem):
    params, state, x = problem
    taps = {"two": Tap(forward=lambda x, y: (x.shape, y.sum()))}
    _, state = MODEL.apply(params, state, x, train=True, taps=taps)
    shape, total = state[SEEN]["two"]
    assert shape == (6, 5)
    expected = (
        np.tanh(np.asarray(x @ params["one"])) @ np.asarray(params["two"])
    ).sum()
    np.testing.assert_allclose(total, expected, rtol=1e-4)


def test_without_taps_nothing_is_traced(problem):
    params, _, x = problem

    def bare(params, x):
        return jnp.tanh(jnp.tanh(x @ params["one"]) @ params["two"]).sum()

    tapped = jax.make_jaxpr(lambda p, x: loss(p, None, {}, x))(params, x)
    assert str(tapped) == str(jax.make_jaxpr(bare)(params, x))


def test_unknown_layers_are_refused(problem):
    with pytest.raises(ValueError, match="'onw'; did you mean 'one'"):
        models.check_taps(MODEL, {"onw": Tap()})
    with pytest.raises(ValueError, match="no layer"):
        make_slots(MODEL, {"three": factor}, *problem)
