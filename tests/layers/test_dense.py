import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import kernels, layers

EPS = np.finfo(np.float32).eps


@settings(max_examples=8, deadline=None)
@given(
    batch=st.lists(st.integers(1, 4), max_size=3),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dense_equals_numpy(batch, inputs, outputs, with_bias, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(*batch, inputs)).astype(np.float32)
    kernel = rng.normal(size=(inputs, outputs)).astype(np.float32)
    bias = rng.normal(size=outputs).astype(np.float32) if with_bias else None
    expected = x.astype(np.float64) @ kernel + (0 if bias is None else bias)
    given_bias = None if bias is None else jnp.asarray(bias)
    found = layers.dense(jnp.asarray(x), jnp.asarray(kernel), given_bias)
    scale = 1 + np.abs(x).max() * np.abs(kernel).max()
    atol = 8 * EPS * np.sqrt(inputs) * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


def test_low_precision_accumulates_in_float32():
    ones = jnp.ones((1, 4096)), jnp.ones((4096, 1))
    y = layers.dense(*ones, jnp.ones(1), compute="bfloat16", output="float32")
    assert y.dtype == jnp.float32
    assert y[0, 0] == 4097
    assert layers.dense(*ones, compute="bfloat16").dtype == jnp.bfloat16


def test_low_precision_gradient_multiplies_low_precision_operands():
    def loss(x, kernel):
        return jnp.sum(layers.dense(x, kernel, compute="bfloat16", output="float32"))

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
        jnp.ones((3, 4)), jnp.ones((4, 5))
    )
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    operands = {v.aval.dtype for e in products for v in e.invars}
    assert len(products) >= 2
    assert operands == {jnp.dtype("bfloat16")}


def test_float32_has_forward_mode_derivatives():
    x, kernel = jnp.ones((1, 2)), jnp.ones((2, 2))
    _, tangent = jax.jvp(lambda k: layers.dense(x, k), (kernel,), (kernel,))
    assert (tangent == 2).all()


def test_a_quantized_kernel_stands_for_its_weights():
    rng = np.random.default_rng(0)
    q = rng.integers(0, 8, (64, 5)).astype(np.uint8)
    scale = rng.uniform(0.5, 1, (2, 5)).astype(np.float16)
    zero = np.full((2, 5), 3, np.float16)
    matrix = kernels.quantized_matrix(*map(jnp.asarray, (q, scale, zero)), bits=3)
    weights = np.repeat(scale.astype(float), 32, axis=0) * (q - 3.0)
    x, bias = rng.standard_normal((2, 3, 64)), rng.standard_normal(5)
    given = jnp.asarray(x, jnp.float32), matrix, jnp.asarray(bias, jnp.float32)
    found = layers.dense(*given)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, x @ weights + bias, rtol=0, atol=1e-4)
    found = layers.dense(*given, compute="bfloat16")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(found, float), x @ weights + bias, rtol=0, atol=0.5
    )
