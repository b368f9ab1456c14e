import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import layers

EPS = np.finfo(np.float32).eps


def oracle(query, key, value, causal, mask):
    """Attention by loops over batch, head and query, float64."""
    batch, q_time, heads, head_dim = query.shape
    k_time, kv_heads = key.shape[1:3]
    y = np.zeros(query.shape)
    for b, h, t in itertools.product(range(batch), range(heads), range(q_time)):
        kv = h * kv_heads // heads
        seen = [
            s
            for s in range(k_time)
            if (not causal or s <= k_time - q_time + t)
            and (mask is None or mask[b, t, s])
        ]
        seen = seen or range(k_time)
        scores = np.array([query[b, t, h] @ key[b, s, kv] for s in seen])
        weights = np.exp((scores - scores.max()) / np.sqrt(head_dim))
        weights /= weights.sum()
        y[b, t, h] = sum(
            w * value[b, s, kv] for w, s in zip(weights, seen, strict=True)
        )
    return y


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    times=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    causal=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_attention_equals_its_definition(
    times, kv_heads, group, head_dim, causal, masked, seed
):
    rng = np.random.default_rng(seed)
    q_time, k_time = times[0], sum(times)
    shape = (2, k_time, kv_heads, head_dim)
    query = rng.normal(size=(2, q_time, group * kv_heads, head_dim))
    key, value = rng.normal(size=(2, *shape))
    mask = rng.random((2, q_time, k_time)) < 0.7 if masked else None
    if mask is not None:
        mask[:, :, 0] = True
    found = layers.attention(
        *(jnp.asarray(a, jnp.float32) for a in (query, key, value)),
        causal=causal,
        mask=None if mask is None else jnp.asarray(mask),
    )
    expected = oracle(query, key, value, causal, mask)
    scale = np.abs(value).max() * (1 + np.abs(query).max() * np.abs(key).max())
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=16 * EPS * np.sqrt(k_time + head_dim) * scale
    )


def test_slopes_are_a_bias_of_the_distance():
    """Against JAX's own attention with a bias, fewer queries than keys."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(2, 7, heads, 4)), jnp.float32)
        for heads in (6, 3, 3)
    )
    slopes = layers.alibi_slopes(6)
    assert slopes.tolist() == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    places = jnp.arange(7)
    bias = slopes[:, None, None] * (places - places[:, None])
    expected = jax.nn.dot_product_attention(
        query, key, value, bias[None], is_causal=True
    )
    found = layers.attention(query[:, 3:], key, value, slopes=slopes)
    np.testing.assert_allclose(found, expected[:, 3:], rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="causal=False"):
        layers.attention(query, key, value, slopes=slopes, causal=False)


def test_a_query_that_may_look_nowhere_gets_the_mean():
    rng = np.random.default_rng(0)
    value = jnp.asarray(rng.normal(size=(1, 3, 1, 2)), jnp.float32)
    mask = jnp.zeros((1, 3, 3), bool)
    y = layers.attention(value, value, value, causal=False, mask=mask)
    np.testing.assert_allclose(y[0, 0, 0], value.mean(1)[0, 0], rtol=16 * EPS)


def test_gradients_towards_the_future_are_exactly_zero():
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.normal(size=(1, 5, 2, 4)), jnp.float32) for _ in range(3)
    )

    def outputs(key, value):
        return layers.attention(query, key, value).sum((0, 2, 3))

    for jacobian in jax.jacrev(outputs, argnums=(0, 1))(key, value):
        per_pair = jnp.abs(jacobian[:, 0]).sum((2, 3))
        assert (per_pair[np.triu_indices(5, 1)] == 0).all()
        assert (per_pair[np.tril_indices(5, -1)] > 0).all()


def test_low_precision_gradients_multiply_low_precision_operands():
    x = jnp.ones((1, 3, 2, 4), jnp.bfloat16)
    grad = jax.grad(lambda x: layers.attention(x, x, x).astype("float32").sum())
    jaxpr = jax.make_jaxpr(grad)(x)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}


def test_kv_heads_must_divide_heads():
    with pytest.raises(ValueError, match="kv_heads=2, heads=3"):
        layers.attention(
            jnp.ones((1, 1, 3, 2)), jnp.ones((1, 1, 2, 2)), jnp.ones((1, 1, 2, 2))
        )


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    half=st.integers(1, 4), time=st.integers(1, 5), theta=st.sampled_from([1e4, 10.0])
)
def test_rope_is_a_complex_rotation(half, time, theta):
    rng = np.random.default_rng(half)
    x = rng.normal(size=(2, time, 3, 2 * half)).astype(np.float32)
    positions = rng.integers(0, 50, (2, time))
    z = x[..., :half] + 1j * x[..., half:].astype(np.float64)
    angle = positions[:, :, None, None] * theta ** (-np.arange(half) / half)
    z = z * np.exp(1j * angle)
    found = layers.rope(jnp.asarray(x), jnp.asarray(positions), theta=theta)
    # The angle is at most 50 radians, rounded to float32.
    np.testing.assert_allclose(
        found, np.concatenate([z.real, z.imag], -1), rtol=0, atol=50 * 8 * EPS * 4
    )


def test_rotated_products_depend_on_the_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def product(i, j):
        at = [jnp.array([[p]]) for p in (i, j)]
        return jnp.sum(layers.rope(q, at[0]) * layers.rope(k, at[1]))

    np.testing.assert_allclose(product(7, 3), product(24, 20), rtol=1e-4)
    assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_rope_needs_an_even_head():
    with pytest.raises(ValueError, match="head_dim=3"):
        layers.rope(jnp.ones((1, 1, 1, 3)), jnp.zeros((1, 1), jnp.int32))
