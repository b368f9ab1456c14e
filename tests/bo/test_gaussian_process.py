"""The Gaussian process against scikit-learn's, differences and quadrature."""

import warnings

import numpy as np
import pytest
from scipy import integrate
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from hpcjax import bo
from hpcjax.bo import acquisition, gaussian_process
from hpcjax.core import ConfigError

SIZES = [(1, 6), (1, 50), (2, 12), (3, 25), (4, 50)]


def data(dims, count, seed=0):
    rng = np.random.default_rng(seed + 10 * dims + count)
    x = rng.random((count, dims))
    return x, 3 + np.sin(5 * x).sum(1) + 0.1 * rng.standard_normal(count), rng


def kernel(dims):
    return bo.Kernel(np.linspace(0.2, 0.9, dims), 1.7, 0.03)


@pytest.mark.acceptance("polythrottle", 1)
@pytest.mark.parametrize(("dims", "count"), SIZES)
def test_a_posterior_is_scikit_learns(dims, count):
    x, y, rng = data(dims, count)
    own = kernel(dims)
    posterior = bo.Posterior(own, x, y)
    peer = GaussianProcessRegressor(
        ConstantKernel(own.variance) * Matern(own.lengths, nu=2.5),
        alpha=own.noise,
        optimizer=None,
    ).fit(x, (y - y.mean()) / y.std())
    at = rng.random((40, dims))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mean, deviation = peer.predict(at, return_std=True)
    ours, spread = posterior(at)
    np.testing.assert_allclose(ours, y.mean() + y.std() * mean, atol=1e-6)
    np.testing.assert_allclose(spread, y.std() * deviation, atol=1e-6)
    expected = peer.log_marginal_likelihood_value_
    assert posterior.log_likelihood == pytest.approx(expected, abs=1e-6)


@pytest.mark.acceptance("polythrottle", 2)
@pytest.mark.parametrize("dims", [1, 3])
def test_the_gradient_is_that_of_differences(dims):
    x, y, _ = data(dims, 12)
    squares = gaussian_process._squares(x, x, np.ones(dims))
    y = (y - y.mean()) / y.std()
    logs = np.log([*np.linspace(0.2, 0.9, dims), 1.7, 0.03])

    def value(at):
        return gaussian_process._likelihood_and_gradient(squares, y, at)[0]

    steps = 1e-5 * np.eye(len(logs))
    differences = [(value(logs + s) - value(logs - s)) / 2e-5 for s in steps]
    _, gradient = gaussian_process._likelihood_and_gradient(squares, y, logs)
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-5)


@pytest.mark.acceptance("polythrottle", 2)
def test_points_may_be_repeated():
    x = np.repeat([[0.2], [0.7]], 5, axis=0)
    posterior = bo.Posterior(bo.Kernel(np.array([0.5]), 1.0, 0.0), x, x[:, 0])
    mean, _ = posterior(np.array([[0.2], [0.7]]))
    np.testing.assert_allclose(mean, [0.2, 0.7], atol=1e-4)


def test_a_fit_is_as_likely_as_the_best_of_a_search():
    """With the priors; the peer is a dense search over the parameters."""
    x, y, _ = data(1, 12)
    found = bo.fit(x, y)
    medians, widths = gaussian_process._priors(1)

    def density(kernel):
        logs = np.log([*kernel.lengths, kernel.variance, kernel.noise])
        far = (logs - medians) / widths
        return bo.Posterior(kernel, x, y).log_likelihood - 0.5 * (far**2).sum()

    kernels = [
        bo.Kernel(np.array([length]), variance, noise)
        for length in np.geomspace(0.1, 2, 12)
        for variance in np.geomspace(0.2, 5, 8)
        for noise in np.geomspace(1e-4, 0.5, 8)
    ]
    assert density(found.kernel) >= max(map(density, kernels))


