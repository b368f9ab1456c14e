"""K-FAC of a layer that is used several times: statistics and update against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hpcjax import core, models
from hpcjax.optim import kfac
from tests.optim.kfac import problems

USES, DAMPING = 3, 0.05


def written_out(layer, x):
    for _ in range(USES):
        x = jnp.tanh(layer(x))
    return x


def scanned(layer, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(layer(x)), None), x, None, USES)[0]


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.shared = nnx.Linear(4, 4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x, *, train, key):
        return self.head(written_out(self.shared, x))


def model_of(forward):
    """Logits of `head` behind `USES` times tanh of the layer `shared`."""
    if forward is None:
        return models.from_nnx(Recurrent)

    def init(key):
        sizes, params = {"shared": (4, 4), "head": (4, 3)}, {}
        for name, shape in sizes.items():
            kernel = jax.random.normal(core.derive(key, name), shape) / 2
            bias = jax.random.normal(core.derive(key, name + "/bias"), shape[1:])
            params[name] = {"kernel": kernel, "bias": bias}
        return params, {}

    def apply(params, state, x, *, train, key=None, taps=None):
        def layer(name, x):
            y = x @ params[name]["kernel"] + params[name]["bias"]
            return core.observe((taps or {}).get(name), x, y)[0]

        return layer("head", forward(lambda x: layer("shared", x), x)), state

    params, _ = init(jax.random.key(0))
    return core.Model(init, apply, core.dense_layers(params))


def in_numpy(params, x, labels):
    """A and G of `shared`, and its gradient [kernel; bias], from every row of a use."""
    params = jax.tree.map(lambda p: np.asarray(p, "float64"), params)
    w, b = params["shared"]["kernel"], params["shared"]["bias"]
    inputs, hidden = [], np.asarray(x, "float64")
    for _ in range(USES):
        inputs.append(hidden)
        hidden = np.tanh(hidden @ w + b)
    logits = hidden @ params["head"]["kernel"] + params["head"]["bias"]
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    # Of the loss of each example, not of their mean.
    errors = (chances - np.eye(3)[labels]) @ params["head"]["kernel"].T
    outputs = [*inputs[1:], hidden]
    a, g, gradient = [], [], 0
    for taken, given in zip(reversed(inputs), reversed(outputs), strict=True):
        errors = errors * (1 - given**2)
        rows = np.concatenate([taken, np.ones((len(taken), 1))], axis=1)
        a += [np.outer(row, row) for row in rows]
        g += [np.outer(row, row) for row in errors]
        gradient = gradient + rows.T @ errors / len(rows)
        errors = errors @ w.T
    return np.mean(a, axis=0), np.mean(g, axis=0), gradient


@pytest.mark.quick("scanned")
@pytest.mark.parametrize("forward", [written_out, scanned, None])
def test_statistics_and_update_are_those_of_the_rows_of_all_uses(forward):
    model = model_of(forward)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(1))
    x = jax.random.normal(jax.random.key(2), (6, 4))
    labels = jnp.arange(6) % 3
    found = jax.jit(
        lambda params: problems.differentiated(chosen, model, params, x, labels)
    )(params)
    a, g, gradient = in_numpy(params, x, labels)
    seen = found.statistics["shared"]
    np.testing.assert_allclose(seen["a"], a, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(36 * seen["g"], g, rtol=1e-4, atol=1e-6)
    tx = kfac.scale_by_kfac(chosen, damping=DAMPING, kl_clip=None, factor_ramp=True)
    updates, _ = tx.update(
        found.grads, tx.init(params), taps=found.statistics, loss_terms=6
    )
    # vec(A⁻¹ M G⁻¹) with rows of M one after another is (A ⊗ G)⁻¹ vec(M).
    curvature = np.kron(a, g) + DAMPING * np.eye(20)
    expected = np.linalg.solve(curvature, gradient.ravel()).reshape(5, 4)
    own = updates["shared"]
    np.testing.assert_allclose(own["kernel"], expected[:4], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(own["bias"], expected[4], rtol=1e-3, atol=1e-5)


def test_taps_of_a_shared_layer_do_not_compile_again(compilations):
    model = model_of(written_out)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(1))
    x, labels = jnp.ones((6, 4)), jnp.arange(6) % 3

    @jax.jit
    def statistics(taps):
        def forward(params, taps):
            return model.apply(params, {}, x, train=True, taps=taps)

        loss = problems.cross_entropy
        return kfac.differentiate(forward, loss, params, taps, labels).statistics

    statistics(kfac.make_taps(chosen, model, params, {}, x))
    taps = kfac.make_taps(chosen, model, params, {}, x)
    compilations.clear()
    statistics(taps)
    assert not compilations
