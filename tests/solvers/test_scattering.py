"""Self-energies in four orders of sums, against loops in numpy as they are defined."""

import itertools

import jax
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from hpcjax import solvers
from hpcjax.core import ConfigError
from hpcjax.solvers import scattering

KS, QS, ENERGIES, FREQUENCIES = 6, 3, 6, 2  # k + q and k - q differ
ATOMS, BONDS, DIRECTIONS, ORBITALS = 3, 2, 2, 2
STEP = 0.1
ALGORITHMS = ("sequential", "batched", "fissioned", "tiled")


def draw(rng, *shape):
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    greens = draw(rng, 2, KS, ENERGIES, ATOMS, ORBITALS, ORBITALS)
    bonds = draw(rng, 2, QS, FREQUENCIES, ATOMS, BONDS, DIRECTIONS, DIRECTIONS)
    gradients = draw(rng, ATOMS, BONDS, DIRECTIONS, ORBITALS, ORBITALS)
    return greens, bonds, gradients, np.array([[1, 2], [0, 2], [0, 1]])


def terms():
    return itertools.product(
        *map(range, (KS, ENERGIES, QS, FREQUENCIES, ATOMS, BONDS)),
        *map(range, (DIRECTIONS, DIRECTIONS)),
    )


def electrons_by_hand(greens, bonds, gradients, neighbours):
    sigma = np.zeros_like(greens)
    for both in (0, 1):
        for k, e, q, w, a, b, i, j in terms():
            m, back = gradients[a, b, i], gradients[a, b, j].conj().T
            end, apart = neighbours[a, b], w + 1
            if e >= apart:
                g = greens[both, (k - 2 * q) % KS, e - apart, end]
                sigma[both, k, e, a] += m @ g @ back * bonds[both, q, w, a, b, i, j]
            if e + apart < ENERGIES:
                g = greens[both, (k + 2 * q) % KS, e + apart, end]
                sigma[both, k, e, a] += m @ g @ back * bonds[1 - both, q, w, a, b, j, i]
    return 1j * STEP / (2 * np.pi * QS) * sigma


@pytest.mark.acceptance("omen", 5)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_orders_of_sums_give_what_is_defined(given, algorithm):
    want = electrons_by_hand(*given)
    step = jax.jit(solvers.electron_self_energy, static_argnames="algorithm")
    found = step(*given, STEP, algorithm=algorithm)
    assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max()


def test_phonons_see_what_is_defined(given):
    greens, _, gradients, neighbours = given
    bonds = np.zeros_like(given[1])
    for both in (0, 1):
        for k, e, q, w, a, b, i, j in terms():
            if e + w + 1 < ENERGIES:
                above = greens[both, (k + 2 * q) % KS, e + w + 1, a]
                below = greens[1 - both, k, e, neighbours[a, b]]
                m = gradients[a, b]
                loop = m[i].conj().T @ above @ m[j] @ below
                bonds[both, q, w, a, b, i, j] += np.trace(loop)
    want = -2j * STEP / (2 * np.pi * KS) * bonds
    step = jax.jit(
        solvers.phonon_self_energy, static_argnames=("momenta", "frequencies")
    )
    sizes = {"momenta": QS, "frequencies": FREQUENCIES}
    found = step(greens, gradients, neighbours, STEP, **sizes)
    assert np.abs(found - want).max() <= 1e-12 * np.abs(want).max()


@pytest.mark.acceptance("omen", 5)
def test_the_public_benchmark_is_the_same_sum(given):
    """Its Σ is Σ G_b(k, E − ω) ∇H^i ∇H^j D^ij with ω from 0 on, and no momenta in G."""
    greens, bonds, gradients, neighbours = given
    greens, bonds = greens[0], bonds[0]
    want = np.zeros_like(greens)
    for k, e, q, w, a, b, i, j in terms():
        if e - w >= 0:
            turned = greens[k - q, e - w, neighbours[a, b]] @ gradients[a, b, i]
            want[k, e, a] += turned @ (gradients[a, b, j] * bonds[q, w, a, b, i, j])
    # Our q are every second k: a q grid as fine as the k grid, of which two are used.
    fine = np.zeros((KS, *bonds.shape[1:]), complex)
    fine[:QS] = bonds
    left = np.einsum("keabop,abipr->akebior", greens[:, :, neighbours], gradients)
    right = np.einsum("qwabij,abjor->aqwbior", fine, gradients)
    before = [(0, 0)] * left.ndim
    before[2] = (FREQUENCIES - 1, 1)  # our ω begin at 1
    found = jax.jit(jax.vmap(scattering.sum_shifted))(np.pad(left, before), right)
    ours = np.moveaxis(np.asarray(found), 0, 2)
    assert np.abs(ours - want).max() <= 1e-12 * np.abs(want).max()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"algorithm": "tyled"}, "algorithm"),
        ({"bonds": np.zeros((2, 4, 2, 3, 2, 2, 2), complex)}, "Nk=6, Nq=4"),
    ],
)
def test_what_does_not_go_together(given, change, match):
    names = ("greens", "bonds", "gradients", "neighbours")
    arguments = dict(zip(names, given, strict=True)) | change
    with pytest.raises((ConfigError, TypeCheckError), match=match):
        solvers.electron_self_energy(**arguments, step=STEP)
