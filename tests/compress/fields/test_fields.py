"""Grids, points between them, networks as files: against scipy and plain numpy."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
import xarray as xr
from scipy import interpolate, stats
from scipy.stats import qmc

from hpcjax import data, models
from hpcjax.compress import fields
from hpcjax.compress.fields import _fit, _network
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, DataFormatError, Diverged

NETWORK = models.CoordNetConfig(
    width=16,
    depth=1,
    time_features=4,
    level_features=0,
    place_features=8,
    sigma=0.5,
    time_scale=12.0,
)
FIT = fields.FitConfig(steps=150, batch_size=256, learning_rate=1e-2, precision="half")


STORE = _network.store


@pytest.fixture(scope="module")
def waves():
    return data.make_waves(12, 8)


@pytest.fixture(scope="module")
def fitted(waves):
    """A compressed field, and the one that it was before it was rounded."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            _network, "store", lambda *given: seen.append(given) or STORE(*given)
        )
        coded = fields.compress(waves, NETWORK, FIT, key=jax.random.key(0))
    params, statistics, _ = seen[0]
    return coded, dataclasses.replace(coded, params=params, statistics=statistics)


@pytest.fixture(scope="module")
def coded(fitted):
    return fitted[0]


@pytest.fixture(scope="module")
def levels():
    """A field of noise with two levels on an irregular grid from south to north."""
    values = np.random.default_rng(0).normal(size=(3, 2, 5, 8)).astype(np.float32)
    coords = {
        "time": np.arange(3),
        "level": [500.0, 850.0],
        "latitude": [-80.0, -30, 0, 35, 70],
        "longitude": np.arange(8) * 45.0,
    }
    return xr.DataArray(values, coords, tuple(coords), "z")


def test_adam_gets_gradients_of_the_norm_that_clip_says():
    fit = dataclasses.replace(FIT, learning_rate=0.1, clip=0.5)
    tx, mean, square = _fit._adam(fit), np.zeros(2), np.zeros(2)
    state = tx.init(np.zeros(2, np.float32))
    for step, given in enumerate(([30.0, -40.0], [0.1, 0.2], [6.0, 8.0])):
        gradient = np.array(given) * min(1, 0.5 / np.hypot(*given))
        mean, square = (
            decay * moment + (1 - decay) * gradient**power
            for decay, moment, power in ((0.9, mean, 1), (0.999, square, 2))
        )
        rate = 0.05 * (1 + np.cos(np.pi * step / 150))
        deviation = np.sqrt(square / (1 - 0.999 ** (step + 1)))
        expected = -rate * mean / (1 - 0.9 ** (step + 1)) / (deviation + 1e-8)
        update, state = tx.update(np.array(given, np.float32), state)
        np.testing.assert_allclose(update, expected, rtol=1e-4)


@pytest.mark.acceptance("nn-compression", 4)
def test_points_are_even_over_the_sphere_and_levels(levels):
    grid, _ = fields.read_grid(levels)
    points, level = fields.PointSampler(grid, 0).draw(1 << 20)
    sine = np.sin(np.deg2rad(points[:, 2].astype(np.float64)))
    # Sobol's points are evener than random ones: of these few, in any order, KS is one.
    assert stats.kstest(sine, "uniform", (-1, 2)).pvalue > 0.01
    assert np.ptp(np.bincount(level)) <= 1
    assert np.array_equal(points[:, 1], grid.level[level].astype(np.float32))


@pytest.mark.acceptance("nn-compression", 4)
def test_points_fill_the_cube_better_than_random_ones(levels):
    grid, _ = fields.read_grid(levels)
    points, _ = fields.PointSampler(grid, 0).draw(4096)
    sine = np.sin(np.deg2rad(points[:, 2]))
    cube = np.stack([points[:, 0] / 2, (1 - sine) / 2, points[:, 3] / 360], axis=1)
    rng = np.random.default_rng(0)
    random = [qmc.discrepancy(rng.random((4096, 3)), method="CD") for _ in range(5)]
    ours = qmc.discrepancy(np.clip(cube, 0, 1), method="CD")
    assert ours < np.mean(random) / 4


