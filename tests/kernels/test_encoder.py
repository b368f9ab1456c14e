"""Fused operations of an encoder layer against plain JAX, float64 and differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from hpcjax import kernels
from hpcjax.core.errors import ConfigError

SEED = jnp.uint32(7)
# Odd sizes, one key, one feature.
SHAPES = ((3, 5, 7), (1, 1, 1), (2, 4, 33), (65,), (2, 1, 9), (1, 129))


def normal(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def kept_of(x, rate, seed=SEED):
    return np.asarray(kernels.keep_mask(seed, x.shape, rate), np.float64) / (1 - rate)


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def layer_norm(x, eps=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


@pytest.mark.quick("shape3")
@pytest.mark.parametrize("shape", SHAPES)
def test_each_operation_is_its_definition_in_float64(shape):
    x, residual = normal(*shape), normal(*shape, seed=1)
    bias, scale, shift = (normal(shape[-1], seed=s) for s in (2, 3, 4))
    wide = [np.asarray(a, np.float64) for a in (x, residual, bias, scale, shift)]
    x64, residual64, bias64, scale64, shift64 = wide
    kept = kept_of(x, 0.3)
    near = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    dropped = kernels.softmax_dropout(x, SEED, rate=0.3, scale=0.5)
    near(dropped, softmax(0.5 * x64) * kept)
    active = kernels.bias_activation_dropout(x, bias, SEED, rate=0.3)
    near(active, np.maximum(x64 + bias64, 0) * kept)
    y = kernels.dropout_residual_norm(x, bias, residual, scale, shift, SEED, rate=0.3)
    total = (x64 + bias64) * kept + residual64
    near(y, layer_norm(total) * scale64 + shift64, atol=1e-4)
    stacked = jnp.stack([x, residual, x])
    biases = jnp.stack([bias, scale, shift]).reshape(3, *(1,) * (x.ndim - 1), -1)
    query, key, value = kernels.attention_biases(stacked, biases)
    near(query, x64 + bias64)
    near(key, residual64 + scale64)
    near(value, x64 + shift64)


@pytest.mark.quick("0.0-stored", "0.0-recomputed")
@pytest.mark.parametrize("masks", ["recomputed", "stored"])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_gradients_are_those_of_finite_differences(rate, masks):
    with jax.enable_x64(True):
        x, residual = (normal(2, 3, 5, seed=s, dtype="float64") for s in (0, 1))
        bias, scale, shift = (normal(5, seed=s, dtype="float64") for s in (2, 3, 4))
        options = {"rate": rate, "masks": masks}

        def check(fn, args):  # what is not traced gets arrays of numpy
            check_grads(jax.jit(fn), args, order=1, modes=["rev"], eps=1e-4)

        check(lambda x: kernels.softmax_dropout(x, SEED, scale=0.7, **options), (x,))
        check(
            lambda *args: kernels.dropout_residual_norm(*args, SEED, **options),
            (x, bias, residual, scale, shift),
        )
        for activation in ("relu", "gelu_erf"):
            check(
                lambda *args, f=activation: kernels.bias_activation_dropout(
                    *args, SEED, activation=f, **options
                ),
                (x, bias),
            )


@pytest.mark.acceptance("data-movement", 8)
@pytest.mark.parametrize("masks", ["recomputed", "stored"])
def test_the_gradient_has_the_mask_of_the_forward_pass(masks):
    x, rate = jnp.ones((64, 64)), 0.25
    y, pull = jax.vjp(
        lambda x: kernels.bias_activation_dropout(
            x, jnp.zeros(64), SEED, rate=rate, masks=masks
        ),
        x,
    )
    kept = np.asarray(kernels.keep_mask(SEED, x.shape, rate))
    assert 0 < kept.sum() < kept.size
    np.testing.assert_array_equal(np.asarray(y) > 0, kept)
    np.testing.assert_array_equal(np.asarray(pull(x)[0]) > 0, kept)


@pytest.mark.acceptance("data-movement", 8)
@pytest.mark.parametrize("seed", [0, 1, 123456789])
def test_as_many_are_dropped_as_are_asked_for(seed):
    count, rate = 10**6, 0.1
    kept = np.asarray(kernels.keep_mask(jnp.uint32(seed), (1000, 1000), rate))
    sigma = (count * rate * (1 - rate)) ** 0.5
    assert abs((~kept).sum() - count * rate) < 4 * sigma
    # Neighbours, rows and columns are independent: as many pairs, and even sums.
    for one, other in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        both = (~one & ~other).sum()
        assert abs(both - one.size * rate**2) < 5 * (one.size * rate**2) ** 0.5
    for axis in (0, 1):
        rows = (~kept).sum(axis)
        assert rows.var() == pytest.approx(1000 * rate * (1 - rate), rel=0.25)


@pytest.mark.acceptance("data-movement", 8)
def test_masks_follow_from_the_seed_and_not_from_the_layout():
    shape, order = (3, 4, 5), (2, 0, 1)
    kept = kernels.keep_mask(SEED, shape, 0.5)
    np.testing.assert_array_equal(kept, kernels.keep_mask(SEED, shape, 0.5))
    turned = kernels.keep_mask(SEED, shape, 0.5, order)
    np.testing.assert_array_equal(turned, np.transpose(kept, order))
    other = kernels.keep_mask(jnp.uint32(8), shape, 0.5)
    assert (np.asarray(kept) != np.asarray(other)).any()


@pytest.mark.acceptance("data-movement", 7)
@pytest.mark.parametrize("hidden", ["scores", "visible"])
def test_a_query_that_sees_nothing_has_zeros_and_no_gradient(hidden):
    scores = normal(2, 3, 4).at[0, 1].set(-jnp.inf if hidden == "scores" else 1.0)
    visible = jnp.ones((2, 3, 4), bool).at[0, 1].set(False)

    def fn(scores):
        seen = visible if hidden == "visible" else None
        return kernels.softmax_dropout(scores, SEED, rate=0.2, visible=seen)

    y, pull = jax.vjp(fn, scores)
    (grad,) = pull(normal(2, 3, 4, seed=1))
    assert np.isfinite(y).all()
    assert np.isfinite(grad).all()
    assert not np.asarray(y[0, 1]).any()
    assert not np.asarray(grad[0, 1]).any()
    assert np.asarray(y[0, 0]).any()


def norm_gradient(x, scale, g, eps):
    """The gradient of a layer norm by its input, in float64."""
    deviation = np.sqrt(x.var(-1, keepdims=True) + eps)
    n, h = layer_norm(x, eps), g * scale
    return (h - h.mean(-1, keepdims=True) - n * (h * n).mean(-1, keepdims=True)) / (
        deviation
    )


@pytest.mark.acceptance("data-movement", 6)
def test_a_norm_of_a_large_mean_is_near_float64():
    x = 1e4 + normal(16, 512)
    one, zero, g = jnp.ones(512), jnp.zeros(512), normal(16, 512, seed=1)
    y, pull = jax.vjp(
        lambda x: kernels.dropout_residual_norm(x, zero, jnp.zeros_like(x), one, zero),
        x,
    )
    wide = np.asarray(x, np.float64)
    assert abs(np.asarray(y) - layer_norm(wide)).max() < 5e-3
    want = norm_gradient(wide, 1.0, np.asarray(g, np.float64), 1e-5)
    assert abs(np.asarray(pull(g)[0]) - want).max() < 5e-3


@pytest.mark.acceptance("data-movement", 6)
def test_a_norm_of_bfloat16_is_near_float64_before_it_is_rounded():
    from hpcjax.kernels._encoder import reference

    x = (100 + 10 * normal(16, 512)).astype("bfloat16")
    normed, _ = reference.normalise(x, 1e-5)
    assert abs(np.asarray(normed) - layer_norm(np.asarray(x, np.float64))).max() < 1e-5
    one, zero = jnp.ones(512), jnp.zeros(512)
    y = kernels.dropout_residual_norm(x, zero, jnp.zeros_like(x), one, zero)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, normed.astype("bfloat16"))


def test_bad_options_are_told():
    x = jnp.ones((2, 2))
    with pytest.raises(ConfigError, match=r"rate must be in \[0, 1\): got rate=1.0"):
        kernels.softmax_dropout(x, SEED, rate=1.0)
    with pytest.raises(ConfigError, match="dropout needs a seed"):
        kernels.softmax_dropout(x, rate=0.1)
    with pytest.raises(ConfigError, match="did you mean 'stored'"):
        kernels.softmax_dropout(x, SEED, masks="store")
    with pytest.raises(ConfigError, match="did you mean 'relu'"):
        kernels.bias_activation_dropout(x, jnp.ones(2), activation="rel")
    with pytest.raises(ConfigError, match="scale must be finite and > 0: got scale=0"):
        kernels.softmax_dropout(x, scale=0.0, visible=x > 0)
    with pytest.raises(ConfigError, match="eps must be finite and >= 0"):
        kernels.dropout_residual_norm(x, x[0], x, x[0], x[0], eps=-1.0)


def test_a_mask_that_would_enlarge_the_scores_is_refused():
    scores = jnp.ones((2, 1, 4))
    for shape in ((3, 4), (3,), (1, 2, 1, 4)):
        with pytest.raises(ConfigError, match=r"scores of \[2, 1, 4\]: got shape=\["):
            kernels.softmax_dropout(scores, visible=jnp.ones(shape, bool))
    for shape in ((), (4,), (1, 1), (2, 1, 4)):
        y = kernels.softmax_dropout(scores, visible=jnp.ones(shape, bool))
        np.testing.assert_array_equal(y, np.full((2, 1, 4), 0.25))


def test_a_rate_just_below_one_drops_nearly_all_and_an_order_has_all_axes():
    assert not np.any(kernels.keep_mask(SEED, (1000,), 1 - 1e-12))
    for order in ((0, 0), (0,), (0, 2)):
        with pytest.raises(ConfigError, match="order must have each axis once"):
            kernels.keep_mask(SEED, (2, 3), 0.5, order)
