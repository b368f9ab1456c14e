"""The self-energy on meshes of simulated devices, against one device, and its bytes."""

import jax
import numpy as np
import pytest

from hpcjax import cost, sharding, solvers
from hpcjax.core import ConfigError
from hpcjax.solvers import tiling

KS, QS, ENERGIES, FREQUENCIES, ATOMS = 3, 3, 16, 4, 4
NEIGHBOURS = (np.arange(ATOMS)[:, None] + np.array([-1, 1])) % ATOMS
STEP = 0.1


def draw(rng, *shape):
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    return (
        draw(rng, 2, KS, ENERGIES, ATOMS, 2, 2),
        draw(rng, 2, QS, FREQUENCIES, ATOMS, 2, 2, 2),
        draw(rng, ATOMS, 2, 2, 2, 2),
    )


@pytest.fixture(scope="module")
def alone(given):
    step = jax.jit(solvers.electron_self_energy)
    return step(*given, NEIGHBOURS, STEP)


@pytest.mark.acceptance("omen", 5)
@pytest.mark.parametrize(
    ("te", "ta", "scheme"),
    [(2, 2, "tiles"), (4, 1, "tiles"), (1, 4, "tiles"), (2, 2, "rounds")],
)
def test_a_mesh_gives_what_one_device_does(given, alone, te, ta, scheme):
    """With 4 tiles of energies a window is as wide as one; with 1 there is none."""
    mesh = sharding.make_mesh({"te": te, "ta": ta})
    spread = solvers.spread_self_energy(mesh, NEIGHBOURS, scheme=scheme)
    found = jax.jit(spread)(*given, STEP)
    assert np.abs(found - alone).max() <= 1e-12 * np.abs(alone).max()


def test_windows_wider_than_a_tile(given):
    """8 tiles of 2 energies, 8 frequencies: windows come from four tiles."""
    rng = np.random.default_rng(1)
    bonds = draw(rng, 2, QS, 8, ATOMS, 2, 2, 2)
    want = jax.jit(solvers.electron_self_energy)(
        given[0], bonds, given[2], NEIGHBOURS, STEP
    )
    mesh = sharding.make_mesh({"te": 8, "ta": 1})
    spread = jax.jit(solvers.spread_self_energy(mesh, NEIGHBOURS))
    found = spread(given[0], bonds, given[2], STEP)
    assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max()


def test_tiles_hold_the_atoms_that_their_bonds_end_at():
    rng = np.random.default_rng(0)
    neighbours = rng.integers(0, 12, (12, 3))
    tiles = tiling.plan_tiles(neighbours, 3)
    for number in range(3):
        own = range(4 * number, 4 * number + 4)
        named = tiles.atoms[number][tiles.neighbours[number]]
        np.testing.assert_array_equal(named, neighbours[list(own)])
        wanted = {*own, *neighbours[list(own)].ravel()}
        assert set(tiles.atoms[number]) == wanted


@pytest.mark.parametrize(
    ("te", "ta", "scheme", "energies", "frequencies"),
    [
        (
            1,
            4,
            "tiles",
            706,
            70,
        ),  # the papers'; tiles of 2 atoms, one of them with none
        (4, 2, "tiles", 706, 70),
        (2, 2, "rounds", 14, 3),
    ],
)
def test_what_devices_do_not_divide_is_filled_up(te, ta, scheme, energies, frequencies):
    rng, atoms = np.random.default_rng(2), 6
    ring = (np.arange(atoms)[:, None] + np.array([-1, 1])) % atoms
    greens = draw(rng, 2, 1, energies, atoms, 1, 1)
    bonds = draw(rng, 2, 1, frequencies, atoms, 2, 1, 1)
    gradients = draw(rng, atoms, 2, 1, 1, 1)
    mesh = sharding.make_mesh({"te": te, "ta": ta})
    spread = jax.jit(solvers.spread_self_energy(mesh, ring, scheme=scheme))
    alone = jax.jit(solvers.electron_self_energy)
    want = alone(greens, bonds, gradients, ring, STEP)
    found = spread(greens, bonds, gradients, STEP)
    assert found.shape == want.shape
    assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max()


@pytest.mark.parametrize("devices", [5, 6, 8])
@pytest.mark.parametrize(("atoms", "energies"), [(6, 7), (7, 40)])
def test_the_best_tiles_run(devices, atoms, energies):
    sizes = cost.TransportSizes(1, 1, energies, 3, atoms, 2, 1, 1)
    te, ta, _ = cost.best_tiles(sizes, devices)
    ring = (np.arange(atoms)[:, None] + np.array([-1, 1])) % atoms
    spread = solvers.spread_self_energy(sharding.make_mesh({"te": te, "ta": ta}), ring)
    shapes = [
        (2, 1, energies, atoms, 1, 1),
        (2, 1, 3, atoms, 2, 1, 1),
        (atoms, 2) + (1,) * 3,
    ]
    given = [jax.ShapeDtypeStruct(shape, complex) for shape in shapes]
    assert jax.eval_shape(spread, *given, STEP).shape == shapes[0]


def test_meshes_that_cannot_be():
    with pytest.raises(ConfigError, match="TA=5, Na=4"):
        tiling.plan_tiles(NEIGHBOURS, 5)
    other = sharding.make_mesh({"data": 2})
    with pytest.raises(ConfigError, match="the mesh must have axes"):
        solvers.spread_self_energy(other, NEIGHBOURS)
