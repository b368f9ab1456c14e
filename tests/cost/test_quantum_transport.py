"""The papers' tables of bytes and operations, and the search for tiles."""

import numpy as np
import pytest

from hpcjax import cost
from hpcjax.core import ConfigError

TIB, PFLOP = 2**40, 1e15
MOMENTA = (3, 5, 7, 9, 11)


def sizes(momenta):
    return cost.TransportSizes(momenta, momenta)


@pytest.mark.acceptance("omen", 8)
@pytest.mark.parametrize(
    ("momenta", "original", "tiles"),
    [
        (3, 32.11, 0.54),
        (5, 89.18, 1.22),
        (7, 174.80, 2.17),
        (9, 288.95, 3.38),
        (11, 431.65, 4.86),
    ],
)
def test_weak_scaling_is_the_papers(momenta, original, tiles):
    found = [
        cost.sse_volume(sizes(momenta), scheme, momenta, 256) / TIB
        for scheme in ("original", "tiles")
    ]
    np.testing.assert_allclose(found, [original, tiles], atol=0.01)


@pytest.mark.acceptance("omen", 8)
def test_strong_scaling_is_the_papers():
    processes = (224, 448, 896, 1792, 2688)
    found = [
        [cost.sse_volume(sizes(7), scheme, 7, p // 7) / TIB for p in processes]
        for scheme in ("original", "tiles")
    ]
    wanted = [108.24, 117.75, 136.76, 174.80, 212.84], [0.95, 1.13, 1.48, 2.17, 2.87]
    np.testing.assert_allclose(found, wanted, atol=0.01)


@pytest.mark.acceptance("omen", 8)
def test_operations_are_the_papers():
    found = [
        [cost.sse_flops(sizes(m), scheme) / PFLOP for m in MOMENTA]
        for scheme in ("original", "tiles")
    ]
    wanted = (
        [24.41, 67.80, 132.89, 219.67, 328.15],
        [12.38, 34.19, 66.85, 110.36, 164.71],
    )
    np.testing.assert_allclose(found, wanted, rtol=5e-4)
    small = cost.TransportSizes(3, 3, 64, 8, 32, 4, 4, 3)
    ratio = cost.sse_flops(small, "original") / cost.sse_flops(small, "tiles")
    assert round(ratio, 2) == 1.78


@pytest.mark.acceptance("omen", 8)
def test_the_best_tiles():
    found = [cost.best_tiles(sizes(7), p) for p in (224, 448, 896, 1792, 2688)]
    assert [plan.te for plan in found] == [2, 2, 4, 7, 7]
    volumes = [plan.bytes / TIB for plan in found[:3]]
    np.testing.assert_allclose(volumes, [0.653, 0.940, 1.363], atol=5e-4)


@pytest.mark.acceptance("omen", 8)
def test_the_best_tiles_are_those_of_all():
    rng = np.random.default_rng(0)
    for _ in range(50):
        momenta, energies, atoms = rng.integers((1, 20, 20), (12, 900, 900))
        qs, frequencies, bonds, orbitals = rng.integers(1, 20, 4)
        made = cost.TransportSizes(
            *map(int, (momenta, qs, energies, frequencies, atoms, bonds, orbitals))
        )
        processes = int(rng.integers(1, 300))
        window = 2 * made.frequencies
        volumes = {
            (te, ta): (te * ta)
            * (made.atoms / ta + made.bonds)
            * (
                made.momenta * (made.energies / te + window) * made.orbitals**2
                + made.qs * made.frequencies * made.bonds * 9
            )
            for te in range(1, made.energies + 1)
            for ta in range(1, made.atoms + 1)
            if te * ta == processes
        }
        if volumes:
            plan = cost.best_tiles(made, processes)
            assert plan.bytes == pytest.approx(64 * min(volumes.values()), rel=1e-12)
            assert volumes[plan[:2]] == pytest.approx(min(volumes.values()))


@pytest.mark.parametrize(("te", "ta"), [(707, 1), (1, 4865), (0, 1)])
def test_tiles_that_hold_nothing_are_refused(te, ta):
    with pytest.raises(ConfigError, match="tiles must hold an energy and an atom"):
        cost.sse_volume(sizes(3), "tiles", te, ta)


def test_processes_that_no_tiles_have_are_refused():
    with pytest.raises(ConfigError, match="processes=4871"):
        cost.best_tiles(sizes(3), 4871)
