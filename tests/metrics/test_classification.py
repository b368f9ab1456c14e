import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import metrics
from hpcjax.metrics.means import weighted_mean

EPS = np.finfo(np.float32).eps
_OF_LABELS = {"actual", "persistence"}


def oracle(logits, labels, smoothing=0.0):
    """Cross-entropy of each item in float64, straight from its definition."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    classes = logits.shape[-1]
    target = (1 - smoothing) * np.eye(classes)[labels] + smoothing / classes
    return -(target * log_p).sum(-1)


@settings(max_examples=8, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    classes=st.integers(1, 7),
    smoothing=st.sampled_from([0.0, 0.1, 0.5]),
    scale=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_cross_entropy_equals_its_definition(shape, classes, smoothing, scale, seed):
    rng = np.random.default_rng(seed)
    logits = (scale * rng.normal(size=(*shape, classes))).astype(np.float32)
    labels = rng.integers(0, classes, shape)
    expected = oracle(logits, labels, smoothing)
    found = metrics.token_cross_entropy(
        jnp.asarray(logits), jnp.asarray(labels), label_smoothing=smoothing
    )
    bound = 16 * EPS * (1 + np.abs(logits).max())
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    mean = metrics.cross_entropy(
        jnp.asarray(logits), jnp.asarray(labels), label_smoothing=smoothing
    )
    np.testing.assert_allclose(mean, expected.mean(), rtol=0, atol=bound)


def test_weights_choose_the_items_that_count():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 4)).astype(np.float32)
    labels = rng.integers(0, 4, 6)
    weights = np.array([1, 1, 0, 2, 0, 0.5], np.float32)
    spoilt = logits.copy()
    spoilt[weights == 0] = np.nan
    expected = np.average(oracle(logits, labels), weights=weights)
    found = metrics.cross_entropy(*map(jnp.asarray, (spoilt, labels, weights)))
    np.testing.assert_allclose(found, expected, rtol=32 * EPS)
    right = np.average(logits.argmax(-1) == labels, weights=weights)
    arguments = tuple(map(jnp.asarray, (logits, labels, weights)))
    np.testing.assert_allclose(metrics.accuracy(*arguments), right, rtol=8 * EPS)
    np.testing.assert_allclose(metrics.error(*arguments), 1 - right, rtol=8 * EPS)


def test_gradient_is_softmax_minus_one_hot():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(5, 3)).astype(np.float32)
    labels = np.array([0, 2, 1, 1, 0])
    found = jax.grad(metrics.cross_entropy)(jnp.asarray(logits), jnp.asarray(labels))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, (p - np.eye(3)[labels]) / 5, atol=8 * EPS)


def test_low_precision_logits_are_scored_in_float32():
    logits = jnp.array([[0.0, 8.0, 1.0]], jnp.bfloat16)
    found = metrics.cross_entropy(logits, jnp.array([0]))
    assert found.dtype == jnp.float32
    expected = oracle(np.array([[0.0, 8.0, 1.0]]), np.array([0]))[0]
    np.testing.assert_allclose(found, expected, rtol=8 * EPS)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary():
    loss = metrics.cross_entropy(jnp.zeros((2, 3, 50)), jnp.ones((2, 3), jnp.int32))
    np.testing.assert_allclose(metrics.perplexity(loss), 50, rtol=16 * EPS)


def test_nothing_scored_is_nan():
    assert jnp.isnan(weighted_mean(jnp.ones(3), jnp.zeros(3)))


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, 2.0])
def test_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(ValueError, match=r"label_smoothing must be in \[0, 1\)"):
        metrics.cross_entropy(
            jnp.zeros((1, 2)), jnp.array([0]), label_smoothing=smoothing
        )


def test_logits_that_are_no_numbers_choose_no_class():
    # The largest would be the first, and right.
    logits, labels = jnp.full((3, 4), jnp.nan), jnp.zeros(3, jnp.int32)
    assert jnp.isnan(metrics.accuracy(logits, labels))
    assert jnp.isnan(metrics.error(logits, labels))
    fields, pixels = jnp.ones((3, 2, 2, 1)), {"y": labels[:, None]}
    for totals in (
        metrics.label_totals(logits, {"y": labels}),
        metrics.positive_totals(logits, {"y": labels}),
        metrics.click_totals(logits[:, 0], {"y": labels}),
        metrics.segmentation_totals(logits[:, None], pixels),
        metrics.field_totals(logits.reshape(3, 2, 2, 1), {"x": fields, "y": fields}),
    ):
        told = {n: x for n, x in totals.sums.items() if n not in _OF_LABELS}
        assert jnp.isnan(jnp.stack([*told.values()])).all(), told


def test_a_label_below_zero_is_none_of_the_last_classes():
    losses = metrics.token_cross_entropy(jnp.eye(3), jnp.array([-1, 1, 3]))
    assert np.isnan(losses).tolist() == [True, False, True]
