import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import layers
from hpcjax.layers import _conv

EPS = np.finfo(np.float32).eps


def pads(padding, size, kernel, stride):
    """Zeros before and after one image axis."""
    if padding == "VALID":
        return 0, 0
    if padding == "SAME":
        out = -(-size // stride)
        total = max((out - 1) * stride + kernel - size, 0)
        return total // 2, total - total // 2
    return padding


def oracle(x, kernel, bias, strides, padding):
    """Convolution by five loops in float64."""
    n, height, width, _ = x.shape
    rows, columns, _, outputs = kernel.shape
    explicit = (padding, padding) if isinstance(padding, str) else padding
    vertical = pads(explicit[0], height, rows, strides[0])
    horizontal = pads(explicit[1], width, columns, strides[1])
    padded = np.pad(x.astype(np.float64), ((0, 0), vertical, horizontal, (0, 0)))
    out_h = (padded.shape[1] - rows) // strides[0] + 1
    out_w = (padded.shape[2] - columns) // strides[1] + 1
    y = np.zeros((n, out_h, out_w, outputs))
    for b in range(n):
        for i in range(out_h):
            for j in range(out_w):
                top, left = i * strides[0], j * strides[1]
                window = padded[b, top : top + rows, left : left + columns]
                for o in range(outputs):
                    y[b, i, j, o] = (window * kernel[..., o]).sum() + bias[o]
    return y


@settings(max_examples=8, deadline=None)
@given(
    size=st.tuples(st.integers(3, 6), st.integers(3, 6)),
    kernel_size=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.sampled_from(["SAME", "VALID", ((1, 1), (0, 2))]),
    seed=st.integers(0, 99),
)
def test_conv_equals_its_definition(
    size, kernel_size, channels, strides, padding, seed
):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, *size, channels[0])).astype(np.float32)
    kernel = rng.normal(size=(*kernel_size, *channels)).astype(np.float32)
    bias = rng.normal(size=channels[1]).astype(np.float32)
    expected = oracle(x, kernel, bias, strides, padding)
    found = layers.conv(
        *map(jnp.asarray, (x, kernel, bias)), strides=strides, padding=padding
    )
    terms = np.prod(kernel.shape[:3])
    scale = np.abs(x).max() * np.abs(kernel).max() + np.abs(bias).max()
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=8 * EPS * np.sqrt(terms) * scale
    )


def test_low_precision_products_accumulate_in_float32_and_differentiate():
    # 4096 ones: a bfloat16 sum would stop at 256.
    x = jnp.ones((1, 64, 64, 1))
    kernel = jnp.ones((64, 64, 1, 1))

    def total(x, kernel):
        y = layers.conv(
            x, kernel, padding="VALID", compute="bfloat16", output="float32"
        )
        return jnp.sum(y)

    assert total(x, kernel) == 4096
    grads = jax.grad(total, argnums=(0, 1))(x, kernel)
    assert {g.dtype for g in grads} == {jnp.dtype("float32")}
    assert all((g == 1).all() for g in grads)


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        ("SAM", "did you mean 'SAME'"),
        (((1, 1),), "2 pairs"),
        (((-1, 0), (0, 0)), "non-negative"),
    ],
)
def test_unknown_padding_is_refused(padding, message):
    with pytest.raises(ValueError, match=message):
        layers.conv(jnp.ones((1, 3, 3, 1)), jnp.ones((1, 1, 1, 1)), padding=padding)


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 3))])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_patches_times_the_kernel_are_the_convolution(padding, stride, dilation):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 7, 6, 3)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(3, 2, 3, 4)), jnp.float32)
    geometry = {"strides": (stride, 2), "padding": padding, "dilation": (dilation, 1)}
    patches = layers.patches(x, (3, 2), **geometry)
    y = jnp.matmul(patches, kernel.reshape(-1, 4), precision="highest")
    expected = layers.conv(x, kernel, **geometry)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a form for XLA:CPU alone")
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_gradients_within_control_flow_have_the_form_that_is_fast_on_cpus(compute):
    """In any other form a convolution within a `cond` took 30 times as long."""
    x, kernel = jnp.ones((2, 6, 6, 3)), jnp.ones((3, 3, 3, 4))

    def gradients(x, kernel):
        def loss(x, kernel):
            y = layers.conv(x, kernel, strides=(2, 2), compute=compute)
            return jnp.sum(y.astype("float32") ** 2)

        return jax.grad(loss, (0, 1))(x, kernel)

    def chosen(use, x, kernel):
        return jax.lax.cond(use, gradients, lambda *same: same, x, kernel)

    lowered = jax.jit(chosen).lower(True, x, kernel).as_text()
    forms = re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", lowered)
    assert forms == 3 * ["[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"]


