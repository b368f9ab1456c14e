import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import layers

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
        (((1, 1),), "two pairs"),
        (((-1, 0), (0, 0)), "non-negative"),
    ],
)
def test_unknown_padding_is_refused(padding, message):
    with pytest.raises(ValueError, match=message):
        layers.conv(jnp.ones((1, 3, 3, 1)), jnp.ones((1, 1, 1, 1)), padding=padding)