def test_equal_targets_are_known_everywhere():
    mean, _ = bo.fit(np.array([[0.0], [1.0]]), np.array([2.0, 2.0]))(np.array([[0.5]]))
    assert mean[0] == pytest.approx(2.0)


def test_targets_that_differ_by_rounding_leave_as_much_doubt_as_equal_ones():
    x, equal = np.linspace(0, 0.3, 7)[:, None], np.ones(7)
    rounded = np.append(equal[1:], np.nextafter(1.0, 2.0))
    spreads = [bo.fit(x, y)(np.array([[1.0]]))[1] for y in (rounded, equal)]
    np.testing.assert_allclose(*spreads)
    assert spreads[0] > 0.1


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((2, 1)), np.zeros(3), r"x=\(2, 1\), y=\(3,\)"),
        (np.zeros((0, 1)), np.zeros(0), "n > 0"),
        (np.zeros((1, 1)), np.array([np.inf]), "must be finite"),
    ],
)
def test_bad_observations(x, y, message):
    with pytest.raises(ConfigError, match=message):
        bo.fit(x, y)


def seen(values, latencies, bound, **others):
    x = np.linspace(0, 1, len(values))[:, None]
    bounded = {"l": latencies} | {name: found for name, (found, _) in others.items()}
    bounds = {"l": bound} | {name: most for name, (_, most) in others.items()}
    return bo.Observations(x, values, bounded, bounds)


@pytest.mark.acceptance("polythrottle", 3)
def test_constrained_improvement_is_that_of_samples():
    rng = np.random.default_rng(0)
    x = np.linspace(0, 1, 7)
    values, latencies, heats = np.cos(4 * x), np.sin(3 * x), x**2 - x
    found = seen(values, latencies, 0.5, heat=(heats, -0.05))
    at = np.linspace(0.02, 0.98, 140)[:, None]
    worth = bo.constrained_improvement(found, at)
    mean, deviation = bo.fit(found.x, values)(at)
    middle, spread = bo.fit(found.x, latencies)(at)
    hot, wide = bo.fit(found.x, heats)(at)
    best = values[(latencies <= 0.5) & (heats <= -0.05)].min()
    chosen = np.flatnonzero(worth >= 1e-3 * deviation)[:20]
    assert len(chosen) == 20
    value, other, third = rng.standard_normal((3, 1_000_000))
    for n in chosen:
        gain = np.maximum(best - mean[n] - deviation[n] * value, 0)
        gain *= middle[n] + spread[n] * other <= 0.5
        gain *= hot[n] + wide[n] * third <= -0.05
        error = gain.std() / 1000
        assert abs(gain.mean() - worth[n]) <= 4 * error


@pytest.mark.acceptance("polythrottle", 3)
def test_improvement_is_that_of_quadrature():
    z = np.linspace(-6, 6, 25)
    found = acquisition.expected_improvement(np.zeros(25), np.ones(25), 0.0 + z)
    for one, best in zip(found, z, strict=True):

        def gain(t, best=best):
            return (best - t) * np.exp(-0.5 * t**2) / np.sqrt(2 * np.pi)

        exact, _ = integrate.quad(gain, -12, best, epsabs=1e-13)
        assert one == pytest.approx(exact, abs=1e-10)
    far = acquisition.expected_improvement(np.zeros(1), np.ones(1), np.array(-50.0))
    assert far[0] == 0


@pytest.mark.acceptance("polythrottle", 3)
def test_without_a_feasible_point_it_is_the_probability():
    latencies = np.array([3.0, 2.0, 1.0])
    at = np.linspace(0, 1, 5)[:, None]
    worth = bo.constrained_improvement(seen(np.ones(3), latencies, 0.9), at)
    assert np.argmax(worth) == 4
    other = bo.constrained_improvement(seen(np.arange(3.0), latencies, 0.9), at)
    np.testing.assert_array_equal(worth, other)
    assert worth.max() <= 1
