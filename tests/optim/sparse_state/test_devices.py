"""Compressed gradients between devices: what is sent, and what is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import core, optim, perf, sharding
from hpcjax.optim import sparse_state

SHAPE, BIAS, ROWS = (32, 24), 24, 16


def loss(params, batch):
    params = core.realize(params)
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y).astype(jnp.float32) ** 2)


@functools.cache
def draw():
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=SHAPE), "b": rng.normal(size=BIAS)}
    masks = {"w": rng.random(SHAPE) < 0.1, "b": None}
    batch = rng.normal(size=(ROWS, SHAPE[0])), rng.normal(size=(ROWS, SHAPE[1]))
    cast = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    return cast(params), masks, cast(batch)


def make(dtype, axis, mode="dense"):
    """A jitted step on the devices of `axis`, and its arguments."""
    params, masks, batch = draw()
    mean = optim.all_reduce_mean(axis)
    optimizer = sparse_state.wrap(optax.sgd(0.1, 0.9), mean=mean)
    made = sparse_state.compress(params, masks, dtype=dtype, mode=mode)
    state = optimizer.init(made)

    def step(state, batch):
        differentiate = sparse_state.value_and_grad(loss, axis_name=axis)
        return optimizer.step(state, differentiate(state.params, batch)[1])

    if axis is not None:
        mesh = sharding.make_mesh({axis: 8})
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(axis)), out_specs=P(), check_vma=True
        )
    batch = jax.tree.map(lambda leaf: leaf.astype(dtype), batch)
    return jax.jit(step), state, batch, int(masks["w"].sum())


@pytest.mark.quick("rematerialize")
@pytest.mark.acceptance("samo", 6)
@pytest.mark.parametrize("mode", ["dense", "rematerialize"])
def test_only_kept_values_are_summed_over_devices(mode):
    step, state, batch, kept = make("float32", "data", mode)
    compiled = step.lower(state, batch).compile()
    sent = perf.bytes_by_kind(compiled)
    assert sent == {"all-reduce": 4 * (kept + BIAS)}
    largest = max(c.bytes for c in perf.collectives(compiled))
    assert largest < 4 * SHAPE[0] * SHAPE[1]
    after = step(step(state, batch), batch)
    alone, start, batch, _ = make("float32", None)
    expected = alone(alone(start, batch), batch)
    for path, leaf in core.trees.flatten(sparse_state.to_dense(after)).items():
        single = core.trees.flatten(sparse_state.to_dense(expected))[path]
        np.testing.assert_allclose(leaf, single, rtol=1e-5, atol=1e-6)


@pytest.mark.acceptance("samo", 6)
def test_gradients_of_16_bits_are_summed_as_such():
    """In the program as written: XLA for CPUs sums them in float32."""
    step, state, batch, kept = make("bfloat16", "data")
    text = step.lower(state, batch).as_text()
    reduced = [
        part.split("(")[-1].split(")")[0]
        for part in text.split('"stablehlo.all_reduce"')[1:]
        for part in [part[: part.index("->", part.index("}) :"))]]
    ]
    assert sorted(reduced) == [f"tensor<{BIAS}xbf16>", f"tensor<{kept}xbf16>"]


@pytest.mark.acceptance("samo", 7)
def test_a_step_of_a_sharded_parameter_gathers_nothing():
    """The parameter is split along its second axis, with the batch whole everywhere."""
    params, masks, batch = draw()
    mesh = sharding.make_mesh({"model": 8})
    split = {"w": P(None, "model"), "b": P("model")}
    placed = {
        name: jax.device_put(leaf, NamedSharding(mesh, split[name]))
        for name, leaf in params.items()
    }
    batch = jax.device_put(batch, NamedSharding(mesh, P()))
    optimizer = sparse_state.wrap(optax.sgd(0.1, 0.9))
    state = optimizer.init(sparse_state.compress(placed, masks))

    def step(state, batch):
        grads = sparse_state.value_and_grad(loss)(state.params, batch)[1]
        return optimizer.step(state, grads)

    compiled = jax.jit(step).lower(state, batch).compile()
    assert sum(c.bytes for c in perf.collectives(compiled)) < 4 * SHAPE[0]
    after = compiled(state, batch)
    assert after.params["w"].weights.sharding.spec == P(None, "model")
    single = optimizer.init(sparse_state.compress(params, masks))
    expected = jax.jit(step)(single, draw()[2])
    np.testing.assert_allclose(
        core.realize(after.params)["w"].astype("float32"),
        core.realize(expected.params)["w"].astype("float32"),
        rtol=0.01,
        atol=1e-6,
    )