@pytest.mark.acceptance("nn-compression", 5)
@pytest.mark.parametrize("order", [1, -1])
def test_values_between_points_are_scipys(levels, order):
    field = levels.isel(latitude=slice(None, None, order))
    grid, values = fields.read_grid(field)
    points, level = fields.PointSampler(grid, 1).draw(512)
    # Past the last longitude, on a pole's side of the last latitude, on the wrap.
    points[:4, 2:] = [[10, 359.9], [85, 20], [-88, 350], [35, 360]]
    found = fields.interpolate(values, grid, points, level)
    turn = np.append(grid.longitude, 360)
    wrapped = np.concatenate([values, values[..., :1]], axis=-1)[:, :, ::order]
    latitude = np.sort(grid.latitude)
    for at in range(2):
        known = interpolate.RegularGridInterpolator(
            (np.arange(3), latitude, turn), wrapped[:, at]
        )
        own = points[level == at][:, [0, 2, 3]].astype(np.float64)
        own[:, 1] = np.clip(own[:, 1], latitude[0], latitude[-1])
        np.testing.assert_allclose(found[level == at], known(own), atol=1e-5)


@pytest.mark.acceptance("nn-compression", 5)
def test_values_at_points_are_the_grids(levels):
    grid, values = fields.read_grid(levels)
    t, p, y, x = (each.ravel() for each in np.indices(values.shape))
    columns = (t, grid.level[p], grid.latitude[y], grid.longitude[x])
    points = np.stack(columns, axis=1).astype(np.float32)
    found = fields.interpolate(values, grid, points, p)
    np.testing.assert_allclose(found, values.ravel(), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.rename(level="pressure"), "dimensions must be"),
        (lambda f: f.where(f.time > 0), "80 of 240 values are not finite"),
        (lambda f: f.isel(longitude=slice(6)), "longitudes must go around"),
        (
            lambda f: xr.concat(
                [f, f[..., :1].assign_coords(longitude=[360.0])], "longitude"
            ),
            "name no meridian twice",
        ),
        (lambda f: f.isel(latitude=[0, 2, 1]), "latitudes must be in order"),
        (lambda f: f.isel(time=[0, 0, 1]), "times must be in order"),
    ],
)
def test_what_is_no_field_of_a_globe_is_told(levels, change, told):
    with pytest.raises(DataFormatError, match=told):
        fields.read_grid(change(levels))


def test_pascals_become_hectopascals(levels, caplog):
    grid, _ = fields.read_grid(levels.assign_coords(level=[50_000, 85_000]))
    assert grid.level.tolist() == [500, 850]
    assert "taken for Pa" in caplog.text


def test_units_of_levels_count_more_than_their_size(levels):
    low = levels.assign_coords(level=("level", [1000.0, 2000.0], {"units": "Pa"}))
    assert fields.read_grid(low)[0].level.tolist() == [10, 20]
    odd = low.assign_coords(level=("level", [1000.0, 2500.0], {"units": "hPa"}))
    assert fields.read_grid(odd)[0].level.tolist() == [1000, 2500]


@pytest.mark.acceptance("nn-compression", 9)
def test_geopotential_is_scaled_by_pressure():
    shift, scale = fields.pressure_scaling(np.array([500.0]))
    assert shift[0] == pytest.approx(49_301.6, abs=0.5)
    assert 0.9 * scale[0] == pytest.approx(16_748.9, abs=0.5)
    with pytest.raises(ConfigError, match="levels must be positive"):
        fields.pressure_scaling(np.zeros(1))


def test_a_fitted_network_is_the_field(waves, coded):
    report = coded.report(waves)
    assert report.wrmse < 0.5 * float(waves.std())
    error = coded.decode().to_numpy().astype(np.float64) - waves.to_numpy()
    weights = np.cos(np.deg2rad(waves["latitude"].to_numpy()))[:, None]
    mean = (weights * error**2).sum() / (weights * np.ones_like(error)).sum()
    assert report.wrmse == pytest.approx(np.sqrt(mean))
    assert report.largest == pytest.approx(np.abs(error).max())


