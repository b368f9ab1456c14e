import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, models
from hpcjax.core import trees
from tests.models import helpers
from tests.models.registry import REGISTRY


def convolve(x, kernel, stride):
    """Convolution with half a kernel of zeros around the image, float64."""
    size, half = kernel.shape[0], kernel.shape[0] // 2
    padded = np.pad(x, ((0, 0), (half, half), (half, half), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))
    return np.einsum("nhwcuv,uvco->nhwo", windows[:, ::stride, ::stride], kernel)


def normalise(x, params, state):
    """Running statistics where there are any, else groups of at most 16 channels."""
    if state is not None:
        y = (x - state["mean"]) / np.sqrt(state["variance"] + 1e-5)
    else:
        size = np.gcd(x.shape[-1], 16)
        groups = x.reshape(x.shape[0], -1, x.shape[-1] // size, size)
        mean, var = (f(groups, (1, 3), keepdims=True) for f in (np.mean, np.var))
        y = ((groups - mean) / np.sqrt(var + 1e-5)).reshape(x.shape)
    return y * params["scale"] + params["bias"]


def block(x, params, state, stride):
    """One residual block; strides are in the first 3×3 convolution."""
    names = sorted(name for name in params if name.startswith("conv"))
    strided = next(n for n in names if params[n]["kernel"].shape[0] == 3)
    y = x
    for name in names:
        y = convolve(y, params[name]["kernel"], stride if name == strided else 1)
        norm = name.replace("conv", "norm")
        y = normalise(y, params[norm], state.get(norm))
        y = y if name == names[-1] else np.maximum(y, 0)
    if "shortcut" in params:
        x = convolve(x, params["shortcut"]["kernel"], stride)
        x = normalise(x, params["shortcut_norm"], state.get("shortcut_norm"))
    elif x.shape != y.shape:
        zeros = np.zeros((*y.shape[:3], y.shape[3] - x.shape[3]))
        x = np.concatenate([x[:, ::stride, ::stride], zeros], -1)
    return np.maximum(x + y, 0)


def forward(params, state, x):
    """The whole network in evaluation mode, in numpy."""
    stem = params["conv_in"]["kernel"]
    full_size = stem.shape[0] == 7
    x = convolve(x, stem, 2 if full_size else 1)
    x = np.maximum(normalise(x, params["norm_in"], state.get("norm_in")), 0)
    if full_size:
        edge = ((0, 0), (1, 1), (1, 1), (0, 0))
        padded = np.pad(x, edge, constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
        x = windows[:, ::2, ::2].max((-1, -2))
    for stage in range(sum(name.startswith("stage") for name in params)):
        blocks = params[f"stage_{stage}"]
        for index in range(len(blocks)):
            stride = 2 if stage and not index else 1
            name = f"block_{index}"
            there = state.get(f"stage_{stage}", {}).get(name, {})
            x = block(x, blocks[name], there, stride)
    return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("name", ["resnet8", "resnet8_group", "resnet18", "resnet50"])
def test_evaluation_equals_numpy(name):
    model, params, state, x, _ = helpers.instance(name)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, state, x))
    expected = forward(*wide)
    found, _ = jax.jit(model.apply, static_argnames="train")(
        params, state, x, train=False
    )
    # 50 layers, each within a few ulp of its largest value.
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=2e-5 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("depth", "inputs", "outputs", "count"),
    [
        # Counted by hand from He et al. 2016: option A, batch norm, no conv biases.
        (20, (32, 32, 3), 10, 269_722),
        (32, (32, 32, 3), 10, 464_154),
        # The counts that every public full-size implementation reports.
        (18, (224, 224, 3), 1000, 11_689_512),
        (50, (224, 224, 3), 1000, 25_557_032),
        (101, (224, 224, 3), 1000, 44_549_160),
    ],
)
def test_full_size_parameter_counts(depth, inputs, outputs, count):
    model = models.ResNetConfig(depth=depth).make(inputs, outputs)
    batch = jax.ShapeDtypeStruct((2, *inputs), "float32")
    found = models.describe(model, batch)
    assert found.num_params == count
    assert found.outputs.shape == (2, outputs)


def test_zero_initialised_residuals_make_blocks_the_identity():
    model = models.resnet((8, 8, 1), 3, width=2, zero_init_residual=True)
    params, state = model.init(jax.random.key(0))
    taps = {
        "stage_0/block_0/conv1": core.Tap(forward=lambda x, y: x),
        "stage_1/block_0/conv1": core.Tap(forward=lambda x, y: x),
    }
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), jnp.float32)

    @jax.jit
    def records(params, state):
        return model.apply(params, state, x, train=True, taps=taps)[1][core.SEEN]

    seen = records(params, state)
    first, second = seen.values()
    np.testing.assert_array_equal(first, second)


def test_zero_head_starts_at_the_uniform_distribution():
    model = models.resnet((8, 8, 1), 3, width=2, head_init="zeros")
    params, state = model.init(jax.random.key(0))
    y, _ = model.apply(params, state, jnp.ones((2, 8, 8, 1)), train=True)
    assert (y == 0).all()


@pytest.mark.parametrize("name", ["resnet8", "vgg11"])
def test_batch_statistics_over_devices_are_those_of_the_whole_batch(name):
    entry = REGISTRY[name]
    x, _ = helpers.batch_of(entry, 8)
    config = dataclasses.replace(entry.config, sync_axis="data")
    plain, synced = (c.make(entry.inputs, 3) for c in (entry.config, config))
    params, state = plain.init(jax.random.key(0))
    expected = plain.apply(params, state, x, train=True)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, same = (jax.sharding.PartitionSpec(*axes) for axes in (("data",), ()))
    mapped = jax.shard_map(
        lambda p, s, x: synced.apply(p, s, x, train=True),
        mesh=mesh,
        in_specs=(same, same, split),
        out_specs=(split, same),
    )
    found = jax.jit(mapped)(params, state, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * (1 + np.abs(b).max()))


def test_group_norm_has_no_state():
    model = models.resnet((8, 8, 1), 3, width=2, norm="group")
    assert trees.flatten(model.init(jax.random.key(0))[1]) == {}
