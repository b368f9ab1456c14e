"""Attention to a sparse pattern: dense attention, numpy, and the bound of rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import kernels, layers
from hpcjax.core import ConfigError
from hpcjax.kernels._triton.launch import find_problem

needs_triton = pytest.mark.skipif(
    find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)
TIME, DIM = 16, 8


@pytest.fixture(scope="module")
def heads():
    """Queries, keys and values of two requests with two heads."""
    drawn = np.random.default_rng(0).normal(size=(3, 2, TIME, 2, DIM))
    return [jnp.asarray(each, jnp.float32) for each in drawn]


def by_hand(q, k, v, mask):
    """Softmax over the keys of a mask, in float64; rows without any are zero."""
    q, k, v = (np.asarray(each, np.float64) for each in (q, k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(DIM)
    weights = np.exp(scores) * mask
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    return weights, np.einsum("bhts,bshd->bthd", weights, v)


def random_mask():
    mask = np.random.default_rng(1).random((TIME // 4, TIME)) < 0.4
    mask[0] = False
    return mask, np.repeat(mask, 4, axis=0)


def pattern_of(mask):
    return kernels.sr_bcrs(np.ones((TIME, TIME)), vector=4, mask=mask)


@pytest.mark.quick("interpreted")
@pytest.mark.acceptance("magicube", 7)
@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("interpreted", marks=needs_triton)]
)
def test_with_all_keys_it_is_dense_attention(heads, implementation):
    pattern = pattern_of(np.ones((TIME // 4, TIME), bool))
    y = layers.sparse_attention(*heads, pattern, implementation=implementation)
    dense = jax.nn.dot_product_attention(*heads)
    np.testing.assert_allclose(y, dense, rtol=0, atol=1e-5)


def test_a_query_sees_the_keys_of_its_pattern_alone(heads):
    mask, whole = random_mask()
    y = layers.sparse_attention(*heads, pattern_of(mask))
    _, expected = by_hand(*heads, whole)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    assert not np.any(y[:, :4])


def test_a_causal_query_sees_no_key_behind_itself(heads):
    pattern = layers.random_pattern(TIME, zeros=0.5, vector=4, causal=True)
    mask = np.tril(np.asarray(pattern.to_dense(), bool))
    y = layers.sparse_attention(*heads, pattern, causal=True)
    _, expected = by_hand(*heads, mask)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    assert np.all(np.diagonal(mask))


def test_a_random_pattern_has_as_many_keys_as_its_share_says():
    whole = layers.random_pattern(32, zeros=0.75, vector=8).to_dense()
    np.testing.assert_array_equal(np.asarray(whole).sum(axis=1), 8)
    causal = layers.random_pattern(32, zeros=0.75, vector=8, causal=True).to_dense()
    # A quarter of 0, 8, 16 and 24 earlier keys, and eight of its own.
    np.testing.assert_array_equal(np.asarray(causal)[::8].sum(axis=1), [8, 10, 12, 14])
    other = layers.random_pattern(32, zeros=0.75, vector=8, seed=1).to_dense()
    assert np.any(whole != other)


def test_a_query_whose_keys_are_all_behind_it_gets_zeros_and_a_gradient(heads):
    mask = np.zeros((TIME // 4, TIME), bool)
    mask[:, 2] = True

    def total(value):
        query, key, _ = heads
        y = layers.sparse_attention(query, key, value, pattern_of(mask), causal=True)
        return jnp.sum(y), y

    slope, y = jax.grad(total, has_aux=True)(heads[2])
    assert not np.any(y[:, :2])
    np.testing.assert_allclose(slope[:, 2], TIME - 2, rtol=1e-5)


def test_integers_refuse_gradients(heads):
    pattern = pattern_of(np.ones((TIME // 4, TIME), bool))
    bits = layers.AttentionBits(8, 8)
    attend = functools.partial(layers.sparse_attention, pattern=pattern, bits=bits)
    total = jax.jit(jax.grad(lambda value: jnp.sum(attend(*heads[:2], value))))
    with pytest.raises(ConfigError, match="train in floats"):
        total(heads[2])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"time": 12}, "multiple of `vector` queries: got time=12, vector=8"),
        ({"zeros": 1.0}, r"zeros must be in \[0, 1\): got zeros=1.0"),
    ],
)
def test_patterns_that_cannot_be_drawn_are_refused(given, message):
    sizes = {"time": 16, "zeros": 0.5} | given
    with pytest.raises(ConfigError, match=message):
        layers.random_pattern(**sizes)


@pytest.mark.slow
def test_its_gradient_is_that_of_masked_attention(heads):
    mask, whole = random_mask()
    mask[0, 3] = whole[:4, 3] = True
    weight = jnp.arange(float(TIME * 2 * DIM)).reshape(TIME, 2, DIM) / 100

    def loss(attend, *heads):
        return jnp.sum(attend(*heads) * weight)

    sparse = functools.partial(layers.sparse_attention, pattern=pattern_of(mask))
    dense = functools.partial(jax.nn.dot_product_attention, mask=whole[None, None])
    found, expected = (
        jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2))(*heads)
        for attend in (sparse, dense)
    )
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


@pytest.mark.quick("bits1", "bits3")
@pytest.mark.acceptance("magicube", 7)
@pytest.mark.parametrize("bits", [(16, 8), (8, 8), (8, 4), (4, 4)])
def test_rounding_errs_no_more_than_its_grid(heads, bits):
    mask, whole = random_mask()
    bits = layers.AttentionBits(*bits)
    y = layers.sparse_attention(*heads, pattern_of(mask), bits=bits)
    weights, expected = by_hand(*heads, whole)
    q, k, v = (np.asarray(each, np.float64) for each in heads)
    # Half a unit of each head's operands, [batch, 1, heads, 1].
    half_q, half_k, half_v = (
        np.abs(each).max(axis=(1, 3), keepdims=True) / (2 ** (bits.heads - 1) - 1) / 2
        for each in (q, k, v)
    )
    # |Δs| <= Σ |q| Δk + |k| Δq + Δq Δk, and Δp <= p (exp(2 |Δs|) - 1).
    score = np.abs(q).sum(axis=3).max(axis=1) * half_k[:, 0, :, 0]
    score += np.abs(k).sum(axis=3).max(axis=1) * half_q[:, 0, :, 0]
    score += DIM * (half_q * half_k)[:, 0, :, 0]
    change = np.expm1(2 * score / np.sqrt(DIM))
    off = weights * change[..., None, None] + whole / (
        2 * (2 ** (bits.probabilities - 1) - 1)
    )
    bound = np.einsum("bhts,bshd->bthd", off, np.abs(v) + half_v)
    bound += half_v * weights.sum(axis=3).transpose(0, 2, 1)[..., None]
    assert np.all(np.abs(y - expected) <= bound + 1e-6)
    # And it is an approximation that more bits improve.
    error = np.abs(y - expected).max() / np.abs(expected).max()
    assert error < (0.05 if bits.heads == 8 else 0.6)


@pytest.mark.quick("bits1", "bits3", "bits2")
@pytest.mark.acceptance("magicube", 7)
@pytest.mark.parametrize("bits", [(16, 8), (8, 8), (8, 4), (4, 4)])
def test_probabilities_are_rounded_to_the_nearest_of_a_grid_that_holds_one(bits):
    mask = np.zeros((TIME // 4, TIME), bool)
    mask[0, :4] = mask[1, 5] = True
    shape = (1, TIME, 1, DIM)
    zero, one = jnp.zeros(shape), jnp.ones(shape)
    chosen = layers.AttentionBits(*bits)
    y = layers.sparse_attention(zero, zero, one, pattern_of(mask), bits=chosen)
    most = 2 ** (bits[0] - 1) - 1
    # Four keys of a quarter each, which is no number of the grid; and a single key.
    expected = [4 * round(most / 4) / most] * 4 + [1.0] * 4 + [0.0] * 8
    found = np.asarray(y)[0, :, 0]
    np.testing.assert_allclose(found, np.tile(expected, (DIM, 1)).T, rtol=1e-6)


@pytest.mark.slow
@needs_triton
def test_the_kernels_quantize_alike(heads):
    mask, _ = random_mask()
    one = [each[:1, :, :1] for each in heads]
    for bits in ((8, 8), (8, 4)):
        mine, plain = (
            layers.sparse_attention(
                *one,
                pattern_of(mask),
                bits=layers.AttentionBits(*bits),
                implementation=name,
            )
            for name in ("interpreted", "reference")
        )
        np.testing.assert_array_equal(mine, plain)


def test_bits_that_go_with_no_others_are_refused(heads):
    pattern = pattern_of(np.ones((TIME // 4, TIME), bool))
    with pytest.raises(ConfigError, match=r"one of \(\(16, 8\), .*probabilities=16"):
        layers.sparse_attention(*heads, pattern, bits=layers.AttentionBits(16, 4))


@pytest.mark.wrong
def test_published_scales_are_fixed_and_cut_off(heads):
    mask = np.zeros((TIME // 4, TIME), bool)
    mask[0, :4] = True
    shape = (1, TIME, 1, DIM)
    zero = jnp.zeros(shape)
    bits = layers.AttentionBits(8, 8)
    for given, value in ((0.5, 18), (0.51, 18), (-0.51, -18), (9.0, 127)):
        y = layers.sparse_attention(
            zero,
            zero,
            jnp.full(shape, given),
            pattern_of(mask),
            bits=bits,
            scales="published",
        )
        # Four keys of a quarter each: 8 of 32.
        assert y[0, 0, 0, 0] == pytest.approx(4 * 8 / 32 * value / 36)
    with pytest.raises(ConfigError, match="did you mean 'published'"):
        layers.sparse_attention(*heads, pattern_of(mask), scales="publisher")
