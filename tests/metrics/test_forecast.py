"""Scores on a grid, against peers and plain float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
from jax.sharding import PartitionSpec as P

from hpcjax import metrics
from hpcjax.core import ConfigError
from hpcjax.metrics.means import weighted_sums


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.acceptance("forecast-metrics", 7)
def test_latitudes_are_weighted_by_cosine_or_area():
    grid = np.linspace(-87.1875, 87.1875, 32)
    cos = metrics.latitude_weights(grid, "cos")
    assert cos[0] == pytest.approx(0.077044, abs=1e-6)
    assert cos[16] == pytest.approx(1.568274, abs=1e-6)
    area = metrics.latitude_weights(grid, "cell_area")
    np.testing.assert_allclose(area, cos, rtol=1e-12)
    np.testing.assert_allclose(metrics.latitude_weights(grid[::-1]), area[::-1])
    poles = np.linspace(90, -90, 361)
    cos, area = (metrics.latitude_weights(poles, kind) for kind in ("cos", "cell_area"))
    assert area.mean() == pytest.approx(1)
    assert abs(cos[0]) < 1e-15 < area[0]
    # Cells of the whole sphere: sin 90° − sin −90°.
    assert area[180] * 2 / 361 == pytest.approx(2 * np.sin(np.deg2rad(0.25)), rel=1e-6)


def test_the_cells_of_a_region_end_at_its_edge():
    region = np.array([60.0, 59.0, 58.0])
    area = metrics.latitude_weights(region, "cell_area")
    np.testing.assert_allclose(area, metrics.latitude_weights(region, "cos"), rtol=1e-4)
    for kind in ("cos", "cell_area"):
        assert metrics.latitude_weights(np.array([90.0]), kind).tolist() == [1.0]


@pytest.mark.parametrize("first", [88.0, 78.0, 30.0])
def test_no_region_reaches_a_pole_from_two_rows_off(first):
    region = first - np.arange(4.0)
    for latitude in (region, -region, region[::-1]):
        area = metrics.latitude_weights(latitude, "cell_area")
        cos = metrics.latitude_weights(latitude, "cos")
        # sin(φ + h) − sin(φ − h) = 2 cos φ sin h
        np.testing.assert_allclose(area, cos, rtol=1e-9)


@pytest.mark.parametrize("step", [0.25, 1 / 12, 0.3])
def test_a_strip_along_the_equator_is_of_degrees(step):
    strip = np.arange(1.5, -1.51, -step)
    np.testing.assert_allclose(metrics.latitude_weights(strip), 1, atol=1e-3)


def test_what_is_nan_is_in_no_histogram():
    members = jnp.array([[jnp.nan, 0.0, 0.0], [1.0, 1.0, 1.0]])
    observed = jnp.array([0.5, 0.5, jnp.nan])
    ranks = metrics.rank_histogram(members, observed, jax.random.key(0))
    assert ranks.tolist() == [0, 1, 0]
    places = metrics.pit_histogram(jnp.zeros(3), jnp.ones(3), observed, bins=2)
    assert places.tolist() == [0, 2]


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("latitude", "message"),
    [
        ([0.0, 95.0], "in \\[-90, 90\\] degrees: got 95"),
        ([0.0, 10.0, 5.0], "in order"),
        (np.deg2rad(np.linspace(-80, 80, 9)), "which are radians"),
        ([[0.0, 1.0]], "one axis"),
    ],
)
def test_latitudes_that_cannot_be_are_refused(latitude, message):
    with pytest.raises(ValueError, match=message):
        metrics.latitude_weights(np.array(latitude))


@pytest.mark.wrong
def test_errors_are_weighted_means_and_the_order_of_roots_is_explicit():
    forecast, truth = draw(4, 3, 5), draw(4, 3, 5, seed=1)
    weights = metrics.latitude_weights(np.array([-60.0, 0.0, 60.0]))[:, None]
    errors, whole = forecast - truth, np.broadcast_to(weights, (4, 3, 5))
    f, t = jnp.asarray(forecast), jnp.asarray(truth)
    mean = np.average(errors**2, weights=whole)
    assert float(metrics.rmse(f, t, weights)) == pytest.approx(np.sqrt(mean), rel=1e-6)
    each = [np.sqrt(np.average(e**2, weights=whole[0])) for e in errors]
    per_time = float(metrics.rmse(f, t, weights, order="sqrt_per_time"))
    assert per_time == pytest.approx(np.mean(each), rel=1e-6)
    assert per_time < np.sqrt(mean)
    by = np.average(np.abs(errors), weights=whole)
    assert float(metrics.mae(f, t, weights)) == pytest.approx(by, rel=1e-6)
    by = np.average(errors, weights=whole)
    assert float(metrics.bias(f, t, weights)) == pytest.approx(by, rel=1e-5)
    with pytest.raises(ValueError, match="sqrt_last"):
        metrics.rmse(f, t, order="last")


def test_a_point_of_weight_zero_may_be_nan():
    truth = jnp.array([[1.0, jnp.nan], [3.0, 4.0]])
    weights = jnp.array([[1.0, 0.0], [1.0, 1.0]])
    assert float(metrics.mae(jnp.zeros((2, 2)), truth, weights)) == pytest.approx(8 / 3)
    assert jnp.isnan(metrics.mae(jnp.zeros((2, 2)), truth))
    slope = jax.grad(lambda f: metrics.mae(f, truth, weights))(jnp.zeros((2, 2)))
    assert np.isfinite(slope).all()


def test_both_anomaly_correlations():
    truth, climate = draw(6, 3, 4), draw(3, 4, seed=3)
    forecast = truth + 0.5 * draw(6, 3, 4, seed=2)
    weights = metrics.latitude_weights(np.array([-50.0, 0.0, 50.0]))[:, None]
    f, a = forecast - climate, truth - climate
    ratios = (weights * f * a).sum((1, 2)) / np.sqrt(
        (weights * f * f).sum((1, 2)) * (weights * a * a).sum((1, 2))
    )
    arrays = [jnp.asarray(each) for each in (forecast, truth, climate)]
    ours = float(metrics.acc(*arrays, weights))
    assert ours == pytest.approx(ratios.mean(), rel=1e-5)
    usual = truth.mean(0)
    f, a = forecast - usual, truth - usual
    f, a = f - f.mean(), a - a.mean()
    ratio = (weights * f * a).sum() / np.sqrt(
        (weights * f * f).sum() * (weights * a * a).sum()
    )
    ours = float(metrics.acc(*arrays[:2], weights=weights, variant="wb1"))
    assert ours == pytest.approx(ratio, rel=1e-5)
    with pytest.raises(ValueError, match="wb2 takes a climatology"):
        metrics.acc(*arrays[:2])


@pytest.mark.acceptance("forecast-metrics", 8)
def test_a_reliable_ensemble_has_the_spread_of_its_error():
    drawn = 54_000 + 10 * jax.random.normal(jax.random.key(0), (6, 500_000))
    ratio = float(metrics.spread_skill_ratio(drawn[:5], drawn[5]))
    assert ratio == pytest.approx(1, abs=0.005)
    plain = metrics.spread_skill_ratio(drawn[:5], drawn[5], finite_correction=False)
    assert float(plain) == pytest.approx(np.sqrt(5 / 6), abs=0.005)
    exact = np.asarray(drawn[:5], np.float64).var(0, ddof=1).mean()
    assert float(metrics.spread(drawn[:5])) == pytest.approx(np.sqrt(exact), rel=2e-6)
    with pytest.raises(ValueError, match="spread needs at least 2 members, got 1"):
        metrics.spread(drawn[:1])


@pytest.mark.acceptance("forecast-metrics", 11)
@pytest.mark.parametrize("members", [1, 5, 10])
def test_ties_have_any_rank(members):
    tied = jnp.zeros((members, 100_000))
    counts = metrics.rank_histogram(tied, tied[0], jax.random.key(members))
    expected = 100_000 / (members + 1)
    statistic = float(jnp.sum((counts - expected) ** 2) / expected)
    assert statistic < scipy.stats.chi2.ppf(0.999, members)
    half = jnp.concatenate([tied[:1] - 1, jnp.zeros((2, 100_000)), tied[:1] + 1])
    counts = metrics.rank_histogram(half, tied[0], jax.random.key(7))
    assert counts[0] == counts[4] == 0
    np.testing.assert_allclose(counts[1:4] / 100_000, 1 / 3, atol=0.01)


def test_a_gaussians_places_are_uniform_if_it_is_right():
    y = jax.random.normal(jax.random.key(2), (100_000,))
    counts = metrics.pit_histogram(jnp.zeros(()), jnp.ones(()), y)
    np.testing.assert_allclose(counts / 100_000, 0.1, atol=0.004)
    narrow = metrics.pit_histogram(jnp.zeros(()), jnp.full((), 0.5), y)
    assert narrow[0] > 2 * narrow[5]


def test_similarity_of_structure_is_that_of_gaussian_windows():
    rng = np.random.default_rng(6)
    first = scipy.ndimage.gaussian_filter(rng.normal(size=(30, 40)), 2) * 9 + 500
    second = first + rng.normal(size=(30, 40))

    def blur(field):
        return scipy.ndimage.gaussian_filter(field, 1.5, truncate=5 / 1.5)[5:-5, 5:-5]

    level = 500
    x, y = first - level, second - level
    ux, uy = blur(x), blur(y)
    c1, c2 = (0.01 * 20) ** 2, (0.03 * 20) ** 2
    vx, vy, both = (
        blur(x * x) - ux**2,
        blur(y * y) - uy**2,
        blur(x * y) - ux * uy,
    )
    light = 2 * (ux + level) * (uy + level) + c1
    light /= (ux + level) ** 2 + (uy + level) ** 2 + c1
    expected = (light * (2 * both + c2) / (vx + vy + c2)).mean()
    ours = metrics.ssim(jnp.asarray(first), jnp.asarray(second), data_range=20.0)
    assert float(ours) == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="at least window=11"):
        metrics.ssim(jnp.zeros((5, 40)), jnp.zeros((5, 40)), data_range=1.0)


@pytest.mark.acceptance("forecast-metrics", 10)
def test_devices_with_unequal_shares_add_sums_and_not_means():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    members, y = jnp.asarray(draw(61, 10)), jnp.asarray(draw(61, seed=5))
    whole = metrics.weighted_mean(metrics.crps_ensemble(members, y))
    # 61 cases on eight devices: the last has five, and three of weight zero.
    padded = jnp.pad(members, ((0, 3), (0, 0))), jnp.pad(y, (0, 3))
    weights = jnp.pad(jnp.ones(61), (0, 3))

    def score(members, y, weights):
        sums = weighted_sums(metrics.crps_ensemble(members, y), weights)
        total, weight = jax.lax.psum(sums, "data")
        return total / weight

    shared = jax.shard_map
    spread = jax.jit(shared(score, mesh=mesh, in_specs=P("data"), out_specs=P()))
    assert float(spread(*padded, weights)) == pytest.approx(float(whole), rel=1e-6)


def test_points_that_are_close():
    near = metrics.percent_close(
        jnp.array([1.0, 1.2, 0.0]),
        jnp.array([1.0, 1.0, 0.0]),
        rtol=0.1,
        weights=jnp.array([1.0, 2.0, 1.0]),
    )
    assert float(near) == 50.0


@pytest.mark.parametrize("score", [metrics.rmse, metrics.mae, metrics.bias])
def test_a_truth_of_another_shape_is_not_broadcast(score):
    told = r"forecast and truth must have one shape: got forecast \[2, 3, 4\], truth"
    with pytest.raises(ConfigError, match=told):
        score(jnp.zeros((2, 3, 4)), jnp.zeros((2, 3, 1)))


@pytest.mark.wrong
def test_tolerances_and_bins_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="rtol must be finite and >= 0"):
        metrics.percent_close(jnp.ones(2), jnp.ones(2), rtol=-1)
    with pytest.raises(ConfigError, match="bins must be an integer >= 1"):
        metrics.pit_histogram(jnp.zeros(2), jnp.ones(2), jnp.ones(2), bins=0)
    with pytest.raises(ConfigError, match="must have one shape"):
        metrics.acc(jnp.ones((2, 3, 4)), jnp.ones((2, 3, 1)), variant="wb1")


KEY = jax.random.key(0)


@pytest.mark.wrong
@pytest.mark.parametrize(
    ("score", "shapes"),
    [
        (metrics.crps_gaussian, [(4, 3), (4, 1), (4, 3)]),
        (metrics.crps_gaussian, [(4, 3), (4, 3), (3,)]),
        (metrics.crps_censored_gaussian, [(4, 3), (4, 3), (4, 1)]),
        (metrics.crps_ensemble, [(4, 3, 10), (4, 1)]),
        (metrics.crps_ensemble, [(4, 3, 10), (4, 3, 10)]),
        (metrics.efi, [(4, 3, 10), (4, 1, 21)]),
        (metrics.efi, [(4, 3, 10), (3, 21)]),
        (metrics.eecrps, [(4, 3), (3,)]),
        (metrics.eecrps, [(4, 3), (4, 3), (4, 1)]),
        (metrics.spread_skill_ratio, [(10, 4, 3), (4, 1)]),
        (lambda x, y: metrics.spread_skill_ratio(x, y, axis=1), [(4, 10, 3), (10, 3)]),
        (lambda x, y: metrics.rank_histogram(x, y, KEY), [(10, 4, 3), (1, 4, 3)]),
        (metrics.pit_histogram, [(4, 3), (4, 3), (4, 1)]),
        (lambda x, y: metrics.ssim(x, y, data_range=1.0), [(12, 12), (1, 12)]),
        (metrics.dice, [(2, 4, 3), (2, 1, 3)]),
        (metrics.accuracy, [(4, 3), (4, 1)]),
        (metrics.error, [(4, 3), (4, 1)]),
        (metrics.cross_entropy, [(4, 3), (1,)]),
        (metrics.mae, [(4,), (4,), (4, 1)]),
        (metrics.weighted_mean, [(4,), (4, 1)]),
        (metrics.acc, [(1, 3, 2), (1, 3, 2), (5, 3, 2)]),
    ],
)
def test_points_of_other_places_are_not_broadcast(score, shapes):
    given = [jnp.ones(shape) for shape in shapes]
    if score is metrics.cross_entropy:
        given[1] = given[1].astype(int)
    with pytest.raises(ConfigError, match=r"shape|points|do not fit"):
        score(*given)


def test_a_scalar_is_of_all_points():
    y = jnp.array([[0.0, 1.0], [2.0, 3.0]])
    every = metrics.crps_gaussian(jnp.zeros((2, 2)), jnp.ones((2, 2)), y)
    np.testing.assert_array_equal(metrics.crps_gaussian(0.0, 1.0, y), every)


def test_what_is_no_number_is_neither_close_nor_far():
    forecast, weights = jnp.array([jnp.nan, 1.0]), jnp.array([0.0, 1.0])
    assert jnp.isnan(metrics.percent_close(forecast, jnp.ones(2), rtol=0.1))
    found = metrics.percent_close(forecast, jnp.ones(2), rtol=0.1, weights=weights)
    assert float(found) == 100