@pytest.mark.acceptance("nn-compression", 2)
def test_a_fresh_process_decodes_the_bytes_to_the_same_bits(coded, tmp_path):
    content = coded.to_bytes()
    (tmp_path / "field").write_bytes(content)
    code = (
        "import pathlib, numpy as np; from hpcjax import models; "
        "from hpcjax.compress import fields; "
        "content = pathlib.Path('field').read_bytes(); "
        "read = fields.CompressedField.from_bytes(content, models.CoordNetConfig); "
        "np.save('values.npy', read.decode().to_numpy())"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    values = np.load(tmp_path / "values.npy")
    assert np.array_equal(values, coded.decode().to_numpy())
    assert coded.nbytes == len(content)
    assert coded.ratio == 4 * values.size / len(content)


def test_axes_names_and_units_come_back(waves, coded):
    read = fields.CompressedField.from_bytes(coded.to_bytes(), models.CoordNetConfig)
    decoded = read.decode()
    xr.testing.assert_identical(decoded, decoded.copy(data=coded.decode().values))
    assert decoded.dims == waves.dims
    assert decoded.name == "waves"
    assert decoded.attrs == {"units": "K"}
    for dim in waves.dims:
        assert decoded[dim].equals(waves[dim])


@pytest.mark.parametrize("place", [0, 10, 200, -1])
def test_a_changed_byte_is_told(coded, place):
    content = bytearray(coded.to_bytes())
    content[place] ^= 4
    with pytest.raises(DataFormatError, match=r"begins with|checksum"):
        fields.CompressedField.from_bytes(bytes(content), models.CoordNetConfig)


def test_what_is_cut_or_of_another_kind_is_told(coded, waves):
    with pytest.raises(DataFormatError, match="truncated"):
        fields.unpack(coded.to_bytes()[:-1])
    other = fields.dct_encode(waves.to_numpy(), 3)
    with pytest.raises(DataFormatError, match="expected a network, found 'dct'"):
        fields.CompressedField.from_bytes(other, models.CoordNetConfig)
    with pytest.raises(DataFormatError, match="no MlpConfig"):
        fields.CompressedField.from_bytes(coded.to_bytes(), models.MlpConfig)


@pytest.mark.acceptance("nn-compression", 1)
@pytest.mark.parametrize(("width", "expected"), [(32, 128_084), (512, 13_813_844)])
def test_stored_arrays_have_the_published_bytes(width, expected):
    init = models.coord_net(width=width).init
    shapes = jax.eval_shape(init, jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    stored = _network.store(*zeros, "mixed")
    # Frequencies are drawn again, and scales are of levels.
    assert trees.num_bytes(stored) + 4 * (16 + 128 + 3 * 128 + 4) == expected


@pytest.mark.acceptance("nn-compression", 6)
def test_rounding_costs_next_to_nothing(waves, fitted):
    rounded, whole = fitted
    # The blocks alone, as published, and all that `coded` has.
    params, statistics = STORE(whole.params, whole.statistics, "mixed")
    part = dataclasses.replace(whole, params=params, statistics=statistics)
    before = whole.report(waves).wrmse
    assert part.report(waves).wrmse == pytest.approx(before, rel=0.02)
    assert rounded.report(waves).wrmse == pytest.approx(before, rel=0.02)
    assert part.nbytes > rounded.nbytes


def test_a_part_is_decoded_alone(waves, coded):
    whole = coded.decode()
    part = coded.decode({"time": "1979-03", "longitude": slice(0, 90)})
    wanted = whole.sel(time="1979-03", longitude=slice(0, 90))
    xr.testing.assert_allclose(part, wanted, atol=1e-6)
    one = coded.decode({"time": waves["time"][2]})
    assert one.dims == ("latitude", "longitude")


def test_any_point_has_a_value(waves, coded):
    whole = coded.decode().to_numpy()
    times, lat, lon = (waves[dim].to_numpy() for dim in waves.dims)
    found = coded.sample(times[:2, None], 0, lat[3], lon[None, :5])
    np.testing.assert_allclose(found, whole[:2, 3, :5], atol=1e-5)
    first, second = coded.sample(times[3], 0, 12.3, np.array([0, 360]))
    assert first == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda f: f.isel(latitude=slice(None, None, -1)), "latitude differs.*revers"),
        (lambda f: f.assign_coords(longitude=f["longitude"] + 1), "longitude differs"),
        (
            lambda f: f.assign_coords(time=f["time"] + np.timedelta64(1, "D")),
            r"time differs: compressed values have 12 from 1979-01-01",
        ),
        (lambda f: f.isel(time=0), "have no coordinate time"),
        (lambda f: f.assign_attrs(units="degC"), "values are in K, truth in degC"),
    ],
)
def test_a_truth_of_other_places_or_times_is_refused(waves, coded, change, told):
    with pytest.raises(DataFormatError, match=told):
        coded.report(change(waves))


