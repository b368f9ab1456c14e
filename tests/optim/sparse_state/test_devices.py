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


def stack():
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(8, 6, 4)), "float32"), rng.random(
        (8, 6, 4)
    ) < 0.3


def test_a_step_of_layers_that_are_shared_out_gathers_nothing():
    weights, mask = stack()
    mesh = sharding.make_mesh({"model": 8})
    placed = {"w": jax.device_put(weights, NamedSharding(mesh, P("model")))}
    made = sparse_state.compress(placed, {"w": mask}, dtype="float32", stacked=("w",))
    optimizer = sparse_state.wrap(optax.adam(0.1))
    state = optimizer.init(made)
    grads = jax.tree.map(jnp.ones_like, {"w": made.params["w"].values()})
    step = jax.jit(optimizer.step, donate_argnums=0)
    compiled = step.lower(state, grads).compile()
    assert not perf.collectives(compiled)
    after = compiled(state, grads)
    moments = after.inner[1][0].mu["w"]
    assert moments.sharding.spec[0] == "model"
    found = np.asarray(sparse_state.to_dense(after)["w"])
    np.testing.assert_allclose(found, (weights - 0.1) * mask, atol=1e-5)


@pytest.mark.parametrize("spec", [P(), P("model")], ids=str)
def test_explicit_axes_are_taken(spec):
    weights, mask = stack()
    mesh = jax.make_mesh((8,), ("model",))
    placed = {"w": jax.device_put(weights, NamedSharding(mesh, spec))}
    made = sparse_state.compress(placed, {"w": mask}, dtype="float32", stacked=("w",))
    np.testing.assert_array_equal(sparse_state.to_dense(made)["w"], weights * mask)


@pytest.mark.parametrize("bad", [False, True])
def test_a_loss_scale_leaves_all_as_it_was_or_scales_nothing(bad):
    weights, mask = stack()
    made = sparse_state.compress(
        {"w": weights}, {"w": mask}, dtype="float16", stacked=("w",)
    )
    scale = sparse_state.LossScale(start=4.0)
    scaled = sparse_state.wrap(optax.adam(0.1), loss_scale=scale)
    plain = sparse_state.wrap(optax.adam(0.1))
    grads = {"w": jnp.full_like(made.params["w"].values(), np.nan if bad else 8.0)}
    after = scaled.step(scaled.init(made), grads)
    found = sparse_state.to_dense(after)["w"]
    quarter = jax.tree.map(lambda g: g / 4, grads)
    expected = plain.init(made) if bad else plain.step(plain.init(made), quarter)
    np.testing.assert_allclose(found, sparse_state.to_dense(expected)["w"], rtol=1e-6)
    held = after.params["w"].weights
    np.testing.assert_array_equal(held, expected.params["w"].weights)
    assert float(after.scaling.scale) == (2.0 if bad else 4.0)
