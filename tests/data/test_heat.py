"""Heat against the published recipe, and convolutions of JAX."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import data
from hpcjax.core import ConfigError
from hpcjax.data import heat


@pytest.mark.acceptance("smoe", 11)
def test_materials_lie_where_the_paper_has_them():
    materials = heat.place_materials(64, 3)
    digest = hashlib.sha256(materials.tobytes()).hexdigest()
    assert digest.startswith("fadef35d61530e76")
    shares = np.bincount(materials.ravel()) / materials.size
    np.testing.assert_allclose(shares, [0.3538, 0.2959, 0.3503], atol=5e-5)


def loop_of_starts(materials, runs, seed):
    """The published order of draws, a run after another."""
    rng = np.random.default_rng(seed)
    for _ in range(runs):
        field = rng.uniform(0.0, 0.1, materials.shape)
        count = rng.integers(1, 3, endpoint=True)
        for material in range(3):
            for row, column in rng.choice(
                np.argwhere(materials == material), size=count
            ):
                field[row, column] = 1.0
        yield field


def test_starts_are_drawn_in_the_published_order():
    materials = heat.place_materials(16, 3)
    expected = np.stack(list(loop_of_starts(materials, 5, 7)))
    np.testing.assert_array_equal(heat.draw_starts(materials, 5, 7), expected)


@pytest.mark.acceptance("smoe", 11)
def test_fields_are_those_of_a_convolution_for_each_material():
    cfg = heat.HeatConfig(size=16, runs=2, steps=30)
    fields = heat.simulate(cfg, "train", 2)
    materials = heat.place_materials(16, 3)
    stencils = np.zeros((3, 3, 1, 3), np.float32)
    for index, d in enumerate(cfg.diffusivities):
        stencils[:, :, 0, index] = [[0, d, 0], [d, 1 - 4 * d, d], [0, d, 0]]

    def step(u, _):
        each = jax.lax.conv_general_dilated(
            u[..., None],
            stencils,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            precision="highest",
        )
        u = jnp.take_along_axis(each, materials[None, ..., None].astype(int), -1)
        return u[..., 0], u[..., 0]

    _, expected = jax.lax.scan(step, fields[:, 0], length=30)
    np.testing.assert_allclose(
        fields[:, 1:], expected.transpose(1, 0, 2, 3), rtol=0, atol=1e-6
    )
    assert fields.dtype == np.float32
    assert (fields >= 0).all()
    assert (fields <= 1).all()
    np.testing.assert_array_equal(heat.simulate(cfg, "train", 2), fields)


@pytest.mark.acceptance("smoe", 11)
def test_heat_of_one_material_is_conserved_while_it_is_inside():
    field = np.zeros((41, 41))
    field[20, 20] = 1.0
    later = field
    for _ in range(20):  # it moves by one cell a step, and does not reach the border
        later = heat.diffuse(later, np.full(field.shape, 0.2))
    np.testing.assert_allclose(later.sum(), 1.0, rtol=1e-12)
    assert later.max() < 0.1
    np.testing.assert_allclose(later, later.T, rtol=1e-12)


@pytest.mark.acceptance("smoe", 11)
def test_a_field_that_stays_as_it_is_scores_well_at_most_points():
    dataset = data.HeatConfig(runs=1, holdout="test").load()
    batch = dataset.validation.gather(np.arange(len(dataset.validation)))
    close = np.abs(batch["x"] - batch["y"]) <= 0.01 * np.abs(batch["y"])
    assert len(close) == 2000
    assert 100 * close.mean() == pytest.approx(87.6, abs=1.5)


def test_pairs_follow_each_other_and_parts_differ():
    dataset = data.HeatConfig(size=8, runs=2, holdout_runs=2, steps=3).load()
    batch = dataset.train.gather(np.arange(6))
    for first in (0, 1, 3, 4):
        np.testing.assert_array_equal(batch["y"][first], batch["x"][first + 1])
    assert (batch["y"][2] != batch["x"][3]).any()
    held_out = dataset.validation.gather(np.arange(6))
    assert (held_out["x"] != batch["x"]).any((1, 2, 3)).all()
    test = data.HeatConfig(size=8, runs=2, holdout_runs=2, steps=3, holdout="test")
    tested = test.load().validation.gather(np.arange(6))
    assert (tested["x"] != held_out["x"]).any((1, 2, 3)).all()


@pytest.mark.acceptance("smoe", 12)
@pytest.mark.parametrize("diffusivities", [(0.1,), (0.1, 0.3), (0.0, 0.1)])
def test_diffusivities_are_stable(diffusivities):
    with pytest.raises(ConfigError, match=r"two numbers in \(0, 0.25\]"):
        data.HeatConfig(diffusivities=diffusivities)
