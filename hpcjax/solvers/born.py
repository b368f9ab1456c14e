"""Currents of electrons and phonons that scatter, by the self-consistent Born loop."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.solvers.bonds import from_atoms, to_atoms, to_bonds, to_scattering
from hpcjax.solvers.currents import Result, is_carried, measure, prepare
from hpcjax.solvers.devices import Device, check_device, is_traced
from hpcjax.solvers.fixed_point import fixed_point
from hpcjax.solvers.green import Blocks, Scattering, require_float64
from hpcjax.solvers.grids import Grid, check_grid, warn_of_lost
from hpcjax.solvers.scattering import (
    Algorithm,
    Flags,
    electron_self_energy,
    phonon_self_energy,
)


def scba(  # noqa: PLR0913 - an argument for each option
    device: Device,
    bias: float | Float[Array, ""],
    temperature: float | Float[Array, "..."],
    grid: Grid,
    *,
    mixing: float = 0.6,
    tolerance: float = 1e-10,
    limit: int = 200,
    feedback: bool = True,
    algorithm: Algorithm = "tiled",
    eta: float = 1e-5,
    flags: Flags | None = None,
) -> Result:
    """Returns the currents through a device whose electrons and phonons scatter.

    Green's functions give self-energies, which give Green's functions, until both agree
    (OMEN papers; equations in `green`, `scattering`). Leads have potentials ± bias / 2
    and no scattering. On the grid, current and energy are then conserved to rounding.

    Args:
      device: what is between the leads.
      bias: of the left lead over the right.
      temperature: k T, of both leads or (left, right).
      grid: energies and frequencies.
      mixing: share of new self-energies in each iteration.
      tolerance: of the largest relative change of a self-energy.
      limit: of iterations; without convergence `converged` is false, and the loop ends
        early, with NaN, where more flows than the leads can carry.
      feedback: whether electrons heat phonons; without, energy is lost.
      algorithm: of `electron_self_energy`.
      eta: imaginary part of the leads' energies.
      flags: terms of the self-energies.

    Raises:
      ConfigError: values that do not go together, or without float64. Traced values are
        not checked.

    Warns:
      UserWarning: a part of the electrons lies outside the grid.
    """
    checks.require_count(1, limit=limit)
    checks.require_choice("algorithm", algorithm, get_args(Algorithm))
    checks.require_positive(mixing=mixing, tolerance=tolerance, eta=eta)
    checks.require(mixing <= 1, "mixing must be at most 1", mixing=mixing)
    flags = Flags() if flags is None else flags
    flags = flags._replace(feedback=flags.feedback * feedback)
    given = _check(device, bias, temperature, grid)
    return _solve(
        *given, flags, mixing, tolerance, eta, limit=limit, algorithm=algorithm
    )


def ballistic(
    device: Device,
    bias: float | Float[Array, ""],
    temperature: float | Float[Array, "..."],
    grid: Grid,
    *,
    eta: float = 1e-5,
) -> Result:
    """Returns the currents without scattering; `jax.jvp` by the bias gives dI/dV.

    Args:
      device: what is between the leads.
      bias: of the left lead over the right.
      temperature: k T, of both leads or (left, right).
      grid: energies and frequencies.
      eta: imaginary part of the leads' energies.

    Raises:
      ConfigError: as `scba`.
    """
    checks.require_positive(eta=eta)
    return _solve_ballistic(*_check(device, bias, temperature, grid), eta)


def _check(
    device: Device, bias: Any, temperature: Any, grid: Grid
) -> tuple[Device, Array, Array, Grid]:
    """Checks what is not traced; returns arrays."""
    require_float64()
    if not is_traced(device, grid):
        check_device(device)
        check_grid(grid)
    if not is_traced(temperature):
        least = float(np.min(temperature))
        checks.require(least > 0, "temperature must be above 0", temperature=least)
    if not is_traced(device, grid, bias, temperature):
        warn_of_lost(device, grid, float(bias), float(np.max(temperature)))
    heat = jnp.broadcast_to(jnp.asarray(temperature, float), 2)
    return device, jnp.asarray(bias, float), heat, grid


@jax.jit
def _solve_ballistic(
    device: Device, bias: Array, temperature: Array, grid: Grid, eta: Array
) -> Result:
    electrons, phonons = prepare(device, bias, temperature, grid, eta)
    own, other = electrons.solve(None), phonons.solve(None)
    step = grid.energies[1] - grid.energies[0]
    none = jnp.zeros_like(own.correlation)
    return measure(electrons, phonons, own, other, none, step)


@functools.partial(jax.jit, static_argnames=("limit", "algorithm"))
def _solve(
    device: Device,
    bias: Array,
    temperature: Array,
    grid: Grid,
    flags: Flags,
    mixing: Array,
    tolerance: Array,
    eta: Array,
    *,
    limit: int,
    algorithm: Algorithm,
) -> Result:
    electrons, phonons = prepare(device, bias, temperature, grid, eta)
    orbitals, slabs = device.gradients.shape[-1], len(device.electrons.onsite)
    step = grid.energies[1] - grid.energies[0]
    bonds = (jnp.asarray(device.gradients), jnp.asarray(device.neighbours))

    def solve(state: tuple[Array, Array]) -> tuple[Blocks, Blocks]:
        sigma, stretched = state
        of_phonons = to_scattering(stretched, device, flags.between)
        own = electrons.solve(Scattering(from_atoms(sigma, slabs)))
        return own, phonons.solve(of_phonons)

    def scatter(state: tuple[Array, Array]) -> tuple[Array, Array]:
        own, other = solve(state)
        greens = to_atoms(own.correlation, orbitals)
        stretch = to_bonds(other, device)
        momenta, frequencies = stretch.shape[1:3]
        found = (
            electron_self_energy(
                greens, stretch, *bonds, step, algorithm=algorithm, flags=flags
            ),
            phonon_self_energy(
                greens,
                *bonds,
                step,
                momenta=momenta,
                frequencies=frequencies,
                flags=flags,
            ),
        )
        # What the leads cannot carry is no number, and ends the loop.
        carried = is_carried(electrons, own)
        return jax.tree.map(lambda x: jnp.where(carried, x, jnp.nan), found)

    found = fixed_point(
        scatter,
        _zeros(device, grid),
        mixing=mixing,
        tolerance=tolerance,
        limit=limit,
    )
    own, other = solve(found.value)
    scattering = from_atoms(found.value[0], slabs)
    result = measure(electrons, phonons, own, other, scattering, step)
    return result._replace(
        residuals=found.residuals,
        iterations=found.iterations,
        converged=result.converged & found.converged,
    )


def _zeros(device: Device, grid: Grid) -> tuple[Array, Array]:
    momenta, qs = (x.onsite.shape[1] for x in (device.electrons, device.phonons))
    atoms, bonds, directions, orbitals, _ = device.gradients.shape
    electrons = (2, momenta, len(grid.energies), atoms, orbitals, orbitals)
    phonons = (2, qs, len(grid.frequencies), atoms, bonds, directions, directions)
    return jnp.zeros(electrons, complex), jnp.zeros(phonons, complex)
