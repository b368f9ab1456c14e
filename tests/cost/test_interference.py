"""Interference: planted weights, predictions of noisy samples, the published trace."""

import numpy as np
import pytest

from hpcjax import cost
from hpcjax.core import ConfigError

WEIGHTS = np.array([5e-3, 2e-12, 3e-5, 1e-12, 8e-5])
LARGEST = np.array([8e9, 120.0, 24e9, 120.0])


def draw(seed, count, noise):
    """Features between a fifth of the largest and these, and latencies."""
    rng = np.random.default_rng(seed)
    features = LARGEST * rng.uniform(0.2, 1.0, (count, 4))
    seconds = np.column_stack([np.ones(count), features]) @ WEIGHTS
    noisy = seconds * (1 + noise * rng.standard_normal(count))
    return [cost.Sample(*row, s) for row, s in zip(features, noisy, strict=True)]


@pytest.mark.acceptance("polythrottle", 9)
def test_planted_weights_are_found_without_noise():
    found = cost.fit_interference(draw(0, 20, 0.0), ridge=0)
    np.testing.assert_allclose(found.weights, WEIGHTS, rtol=1e-3)
    assert found.left_out < 1e-3


@pytest.mark.acceptance("polythrottle", 9)
def test_predictions_of_noisy_samples():
    """Weights themselves cannot be recovered; predictions can."""
    good, left_out = [], []
    fresh = np.array(draw(1000, 200, 0.0))
    rows = np.column_stack([np.ones(200), fresh[:, :-1]])
    for seed in range(300):
        found = cost.fit_interference(draw(seed, 20, 0.02))
        errors = np.abs(rows @ found.weights / fresh[:, -1] - 1)
        good.append(errors.max() <= 0.08)
        left_out.append(found.left_out)
    assert np.mean(good) >= 0.95
    assert np.median(left_out) <= 0.025


def test_a_cautious_prediction_adds_the_residual():
    found = cost.fit_interference(draw(0, 20, 0.02))
    plain = found.predict(8e9, 60.0)
    assert found.cautious(8e9, 60.0) == pytest.approx(plain * (1 + found.residual))
    assert 0.01 < found.residual < 0.04
    assert found.predict(8e9, 60.0, 24e9, 60.0) > plain


def test_standard_errors_are_the_spread_of_weights():
    """Of fits to noise of their own, to equal features."""
    clean = np.array(draw(0, 60, 0.0))
    fits = []
    for seed in range(200):
        noise = np.random.default_rng(seed).standard_normal(len(clean))
        noisy = np.column_stack([clean[:, :-1], clean[:, -1] * (1 + 0.005 * noise)])
        samples = [cost.Sample(*row) for row in noisy]
        fits.append(cost.fit_interference(samples, ridge=0))
    spread = np.std([each.weights for each in fits], axis=0)
    errors = np.mean([each.errors for each in fits], axis=0)
    np.testing.assert_allclose(errors, spread, rtol=0.15)


def test_a_ridge_draws_weights_to_zero_but_not_the_intercept():
    samples = draw(0, 20, 0.0)
    strong = cost.fit_interference(samples, ridge=1e6).weights
    assert (strong[1:] * LARGEST).max() < 1e-3 * strong[0]
    assert strong[0] > 0.5 * np.mean([each.seconds for each in samples])


def test_queries_wait_for_each_other():
    trace = cost.simulate_trace(
        [0.0, 1.0, 1.5, 9.0], lambda start: start >= 1, lambda beside: 1 + beside
    )
    assert trace.starts.tolist() == [0, 1, 3, 9]
    assert trace.latencies.tolist() == [1, 2, 3.5, 2]
    assert trace.admitted.tolist() == [False, True, True, True]


@pytest.mark.acceptance("polythrottle", 9)
def test_nothing_is_admitted_until_the_objective_allows_it():
    """60 s, an objective of 250 ms and then of 700."""

    def serve(beside):
        return 0.6 if beside else 0.2

    def admit(start):
        return serve(True) <= (0.25 if start < 30 else 0.7)

    trace = cost.simulate_trace(np.arange(0.0, 60.0, 0.75), admit, serve)
    early = trace.starts < 30
    assert not trace.admitted[early].any()
    assert trace.admitted[~early].all()
    assert np.quantile(trace.latencies[early], 0.95) <= 0.25
    assert np.quantile(trace.latencies[~early], 0.95) <= 0.7


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (draw(0, 9, 0.0), "needs 10 samples: got samples=9"),
        ([cost.Sample(1, 1, 0, 0, -1.0)] * 10, "finite and >= 0"),
        ([cost.Sample(1, 1, 0, 0, 0.0)] * 10, "take time"),
    ],
)
def test_bad_samples(samples, message):
    with pytest.raises(ConfigError, match=message):
        cost.fit_interference(samples)


def test_arrivals_must_ascend():
    with pytest.raises(ConfigError, match="arrivals must ascend"):
        cost.simulate_trace([1.0, 0.0], lambda start: False, lambda beside: 1.0)