def test_a_point_outside_of_the_field_is_refused(waves, coded):
    time, lat = waves["time"].to_numpy()[0], float(waves["latitude"][0])
    # Within the cells that reach the poles.
    assert np.isfinite(coded.sample(time, 0, [90.0, lat, -90.0], 0)).all()
    for point, told in (
        ((np.datetime64("1978-12-31"), 0, lat, 0), "time must be from 1979-01-01"),
        ((np.datetime64("1980-02-01"), 0, lat, 0), "time must be from"),
        ((time, 0, 91.0, 0), "latitude must be from -90.0 to 90.0: got 91.0"),
        ((time, 0, np.nan, 0), "latitude must be"),
    ):
        with pytest.raises(DataFormatError, match=told):
            coded.sample(*point)


def test_levels_are_scaled_each_by_itself(levels):
    field = levels * xr.DataArray([1.0, 1000.0], dims="level")
    fit = dataclasses.replace(FIT, steps=1)
    wide = dataclasses.replace(NETWORK, level_features=2)
    coded = fields.compress(field, wide, fit, key=jax.random.key(0))
    spread = field.max(("time", "latitude", "longitude")) - field.min(
        ("time", "latitude", "longitude")
    )
    np.testing.assert_allclose(coded.scaling.scale, 0.7 * spread, rtol=1e-5)
    assert coded.decode().dims == field.dims
    # Between integers, too.
    first, half = coded.sample([1, 1.5], 700.0, 10.0, 5.0)
    assert first != half
    with pytest.raises(DataFormatError, match=r"level must be from 500.0 to 850.0"):
        coded.sample(1, [700.0, 925.0], 0.0, 0.0)
    read = fields.CompressedField.from_bytes(coded.to_bytes(), models.CoordNetConfig)
    assert np.array_equal(read.decode(), coded.decode())


def test_sizes_of_batches_are_powers_of_two():
    with pytest.raises(ConfigError, match="a power of two: got batch_size=100"):
        fields.FitConfig(batch_size=100)


def test_a_training_that_diverged_is_no_file(fitted):
    _, whole = fitted
    for lost in (np.nan, 1e6):
        params = jax.tree.map(lambda x, lost=lost: np.full_like(x, lost), whole.params)
        with pytest.raises(Diverged, match="numbers that float16 cannot hold"):
            STORE(params, whole.statistics, "mixed")


@pytest.mark.slow
@pytest.mark.acceptance("nn-compression", 8)
def test_wider_networks_are_nearer():
    field = data.make_waves(48, 16, 3) ** 2
    fit = dataclasses.replace(FIT, steps=400, batch_size=512, learning_rate=3e-3)

    def error(width):
        network = dataclasses.replace(NETWORK, width=width, depth=2)
        return np.mean(
            [
                fields.compress(field, network, fit, key=jax.random.key(seed))
                .report(field)
                .wrmse
                for seed in range(2)
            ]
        )

    errors = np.array([error(width) for width in (16, 48, 128)])
    assert (errors[1:] <= 0.98 * errors[:-1]).all()
