"""Scores of distributions, against peers, closed forms and brute force in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import properscoring
import pytest
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import scores.probability
import scoringrules
import xarray as xr

from hpcjax import metrics
from hpcjax.metrics.crps import ESTIMATORS, sorting_network

CASES = 1000


def wide(*arrays):
    return [np.asarray(each, np.float64) for each in arrays]


@pytest.fixture(scope="module")
def gaussians():
    """Means, deviations and observations, as float32 rounds them."""
    rng = np.random.default_rng(0)
    std = np.exp(rng.uniform(np.log(1e-3), np.log(1e3), 100_000))
    mean, y = rng.uniform(-50, 50, (2, len(std)))
    return [each.astype(np.float32) for each in (mean, std, y)]


def draw_ensemble(members, offset=0.0, cases=CASES):
    rng = np.random.default_rng(members)
    x = 13 * rng.normal(size=(cases, members)) + offset
    y = 13 * rng.normal(size=cases) + offset
    return x.astype(np.float32), y.astype(np.float32)


@pytest.mark.acceptance("forecast-metrics", 1)
def test_a_gaussian_scores_as_peers_say(gaussians):
    mean, std, y = wide(*gaussians)
    ours = np.asarray(metrics.crps_gaussian(*gaussians), np.float64)
    for peer in (
        properscoring.crps_gaussian(y, mean, std),
        scoringrules.crps_normal(y, mean, std),
    ):
        np.testing.assert_allclose(ours, peer, rtol=2e-6)
    with jax.enable_x64(True):
        exact = np.asarray(metrics.crps_gaussian(mean, std, y))
    np.testing.assert_allclose(exact, peer, rtol=1e-13)


@pytest.mark.acceptance("forecast-metrics", 1)
def test_a_gaussian_scores_as_its_integral(gaussians):
    mean, std, y = (each[:100] for each in wide(*gaussians))
    with jax.enable_x64(True):
        ours = np.asarray(metrics.crps_gaussian(mean, std, y))
    for m, s, o, score in zip(mean, std, y, ours, strict=True):

        def below(t, m=m, s=s):
            return scipy.special.ndtr((t - m) / s) ** 2

        def above(t, m=m, s=s):
            return scipy.special.ndtr((m - t) / s) ** 2

        # Pieces, as quad sees no narrow distribution in a wide interval.
        cuts = m + s * np.array([-9, -3, 0, 3, 9])
        total = 0.0
        for part, low, high in (
            (below, min(cuts[0], o), o),
            (above, o, max(cuts[-1], o)),
        ):
            inner = np.unique(np.clip([low, *cuts, high], low, high))
            for ends in itertools.pairwise(inner):
                total += scipy.integrate.quad(part, *ends, epsabs=1e-12)[0]
        assert score == pytest.approx(total, rel=1e-8)


@pytest.mark.acceptance("forecast-metrics", 4)
def test_a_gaussians_slopes_are_the_closed_forms_and_finite():
    z = jnp.array([-50.0, -2.0, -0.01, 0.0, 0.5, 3.0, 50.0])
    for std in (1e-8, 1.0, 30.0):
        for y in (0.0, 7.0):
            mean = y + std * z
            slopes = jax.vmap(jax.grad(metrics.crps_gaussian, (0, 1)), (0, None, None))(
                mean, jnp.float32(std), jnp.float32(y)
            )
            got = (np.float64(mean) - y) / np.float64(np.float32(std))
            by_mean = 2 * scipy.stats.norm.cdf(got) - 1
            by_std = 2 * scipy.stats.norm.pdf(got) - 1 / np.sqrt(np.pi)
            np.testing.assert_allclose(slopes[0], by_mean, atol=1e-6)
            np.testing.assert_allclose(slopes[1], by_std, atol=1e-6)
    flat = jax.grad(metrics.crps_gaussian, (0, 1))(1.0, 0.0, 1.0)
    assert np.isfinite(flat).all()
    assert float(metrics.crps_gaussian(3.0, 0.0, 1.0)) == 2.0
    with pytest.raises(ValueError, match="must not be negative: got -1"):
        metrics.crps_gaussian(0.0, -1.0, 0.0)


def test_a_deviation_may_be_a_constant_of_a_program():
    std, mean = jnp.ones(3), jnp.arange(3.0)
    inside = jax.jit(lambda mean: metrics.crps_gaussian(mean, std, jnp.zeros(3)))
    expected = metrics.crps_gaussian(mean, std, jnp.zeros(3))
    np.testing.assert_allclose(inside(mean), expected, rtol=1e-6)


def test_scores_mix_no_dtypes_by_themselves():
    x, climate = jnp.ones((2, 3), jnp.bfloat16), jnp.linspace(0.0, 2.0, 21)
    both = jnp.broadcast_to(climate, (2, 21))
    with jax.numpy_dtype_promotion("strict"):
        for method in ("exact", "paper"):
            index = metrics.efi(x, both, method=method)
            assert jnp.isnan(metrics.efi(x * jnp.nan, both, method=method)).all()
        assert metrics.crps_ensemble(x, jnp.ones(2)).dtype == jnp.float32
        assert metrics.eecrps(jnp.ones(2), index).dtype == jnp.float32


def test_a_censored_gaussian_scores_as_a_peer_says():
    rng = np.random.default_rng(1)
    mean, std = rng.normal(1, 2, 500), rng.uniform(0.2, 3, 500)
    y = np.maximum(rng.normal(1, 2, 500), 0)
    with jax.enable_x64(True):
        ours = np.asarray(metrics.crps_censored_gaussian(mean, std, y))
    peer = scoringrules.crps_cnormal(y, mean, std, 0.0, np.inf)
    np.testing.assert_allclose(ours, peer, rtol=1e-9, atol=1e-14)


@pytest.mark.acceptance("forecast-metrics", 2)
@pytest.mark.parametrize("members", [2, 3, 5, 10, 50])
def test_an_ensemble_scores_as_peers_say_far_from_zero_too(members):
    for offset in (0.0, 54_000.0):
        x, y = draw_ensemble(members, offset)
        for estimator, peers in {"unfair": "nrg", "fair": "fair"}.items():
            by = metrics.crps_ensemble
            ours = np.asarray(by(x, y, estimator=estimator), np.float64)
            theirs = scoringrules.crps_ensemble(*wide(y, x), estimator=peers)
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
            with jax.enable_x64(True):
                exact = np.asarray(by(*wide(x, y), estimator=estimator))
            # The peers' sums cancel, ours do not.
            np.testing.assert_allclose(exact, theirs, rtol=1e-12, atol=1e-10)
            xarrays = xr.DataArray(wide(x)[0], dims=("case", "member"))
            labelled = scores.probability.crps_for_ensemble(
                xarrays,
                xr.DataArray(wide(y)[0], dims=("case",)),
                "member",
                method="ecdf" if estimator == "unfair" else "fair",
                preserve_dims="all",
            )
            np.testing.assert_allclose(exact, labelled, rtol=1e-12, atol=1e-10)
        with jax.enable_x64(True):
            exact = metrics.crps_ensemble(*wide(x, y), estimator="unfair")
        other = properscoring.crps_ensemble(*wide(y, x))
        np.testing.assert_allclose(exact, other, rtol=1e-12, atol=1e-10)


@pytest.mark.acceptance("forecast-metrics", 2)
def test_gaps_and_pairs_agree():
    x, y = draw_ensemble(7)
    wide_x, wide_y = wide(x, y)
    skill = np.abs(wide_x - wide_y[:, None]).mean(1)
    pairs = np.abs(wide_x[:, :, None] - wide_x[:, None, :]).sum((1, 2))
    for estimator, divisor in {"unfair": 2 * 49, "fair": 2 * 42}.items():
        ours = metrics.crps_ensemble(x, y, estimator=estimator)
        np.testing.assert_allclose(ours, skill - pairs / divisor, rtol=1e-6, atol=2e-6)
    between = metrics.crps_ensemble(x, y, estimator="almost_fair", alpha=0.25)
    mixed = skill - pairs * (0.25 / 84 + 0.75 / 98)
    np.testing.assert_allclose(between, mixed, rtol=1e-6, atol=2e-6)


def test_an_ensembles_slopes_are_those_of_pairs():
    x, y = draw_ensemble(5, cases=20)

    def by_pairs(x, y):
        pairs = jnp.abs(x[:, None] - x[None, :]).sum()
        return jnp.abs(x - y).mean() - pairs / 50

    ours = jax.vmap(
        jax.grad(lambda x, y: metrics.crps_ensemble(x, y, estimator="unfair"))
    )(x, y)
    np.testing.assert_allclose(ours, jax.vmap(jax.grad(by_pairs))(x, y), atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 10, 17, 64])
def test_the_networks_sort(count):
    x = np.random.default_rng(count).integers(0, 9, (200, count)).T.astype(float)
    ordered = list(x)
    for stage in sorting_network(count):
        assert len({at for pair in stage for at in pair}) == 2 * len(stage)
        for low, high in stage:
            pair = ordered[low], ordered[high]
            ordered[low], ordered[high] = np.minimum(*pair), np.maximum(*pair)
    np.testing.assert_array_equal(ordered, np.sort(x, axis=0))


@pytest.mark.acceptance("forecast-metrics", 3)
def test_only_the_fair_score_does_not_depend_on_the_number_of_members():
    score = jax.jit(metrics.crps_ensemble, static_argnames=("axis", "estimator"))
    trials, expected = 200_000, 1 / np.sqrt(np.pi)
    for members in (2, 5, 10):
        key = jax.random.fold_in(jax.random.key(0), members)
        drawn = jax.random.normal(key, (members + 1, trials))
        fair = np.asarray(score(drawn[:-1], drawn[-1], axis=0, estimator="fair"))
        error = fair.std() / np.sqrt(trials)
        assert abs(fair.mean() - expected) < 4 * error
        unfair = score(drawn[:-1], drawn[-1], axis=0, estimator="unfair")
        excess = 1 / (members * np.sqrt(np.pi))
        assert abs(float(unfair.mean()) - expected - excess) < 4 * error


@pytest.mark.acceptance("forecast-metrics", 5)
def test_the_score_is_least_for_the_true_distribution():
    drawn = 2 + 3 * jax.random.normal(jax.random.key(1), (1_000_000,))

    @jax.jit
    @jax.value_and_grad
    def loss(guess):
        return jnp.mean(metrics.crps_gaussian(guess[0], jnp.exp(guess[1]), drawn))

    def evaluate(guess):
        value, slope = loss(jnp.asarray(guess, jnp.float32))
        return float(value), np.asarray(slope, np.float64)

    found = scipy.optimize.minimize(evaluate, [0.0, 0.0], jac=True, method="BFGS").x
    assert found[0] == pytest.approx(2, abs=0.015)
    assert np.exp(found[1]) == pytest.approx(3, abs=0.012)


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": "unbiased"}, "estimator must be one of"),
        ({"alpha": 1.5}, r"alpha must be in \[0, 1\]: got alpha=1.5"),
        ({}, "fair CRPS needs at least 2 members, got 1"),
    ],
)
def test_a_score_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        metrics.crps_ensemble(jnp.zeros((3, 1)), jnp.zeros(3), **arguments)
    assert len(ESTIMATORS) == 3


def plain_efi(members, climate):
    """ENS-10's sum, as a loop over quantiles."""
    own = np.quantile(members, np.arange(20) / 20)
    total = 0.0
    for k in range(1, 20):
        p = k / 20
        below = 0.05 * np.searchsorted(own, climate[k], side="left")
        total += 0.05 * (p - below) / np.sqrt(p * (1 - p))
    return 2 / np.pi * total


