"""GPTQ on whole networks: convolutions against OBQ on patches made by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hpcjax import compress, core, models
from hpcjax.compress import GptqOptions, GridSpec
from hpcjax.core import ConfigError, trees
from tests.models.helpers import instance
from tests.oracles import obq

FLOAT32 = core.Policy()


class OneConv(nnx.Module):
    """A convolution and nothing else."""

    def __init__(self, **geometry):
        self.conv = models.Conv(3, 5, policy=FLOAT32, **geometry)

    def __call__(self, x, *, train, key):
        del train, key
        return self.conv(x)


def rows_of(images, options):
    """Patches of every output position, channel by channel, by loops."""
    (height, width), dilation = options["kernel_size"], options["dilation"]
    pads, strides = options["padding"], options["strides"]
    if isinstance(pads, str):
        assert pads == "VALID"
        pads = ((0, 0), (0, 0))
    padded = np.pad(images.astype(np.float64), ((0, 0), *pads, (0, 0)))
    reach = [(n - 1) * d for n, d in zip((height, width), dilation, strict=True)]
    rows = []
    for image in padded:
        for top in range(0, image.shape[0] - reach[0], strides[0]):
            for left in range(0, image.shape[1] - reach[1], strides[1]):
                patch = [
                    image[top + u * dilation[0], left + v * dilation[1], channel]
                    for channel in range(image.shape[2])
                    for u in range(height)
                    for v in range(width)
                ]
                rows.append(patch)
    return np.array(rows)


def matrix_of(kernel):
    """[inputs · height · width, outputs], as PyTorch flattens a kernel."""
    kernel = np.asarray(kernel, np.float64)
    return kernel.transpose(2, 0, 1, 3).reshape(-1, kernel.shape[-1])


@pytest.mark.quick("True-geometry3", "True-geometry1", "False-geometry3")
@pytest.mark.parametrize(
    "geometry",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "stride": 2},
        {"kernel_size": 2, "stride": 2, "padding": ((0, 1), (2, 0))},
        {"kernel_size": 3, "padding": "VALID", "dilation": 2},
        {"kernel_size": 1, "stride": 2, "padding": "VALID"},
    ],
)
@pytest.mark.parametrize("act_order", [False, True])
def test_a_convolution_is_obq_on_its_patches(geometry, act_order):
    model = models.from_nnx(lambda: OneConv(**geometry))
    params, state = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    images = rng.normal(size=(6, 7, 8, 3)).astype(np.float32)
    # Neighbours and channels are alike, or there would be nothing to compensate.
    images = images.cumsum(axis=1).cumsum(axis=3)
    spec, options = GridSpec(bits=3), GptqOptions(act_order=act_order)
    made = compress.quantize_network(
        model, params, state, jnp.asarray(images), ["conv"], spec, options, batch=4
    )
    rows = rows_of(images, model.layers[0].options)
    hessian = 2 / len(images) * rows.T @ rows
    kernel = matrix_of(params["conv"]["kernel"])
    order = np.argsort(-np.diag(hessian), kind="stable") if act_order else None
    found = matrix_of(made.params["conv"]["kernel"])
    _, expected, _ = obq.obq(kernel, hessian, 3, order=order, taken=found)
    np.testing.assert_array_equal(made.matrices["conv"].dequantize(), found)
    # In float32 a near tie may fall the other way.
    assert np.isclose(found, expected, rtol=1e-4, atol=1e-6).mean() > 0.98
    (report,) = made.reports
    off, rounded = kernel - found, kernel - obq.nearest(kernel, obq.fit(kernel, 3))[1]
    for loss, error in ((report.loss, off), (report.rounded, rounded)):
        np.testing.assert_allclose(loss, np.trace(error.T @ hessian @ error), rtol=2e-3)
    assert report.loss < report.rounded


@pytest.mark.slow
def test_the_layers_of_a_resnet_lose_less_than_by_rounding():
    model, params, state, *_ = instance("resnet8_group")
    rng = np.random.default_rng(1)
    images = jnp.asarray(rng.normal(size=(16, 8, 8, 3)).cumsum(1), jnp.float32)
    # A strided 3x3 convolution, the 1x1 beside it, and the dense layer at the end.
    paths = ["conv_in", "stage_1/block_0/conv1", "stage_1/block_0/shortcut", "head"]
    told = []
    made = compress.quantize_network(
        model,
        params,
        state,
        images,
        paths,
        GridSpec(bits=3),
        report=told.append,
    )
    assert tuple(told) == made.reports
    assert [report.path for report in told] == paths == list(made.matrices)
    for report in told:
        assert report.loss < report.rounded, report
    before, after = trees.flatten(params), trees.flatten(made.params)
    changed = {path for path in before if (before[path] != after[path]).any()}
    assert changed == {f"{path}/kernel" for path in paths}
    # A layer sees what the quantized ones before it give.
    half = compress.quantize_network(
        model, params, state, images, paths[:1], GridSpec(bits=3)
    )
    again = compress.quantize_network(
        model, half.params, state, images, paths[1:], GridSpec(bits=3)
    )
    for path, leaf in trees.flatten(again.params).items():
        np.testing.assert_array_equal(leaf, after[path], err_msg=path)


def test_what_cannot_be_quantized_is_refused_before_any_work():
    model, params, state, *_ = instance("resnet8")
    images = jnp.ones((2, 8, 8, 1))

    def refused(error, words, *, changed=params, paths=("conv_in",), **options):
        given = {"spec": GridSpec(bits=4), "inputs": images} | options
        inputs, spec = given.pop("inputs"), given.pop("spec")
        with pytest.raises(error, match=words):
            compress.quantize_network(
                model, changed, state, inputs, paths, spec, **given
            )

    refused(ValueError, "did you mean 'conv_in'", paths=["conv_im"])
    refused(ConfigError, "each named once", paths=["conv_in", "conv_in"])
    refused(ConfigError, "each named once", paths=[])
    refused(ConfigError, "group_size=4, inputs=9", spec=GridSpec(group_size=4))
    refused(ConfigError, "ternary", spec=GridSpec(ternary=True))
    refused(ConfigError, "0 examples, batch=32", inputs=images[:0])
    kernel = params["conv_in"]["kernel"]
    endless = params | {"conv_in": {"kernel": kernel * jnp.inf}}
    refused(ConfigError, "conv_in: the kernel is not finite", changed=endless)
    found = instance("gpt2")
    with pytest.raises(ConfigError, match="quantize_blocks: got depth=2"):
        compress.quantize_network(
            found.model, found.params, {}, found.x, ["blocks/mlp/up"], GridSpec()
        )