def test_derivatives_in_all_modes_agree():
    keys = jax.random.split(jax.random.key(0), 4)
    x, dx = jax.random.normal(keys[0], (2, 2, 5, 4, 3))
    kernel, dk = jax.random.normal(keys[1], (2, 2, 3, 3, 4))

    def run(x, kernel):
        return layers.conv(x, kernel, strides=(2, 1), dilation=(1, 2))

    _, forward = jax.jvp(run, (x, kernel), (dx, dk))
    bilinear = run(dx, kernel) + run(x, dk)
    np.testing.assert_allclose(forward, bilinear, rtol=1e-5, atol=1e-5)
    y, pull = jax.vjp(run, x, kernel)
    gx, gk = pull(y)
    # <y, J v> = <Jᵀ y, v>
    wanted = jnp.vdot(y, forward)
    np.testing.assert_allclose(jnp.vdot(gx, dx) + jnp.vdot(gk, dk), wanted, rtol=1e-4)

    def gradient(x, kernel):
        return jax.grad(lambda *at: jnp.sum(run(*at) ** 2), (0, 1))(x, kernel)

    def slope(x, kernel):
        return sum(
            jnp.vdot(g, d) for g, d in zip(gradient(x, kernel), (dx, dk), strict=True)
        )

    # The Hessian's product with a vector, forward over reverse and reverse twice.
    twice = jax.grad(slope, (0, 1))(x, kernel)
    mixed = jax.jvp(gradient, (x, kernel), (dx, dk))[1]
    for one, other in zip(twice, mixed, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_volumes_by_slices_are_the_convolution(monkeypatch):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 7, 6, 5, 2)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(3, 2, 3, 2, 4)), jnp.float32)
    options = {"strides": (1, 2, 1), "padding": "SAME", "dilation": (1, 1, 2)}

    def run(x, kernel):
        y = layers.conv(x, kernel, **options)
        return jnp.sum(jnp.sin(y)), y

    def both():
        return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True)).lower(x, kernel)

    plain = both()
    monkeypatch.setattr(_conv, "_LEAST_PRODUCTS", 1)
    sliced = both()
    assert "stablehlo.convolution" in plain.as_text()
    assert "stablehlo.convolution" not in sliced.as_text()
    for one, other in zip(
        *(jax.tree.leaves(each.compile()(x, kernel)) for each in (sliced, plain)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("sides", "inputs", "dtype", "chosen"),
    [
        ((16, 16, 16), 1, "float32", True),
        ((16, 16, 16), 16, "float32", False),
        ((16, 16, 16), 1, "bfloat16", False),
        ((8, 8, 8), 1, "float32", False),
        ((128, 128, 128), 4, "float32", False),
        ((64, 64), 1, "float32", False),
    ],
)
def test_slices_are_for_large_volumes_with_few_inputs(sides, inputs, dtype, chosen):
    # The product's dtype counts, not that of x before the cast.
    x = jax.ShapeDtypeStruct((16, *sides, inputs), "float32")
    kernel = jax.ShapeDtypeStruct((*[3] * len(sides), inputs, 16), "float32")
    own = _conv._slices_pay(x, kernel, (1,) * len(sides), dtype)
    assert own == (chosen and jax.default_backend() == "cpu")


def test_windows_larger_than_the_volume_have_no_outputs_by_slices_either():
    x, kernel = jnp.ones((2, 1, 6, 3, 1)), jnp.ones((4, 3, 3, 1, 2))
    y = _conv._by_slices((1, 2, 1), "VALID", (1, 1, 2))(x, kernel, None)
    assert y.shape == (2, 0, 2, 0, 2)


def test_volumes_of_any_batch_export():
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 16, 16, 16, 1), "float32")
    run = jax.jit(lambda x: layers.conv(x, jnp.ones((3, 3, 3, 1, 16))))
    (y,) = jax.export.export(run)(x).out_avals
    assert y.shape[1:] == (16, 16, 16, 16)