def integrated_efi(members, climate, nodes=100_000):
    """The integral over θ, p = sin² θ, of the step function of the members' ranks."""
    p = np.linspace(0, 1, len(climate))
    ranks = np.sort(np.interp(members, climate, p))
    theta = (np.arange(nodes) + 0.5) / nodes * np.pi / 2
    at = np.sin(theta) ** 2
    share = np.searchsorted(ranks, at, side="right") / len(ranks)
    return 2 / np.pi * np.mean(at - share) * 2 * np.pi / 2


@pytest.mark.acceptance("forecast-metrics", 6)
def test_the_index_of_extremes():
    climate = np.sort(np.random.default_rng(3).normal(size=21)).astype(np.float32)
    for far, sign in ((climate[-1] + 1, 1), (climate[0] - 1, -1)):
        members = jnp.full(10, far)
        paper = float(metrics.efi(members, climate, method="paper"))
        assert paper == pytest.approx(sign * 0.7914, abs=1e-4)
        exact = float(metrics.efi(members, climate))
        assert exact == pytest.approx(sign, abs=1e-6)
    rain = jnp.zeros(21)
    assert float(metrics.efi(jnp.zeros(10), rain)) == pytest.approx(0, abs=1e-6)
    rng = np.random.default_rng(4)
    members = (1.5 * rng.normal(size=(100, 10))).astype(np.float32)
    exact = metrics.efi(members, np.broadcast_to(climate, (100, 21)))
    paper = metrics.efi(members, np.broadcast_to(climate, (100, 21)), method="paper")
    for case in range(100):
        wide_case = wide(members[case], climate)
        assert float(exact[case]) == pytest.approx(integrated_efi(*wide_case), abs=1e-4)
        assert float(paper[case]) == pytest.approx(plain_efi(*wide_case), abs=1e-6)


