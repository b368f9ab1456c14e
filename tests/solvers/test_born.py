"""Currents of the Born loop: what is conserved, and what mistakes break it.

One junction, whose program is compiled once for all of its tests.
"""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from hpcjax import solvers
from hpcjax.core import ConfigError
from hpcjax.solvers import Flags
from hpcjax.solvers.grids import check_grid

GRID = solvers.make_grid(-1.1, 0.02, 110, 5)
KT, BIAS = 0.025, 0.3


def junction(**changes):
    return dataclasses.replace(solvers.junction(), **changes)


def solve(device=None, bias=BIAS, **options):
    device = solvers.junction() if device is None else device
    return solvers.scba(device, bias, KT, GRID, **options)


@pytest.fixture(scope="module")
def right():
    return solve()


def star(x):
    return x.conj().swapaxes(-1, -2)


@pytest.mark.acceptance("omen", 6)
def test_current_and_energy_are_conserved(right):
    assert right.converged
    assert right.imbalance() < 1e-8
    assert abs(right.energy_ratio() + 1) < 1e-6
    assert right.flatness() < 1e-6
    # Not because nothing happens.
    assert right.energy.sum() > 1e-4
    assert jnp.abs(right.assisted).max() > 1e-3
    assert (
        right.current[0]
        < 0.9 * solvers.ballistic(solvers.junction(), BIAS, KT, GRID).current[0]
    )


def test_a_current_that_is_not_flat_is_seen(right):
    for name, at in (("cuts", 1), ("assisted", 0), ("current", 1)):
        own = getattr(right, name)
        bent = right._replace(**{name: own.at[at].add(0.25 * right.current[0])})
        np.testing.assert_allclose(bent.flatness(), 0.25, rtol=1e-6)


@pytest.mark.acceptance("omen", 6)
@pytest.mark.parametrize(
    "flags",
    [
        Flags(swapped=1.0),
        Flags(transposed=0.0),
        Flags(spin=1.0),
        Flags(between=-1.0),
    ],
    ids=["swapped", "transposed", "spin", "between"],
)
def test_mistakes_break_it(flags):
    found = solve(flags=flags)
    broken = found.imbalance() > 1e-6 or abs(found.energy_ratio() + 1) > 1e-4
    assert broken or not found.converged


@pytest.mark.acceptance("omen", 6)
def test_unequal_masses_conserve_too():
    found = solve(junction(masses=np.array([1.0, 1.5, 0.8, 1.2])))
    assert found.converged
    assert found.imbalance() < 1e-8
    assert abs(found.energy_ratio() + 1) < 1e-6


def test_four_times_the_mass_is_half_the_gradient():
    heavy = solve(junction(masses=np.full(4, 4.0)))
    weak = solve(junction(gradients=solvers.junction().gradients / 2))
    np.testing.assert_allclose(heavy.current, weak.current, rtol=1e-8)


@pytest.mark.acceptance("omen", 12)
def test_without_feedback_nothing_is_heated(right):
    found = solve(feedback=False)
    assert found.converged
    assert found.imbalance() < 1e-8
    assert found.energy.sum() > 1e-4
    assert abs(found.heat.sum()) < 1e-12


@pytest.mark.acceptance("omen", 4)
@pytest.mark.parametrize("which", ["electrons", "phonons"])
def test_retarded_and_correlation_functions_agree(right, which):
    for result in (right, solvers.ballistic(solvers.junction(), BIAS, KT, GRID)):
        blocks = getattr(result, which)
        spectral = blocks.retarded - star(blocks.retarded)
        apart = jnp.abs(spectral - (blocks.greater - blocks.lesser)).max()
        assert apart < 1e-10 * max(1, jnp.abs(spectral).max())
        sign = 1 if which == "electrons" else -1
        for value in (1j * blocks.greater, -1j * sign * blocks.lesser):
            least = np.linalg.eigvalsh(np.asarray(value)).min()
            assert least > -1e-9 * np.abs(value).max()


@pytest.mark.acceptance("omen", 7)
def test_nothing_flows_in_equilibrium():
    found = solve(bias=0.0)
    assert found.converged
    for each in (found.current, found.energy, found.heat):
        assert jnp.abs(each).max() < 1e-12
    for blocks, energies, sign in (
        (found.electrons, GRID.energies, 1),
        (found.phonons, GRID.frequencies, -1),
    ):
        spectral = 1j * (blocks.retarded - star(blocks.retarded))
        full = 1 / (np.exp(energies / KT) + sign)
        wrong = blocks.lesser - sign * 1j * full[:, None, None] * spectral
        assert jnp.abs(wrong).max() < 1e-10 * jnp.abs(spectral).max()


@pytest.mark.acceptance("omen", 9)
def test_weak_coupling_converges_geometrically_and_costs_its_square():
    device = solvers.junction(coupling=0.02)
    found = [
        solve(junction(gradients=device.gradients * scale), feedback=False)
        for scale in (1 / 4, 1 / 8, 1 / 16)
    ]
    free = solvers.ballistic(device, BIAS, KT, GRID).current[0]
    lost = np.log([abs(each.current[0] - free) for each in found])
    slopes = -np.diff(lost) / np.log(2)
    np.testing.assert_allclose(slopes, 2, atol=0.05)
    residuals = found[-1].residuals[1 : int(found[-1].iterations)]
    assert (residuals[1:] < 0.5 * residuals[:-1]).all()


