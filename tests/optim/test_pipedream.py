"""Stale weights of an asynchronous pipeline, beside a list of versions in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, optim, sharding, train
from hpcjax.core import ConfigError, Model, trees
from hpcjax.models import CausalLmConfig
from tests import guides
from tests.train import tiny

LAYERS, WIDTH, ROWS, STEPS, LR = 4, 3, 8, 6, 0.05
X, Y = np.random.default_rng(0).normal(size=(2, STEPS, ROWS, WIDTH))


def chain():
    """A product of matrices, of which the middle two are a stack."""

    def init(key):
        each = 0.5 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH))
        a, blocks, z = ({"w": own} for own in (each[0], each[1:-1], each[-1]))
        return {"a": a, "blocks": blocks, "z": z}, {}

    def apply(params, state, x, *, train, key=None, taps=None):
        x = x @ params["a"]["w"]
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["blocks"]["w"])
        return x @ params["z"]["w"], state

    return Model(init, apply)


def drawn():
    return chain().init(jax.random.key(0))[0]


def score(outputs, batch):
    squares = ((outputs - batch["y"]) ** 2).sum(-1)
    return core.Totals({"loss": squares.sum()}, jnp.float32(len(squares)))


def numpy_run(weights, delay):
    """The weights of every layer after each step, kept in full and looked up by age."""
    history = [[w.astype(np.float64) for w in weights]]
    for x, y in zip(X, Y, strict=True):
        used = [history[max(0, len(history) - 1 - delay(n))][n] for n in range(LAYERS)]
        inputs = [x]
        for w in used:
            inputs.append(inputs[-1] @ w)
        back, grads = 2 * (inputs[-1] - y) / ROWS, []
        for n in reversed(range(LAYERS)):
            grads.insert(0, inputs[n].T @ back)
            back = back @ used[n].T
        history.append([w - LR * g for w, g in zip(history[-1], grads, strict=True)])
    return history[-1]


def our_run(delays, devices=2):
    """The same by the house's step; returns weights by layer, before and after."""
    chosen = core.Optimization(
        optax.sgd(LR), gradients=optim.gradients_of_versions(delays)
    )

    def mean(axes):
        return optax.chain(optim.all_reduce_mean(axes), optim.keep_versions(delays))

    return steps(optim.data_parallel(chosen, mean=mean), devices)


def steps(method, devices=2):
    mesh = sharding.data_mesh(devices)
    task = train.supervised(chain(), method, tiny.dataset(), score)
    state = train.init_state(task, 0, mesh)
    first = by_layer(state.params)
    step = train.train_step(task, mesh, state)
    for x, y in zip(X, Y, strict=True):
        batch = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
        state, _ = step(state, sharding.place_batch(batch, mesh))
    return first, by_layer(state.params), state


def by_layer(params):
    params = jax.device_get(params)
    return [params["a"]["w"], *params["blocks"]["w"], params["z"]["w"]]


def delays_of(stages, versions="stash", costs=(1.0, 1.0, 1.0)):
    # Of the middle two layers, a stack, the cost of each.
    return optim.stage_delays(
        chain(), X[0].astype(np.float32), stages, versions, costs, ("^blocks/",)
    )