@pytest.mark.acceptance("forecast-metrics", 6)
def test_the_index_of_usual_weather_is_zero_but_for_the_papers_rounding():
    climate = scipy.stats.norm.ppf(np.linspace(0, 1, 21))
    climate[[0, -1]] = -4, 4
    members = np.random.default_rng(5).normal(size=(10_000, 10))
    usual = np.broadcast_to(climate, (10_000, 21))
    assert abs(float(metrics.efi(members, usual).mean())) < 0.015
    assert -0.05 <= float(metrics.efi(members, usual, method="paper").mean()) <= -0.03


def test_scores_without_an_index_are_left_out():
    crps = jnp.array([1.0, 2.0, 3.0, 4.0])
    index = jnp.array([0.5, -1.0, jnp.nan, 0.0])
    assert float(metrics.eecrps(crps, index)) == pytest.approx(2.5 / 3)
    some = jnp.array([True, False, True, True])
    assert float(metrics.eecrps(crps, index, some)) == pytest.approx(0.5 / 2)
    with pytest.raises(ValueError, match="21 quantiles"):
        metrics.efi(jnp.zeros(3), jnp.zeros(20), method="paper")


def test_a_climate_with_a_gap_has_no_index():
    usual = jnp.linspace(0.0, 1.0, 21).at[20].set(jnp.nan)
    for method in ("exact", "paper"):
        assert jnp.isnan(metrics.efi(jnp.array([0.99, 2.0]), usual, method=method))