@pytest.mark.acceptance("omen", 2)
def test_ballistic_currents_are_those_of_transmission():
    device = solvers.junction()
    found = solvers.ballistic(device, BIAS, KT, GRID)
    through = jax.jit(solvers.transmission)(device.electrons, GRID.energies, eta=1e-5)

    def fermi(potential):
        return 1 / (1 + np.exp((GRID.energies - potential) / KT))

    window = fermi(BIAS / 2) - fermi(-BIAS / 2)
    want = 2 / (2 * np.pi) * 0.02 * (through[0] * window).sum()
    np.testing.assert_allclose(found.current, [want, -want], rtol=1e-10)
    np.testing.assert_allclose(found.cuts, want, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.acceptance("omen", 2)
def test_quanta_of_conductance():
    """2 e²/h of electrons by the bias, π² k² T / 3h of phonons by the temperature."""
    device = solvers.chain(2)
    grid = solvers.make_grid(-0.8, 0.002, 800, 400)

    def currents(bias, kt):
        found = solvers.ballistic(device, bias, kt, grid, eta=1e-7)
        return found.current[0], found.heat[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # levels outside carry nothing here
        kt = jnp.array([0.04, 0.04])
        (_, _), (slope, _) = jax.jvp(currents, (0.0, kt), (1.0, 0 * kt))
        (_, _), (_, heat) = jax.jvp(currents, (0.0, kt), (0.0, jnp.array([1.0, 0.0])))
    np.testing.assert_allclose(slope, 2 / (2 * np.pi), rtol=1e-4)
    np.testing.assert_allclose(heat, np.pi * 0.04 / 6, rtol=0.01)


@pytest.mark.slow
@pytest.mark.acceptance("omen", 6)
@pytest.mark.parametrize("momenta", [(3, 3), (4, 2)])
def test_momenta_conserve_too(momenta):
    found = solve(solvers.junction(momenta=momenta))
    assert found.converged
    assert found.imbalance() < 1e-8
    assert abs(found.energy_ratio() + 1) < 1e-6
    assert found.flatness() < 1e-6


@pytest.mark.slow
def test_a_batch_of_biases_is_one_program(right):
    biases = jnp.array([0.1, BIAS])
    found = jax.jit(jax.vmap(lambda bias: solve(bias=bias)))(biases)
    assert found.converged.all()
    np.testing.assert_allclose(found.current[1], right.current, rtol=1e-9)
    assert found.current[0, 0] < found.current[1, 0]


def test_a_loop_that_ends_too_early_says_so():
    found = solve(tolerance=1e-30)
    assert not found.converged
    assert np.isfinite(found.residuals).all()


@pytest.mark.parametrize("flags", [Flags(scattering=-1.0), Flags(between=-3.0)])
def test_what_leads_cannot_carry_ends_the_loop(flags):
    """Particles that scattering makes: currents would be 1e15 after 200 iterations."""
    found = solve(flags=flags)
    assert not found.converged
    assert 1 < found.iterations < 10
    assert np.isnan(found.residuals[int(found.iterations) - 1])
    assert np.isnan(found.current).all()


def test_fixed_points_that_run_away_end():
    found = solvers.fixed_point(
        lambda x: 1e200 * x * x, jnp.ones(2), mixing=1.0, tolerance=1e-9, limit=50
    )
    assert not found.converged
    assert found.iterations < 50


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"limit": 0}, "limit must be an integer >= 1"),
        ({"mixing": 0.0}, "mixing must be finite and > 0"),
        ({"mixing": 1.5}, "mixing must be at most 1"),
    ],
)
def test_fixed_points_that_cannot_be_found(options, match):
    given = {"mixing": 0.5, "tolerance": 1e-9, "limit": 5} | options
    with pytest.raises(ConfigError, match=match):
        solvers.fixed_point(jnp.cos, jnp.ones(()), **given)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"grid": GRID._replace(frequencies=GRID.frequencies * 1.5)},
            "1, 2, ... times",
        ),
        ({"grid": GRID._replace(energies=GRID.energies**3)}, "in equal steps"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"algorithm": "tyled"}, "algorithm"),
        ({"mixing": 1.5}, "mixing must be at most 1"),
        ({"device": solvers.junction(momenta=(3, 2))}, "sub-grid"),
    ],
)
def test_bad_input_is_refused_before_it_is_compiled(options, match, compilations):
    given = {
        "device": solvers.junction(),
        "bias": BIAS,
        "temperature": KT,
        "grid": GRID,
    }
    with pytest.raises((ConfigError, TypeCheckError), match=match):
        solvers.scba(**(given | options))
    assert not compilations


@pytest.mark.parametrize("unit", [1.0, 1e-9, 1.6e-19])
def test_grids_are_checked_in_any_unit(unit):
    good = solvers.make_grid(-1.1 * unit, 0.02 * unit, 110, 5)
    check_grid(good)
    with pytest.raises(ConfigError, match="in equal steps"):
        check_grid(good._replace(energies=GRID.energies**3 * unit))
    with pytest.raises(ConfigError, match=r"1, 2, \.\.\. times"):
        check_grid(good._replace(frequencies=good.frequencies * 1.5))


def test_single_precision_is_refused():
    with jax.enable_x64(False), pytest.raises(ConfigError, match="needs float64"):
        solve()


def test_bands_outside_of_the_grid_are_told():
    narrow = solvers.make_grid(-0.3, 0.02, 110, 5)
    with pytest.warns(UserWarning, match=r"% of the electrons lie outside"):
        solvers.ballistic(solvers.junction(), BIAS, KT, narrow)