@pytest.mark.acceptance("how-to-train", 4)
@pytest.mark.parametrize(
    ("stages", "versions", "delay"),
    [
        (4, "stash", lambda n: 3 - n),
        (2, "stash", lambda n: 1 - n // 2),
        (4, "double", lambda n: 1),
        (1, "stash", lambda n: 0),
    ],
)
def test_weights_of_every_step_are_those_of_the_versions(stages, versions, delay):
    delays = delays_of(stages, versions)
    first, ours, state = our_run(delays)
    for got, wanted in zip(ours, numpy_run(first, delay), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)
    wrong = numpy_run(first, lambda n: delay(n) + 1)
    assert max(np.abs(g - w).max() for g, w in zip(ours, wrong, strict=True)) > 1e-3
    (held,) = (n for n in state.opt_state[0] if isinstance(n, optim.WeightVersions))
    layers = sum(leaf.size // WIDTH**2 for leaf in jax.tree.leaves(held))
    assert layers == sum(map(delay, range(LAYERS)))  # no version that nobody needs


@pytest.mark.acceptance("how-to-train", 4)
def test_one_stage_is_plain_training_bit_for_bit():
    _, ours, _ = our_run(delays_of(1))
    _, wanted, _ = steps(optim.data_parallel(optax.sgd(LR)))
    for got, plain in zip(ours, wanted, strict=True):
        np.testing.assert_array_equal(got, plain)


def test_stages_cut_layers_of_equal_cost_and_stacks_between_layers():
    assert delays_of(4) == {"a/w": (3,), "blocks/w": (2, 1), "z/w": (0,)}
    assert delays_of(2) == {"a/w": (1,), "blocks/w": (1, 0), "z/w": (0,)}
    # 1 + 4 against 4 + 4; as half a cost each, the stack would be of one stage.
    assert delays_of(2, costs=(1.0, 4.0, 4.0))["blocks/w"] == (1, 0)
    model = CausalLmConfig(depth=4, width=8, heads=2).make((4,), 11)
    delays = optim.stage_delays(
        model, jnp.zeros((2, 4), jnp.int32), 3, stacked=("^blocks/",)
    )
    assert all(len(own) == 4 for p, own in delays.items() if p.startswith("blocks/"))
    assert {own[0] for p, own in delays.items() if "embed" in p} == {2}
    assert set(delays) == set(
        trees.flatten(jax.eval_shape(model.init, jax.random.key(0))[0])
    )


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"at most the 4 layers.*stages=5"):
        delays_of(5)
    with pytest.raises(ConfigError, match=r"costs must be one for each of the 3"):
        delays_of(2, costs=(1.0, 1.0))
    with pytest.raises(ConfigError, match=r"stash.*double"):
        delays_of(2, "triple")
    params = drawn()
    with pytest.raises(ConfigError, match=r"delays must be the parameters'.*z/w"):
        optim.keep_versions({"a/w": (0,), "blocks/w": (0, 0)}).init(params)
    deeper = delays_of(4) | {"blocks/w": (2, 1, 1)}
    with pytest.raises(ConfigError, match=r"a delay for each layer.*blocks/w"):
        optim.keep_versions(deeper).init(params)
    rising = delays_of(4) | {"blocks/w": (1, 2)}
    with pytest.raises(ConfigError, match=r"must not grow.*blocks/w"):
        optim.keep_versions(rising).init(params)
    with pytest.raises(ValueError, match="0 states of keep_versions"):
        optim.mix_versions(params, optax.sgd(0.1).init(params), delays_of(4))
    tx = optim.keep_versions(delays_of(4))
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))


def test_it_composes_with_loops_of_ones_own():
    """Donated and jitted, its state is never one array twice."""
    delays = delays_of(4)
    tx = optax.chain(optim.keep_versions(delays), optax.sgd(LR))
    params = drawn()
    state = tx.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        used = optim.mix_versions(params, state, delays)
        updates, state = tx.update(used, state, params)
        return optax.apply_updates(params, updates), state

    first = jax.device_get(params)
    for _ in range(3):
        params, state = step(params, state)
    # The first layer has waited three steps for its own weights.
    waited = first["a"]["w"] * (1 - 3 * LR)
    np.testing.assert_allclose(params["a"]["w"], waited, rtol=1e-6)
    shrunk = first["z"]["w"] * (1 - LR) ** 3
    np.testing.assert_allclose(params["z"]["w"], shrunk, rtol=1e-6)


def test_the_loop_of_the_page_trains():
    names, blocks = {}, guides.blocks("pipelines.md")
    for number in (0, 3):
        guides.run_block(blocks[number], "pipelines.md", names)
    weights, kept, x = names["weights"], names["kept"], np.eye(8, dtype=np.float32)

    def loss(weights):
        return jnp.mean((names["chain"].apply(weights, {}, x, train=True)[0] - x) ** 2)

    first = loss(weights)
    for _ in range(60):
        weights, kept = names["step"](weights, kept, x)
    assert loss(weights) < 0.9 * first
