import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from hpcjax import layers
from hpcjax.layers.norms import batch_statistics

EPS = np.finfo(np.float32).eps
SHAPES = st.lists(st.integers(2, 6), min_size=2, max_size=4)


def draw(shape, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(2, 3, size=shape).astype(np.float32)
    scale, bias = rng.normal(size=(2, shape[-1])).astype(np.float32)
    return x, scale, bias


def normalise(x, axes, eps):
    wide = x.astype(np.float64)
    mean = wide.mean(axes, keepdims=True)
    return (wide - mean) / np.sqrt(wide.var(axes, keepdims=True) + eps)


def close(found, expected, scale=1.0):
    np.testing.assert_allclose(found, expected, rtol=0, atol=256 * EPS * scale)


@settings(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_layer_and_rms_norm_equal_numpy(shape, seed):
    x, scale, bias = draw(shape, seed)
    eps = 1e-2
    arrays = tuple(map(jnp.asarray, (x, scale, bias)))
    expected = normalise(x, -1, eps) * scale
    close(layers.layer_norm(*arrays, eps=eps), expected + bias, 4)
    close(layers.layer_norm(*arrays[:2], eps=eps), expected, 4)
    wide = x.astype(np.float64)
    root = np.sqrt(np.square(wide).mean(-1, keepdims=True) + eps)
    close(layers.rms_norm(*arrays[:2], eps=eps), wide / root * scale, 4)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    space=st.lists(st.integers(1, 4), max_size=2),
    groups=st.integers(1, 3),
    size=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_group_norm_equals_numpy(space, groups, size, seed):
    x, scale, bias = draw((3, *space, groups * size), seed)
    eps = 1e-2
    expected = np.empty(x.shape)
    for n in range(3):
        for g in range(groups):
            part = slice(g * size, (g + 1) * size)
            expected[n, ..., part] = normalise(x[n, ..., part], None, eps)
    found = layers.group_norm(
        *map(jnp.asarray, (x, scale, bias)), groups=groups, eps=eps
    )
    close(found, expected * scale + bias, 4)


def test_groups_must_divide_channels():
    with pytest.raises(ValueError, match="groups=3, channels=4"):
        layers.group_norm(jnp.ones((1, 4)), jnp.ones(4), jnp.ones(4), groups=3)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_batch_norm_equals_numpy(shape, seed):
    x, scale, bias = draw(shape, seed)
    channels, axes = shape[-1], tuple(range(len(shape) - 1))
    old = layers.RunningStatistics(jnp.full(channels, 0.5), jnp.full(channels, 2.0))
    norm = functools.partial(
        layers.batch_norm, *map(jnp.asarray, (x, scale, bias)), old, eps=1e-2
    )
    y, new = norm(train=True, momentum=0.75)
    close(y, normalise(x, axes, 1e-2) * scale + bias, 4)
    wide = x.astype(np.float64)
    close(new.mean, 0.75 * 0.5 + 0.25 * wide.mean(axes), 8)
    close(new.variance, 0.75 * 2.0 + 0.25 * wide.var(axes), 32)
    y, same = norm(train=False)
    close(y, (wide - 0.5) / np.sqrt(2.01) * scale + bias, 8)
    assert same is old


def test_large_means_do_not_swallow_the_variance():
    x = jnp.array([[4096.0], [4097.0]])
    assert batch_statistics(x).variance[0] == 0.25


def test_batch_statistics_over_a_mesh_axis_are_those_of_the_whole_batch():
    x, scale, bias = map(jnp.asarray, draw((16, 3, 2), 0))
    running = layers.RunningStatistics(jnp.zeros(2), jnp.ones(2))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(x, scale, bias, axis_name):
        y, new = layers.batch_norm(
            x, scale, bias, running, train=True, axis_name=axis_name
        )
        return y, new, jnp.sum(jnp.sin(y))

    def on_devices(x, scale, bias):
        y, new, total = loss(x, scale, bias, "data")
        return y, new, jax.lax.psum(total, "data")

    split, same = PartitionSpec("data"), PartitionSpec()
    mapped = jax.shard_map(
        on_devices,
        mesh=mesh,
        in_specs=(split, same, same),
        out_specs=(split, same, same),
    )
    expected = loss(x, scale, bias, None)
    jax.tree.map(
        lambda a, b: close(a, b, 16), jax.jit(mapped)(x, scale, bias), expected
    )
    grads = jax.grad(lambda *a: jax.jit(mapped)(*a)[2], argnums=(0, 1, 2))(
        x, scale, bias
    )
    single = jax.grad(lambda *a: loss(*a, None)[2], argnums=(0, 1, 2))(x, scale, bias)
    jax.tree.map(lambda a, b: close(a, b, 16), grads, single)


@pytest.mark.parametrize("kind", ["layer", "rms", "group", "batch"])
def test_low_precision_inputs_are_normalised_in_float32(kind):
    x = jnp.array([[256.0, 257.0, 258.0, 260.0]] * 2, jnp.bfloat16) * jnp.array(
        [[1], [2]], jnp.bfloat16
    )
    ones, zeros = jnp.ones(4), jnp.zeros(4)
    running = layers.RunningStatistics(zeros, ones)
    compute = {
        "layer": lambda x: layers.layer_norm(x, ones, zeros),
        "rms": lambda x: layers.rms_norm(x, ones),
        "group": lambda x: layers.group_norm(x, ones, zeros, groups=2),
        "batch": lambda x: layers.batch_norm(x, ones, zeros, running, train=True)[0],
    }[kind]
    low, high = compute(x), compute(x.astype(jnp.float32))
    assert low.dtype == jnp.bfloat16
    assert (low == high.astype(jnp.bfloat16)).all()
    with jax.enable_x64(True):  # of which float32 would keep nothing
        small = jnp.array([[0.0, 1.0, 2.0, 4.0], [7.0, 5.0, 6.0, 3.0]])
        wide = compute(small + 1e9)
        assert wide.dtype == jnp.float64
        if kind != "rms":  # of numbers, not of their distances
            np.testing.assert_allclose(wide, compute(small), rtol=0, atol=1e-6)
