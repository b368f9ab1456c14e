"""Slabs of several atoms of unequal masses: from blocks to bonds and back, by hand."""

import dataclasses

import numpy as np
import pytest

from hpcjax import solvers
from hpcjax.solvers import bonds
from hpcjax.solvers.green import Blocks

SLABS, WAYS = 3, 2  # of a ribbon of 6 atoms a slab


@pytest.fixture(scope="module")
def device():
    made = solvers.ribbon(SLABS, 3, "armchair")
    rng = np.random.default_rng(0)
    return dataclasses.replace(made, masses=rng.uniform(0.5, 2.0, len(made.masses)))


def pairs(device):
    for a, ends in enumerate(device.neighbours):
        for place, b in enumerate(ends):
            yield a, place, b


def draw(*shape):
    rng = np.random.default_rng(1)
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def cut(whole):
    """Diagonal and upper blocks of slabs, [slabs, 2, n, n], of [2, N, N]."""
    n = whole.shape[-1] // SLABS
    blocks = whole.reshape(2, SLABS, n, SLABS, n).transpose(1, 3, 0, 2, 4)
    places = np.arange(SLABS)
    return blocks[places, places], blocks[places[:-1], places[1:]]


def test_bonds_stretch_by_what_both_atoms_do(device):
    size = WAYS * len(device.masses)
    skew = draw(2, size, size)
    skew = skew - skew.conj().swapaxes(1, 2)
    own, upper = cut(skew)
    given = Blocks(own, upper, upper, own, upper)
    found = np.asarray(bonds.to_bonds(given, device))
    # Displacements are over roots of masses.
    root = np.sqrt(np.repeat(device.masses, WAYS))
    d = (skew / root / root[:, None]).reshape(2, -1, WAYS, size // WAYS, WAYS)
    for a, place, b in pairs(device):
        want = d[:, a, :, a] + d[:, b, :, b] - d[:, a, :, b] - d[:, b, :, a]
        np.testing.assert_allclose(found[:, a, place], want, atol=1e-12)


def test_what_bonds_scatter_goes_to_both_atoms(device):
    given = draw(2, *device.neighbours.shape, WAYS, WAYS)
    found = bonds.to_scattering(given, device)
    atoms = len(device.masses)
    want = np.zeros((2, atoms, WAYS, atoms, WAYS), complex)
    for a, place, b in pairs(device):
        for first, second, sign in ((a, a, 1), (b, b, 1), (a, b, -1), (b, a, -1)):
            mass = np.sqrt(device.masses[first] * device.masses[second])
            want[:, first, :, second] += sign * given[:, a, place] / mass
    own, upper = cut(want.reshape(2, atoms * WAYS, atoms * WAYS))
    np.testing.assert_allclose(found.diagonal, own, atol=1e-12)
    np.testing.assert_allclose(found.upper, upper, atol=1e-12)


def test_blocks_of_atoms_are_those_of_slabs():
    orbitals, per_slab = 2, 3
    slabs = draw(SLABS, 2, 1, 4, orbitals * per_slab, orbitals * per_slab)
    found = np.asarray(bonds.to_atoms(slabs, orbitals))
    for atom in range(SLABS * per_slab):
        slab, place = divmod(atom, per_slab)
        rows = slice(orbitals * place, orbitals * (place + 1))
        np.testing.assert_array_equal(
            found[..., atom, :, :], slabs[slab][..., rows, rows]
        )
    back = np.asarray(bonds.from_atoms(found, SLABS))
    np.testing.assert_array_equal(bonds.to_atoms(back, orbitals), found)
    assert np.count_nonzero(back) == found.size
