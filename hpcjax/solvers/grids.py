"""Grids of energies and frequencies, and what of a device lies outside of them."""

import functools
import warnings
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from hpcjax.core import checks
from hpcjax.solvers.devices import Device, Slabs


class Grid(NamedTuple):
    """Energies and frequencies of one step, see `make_grid`.

    Attributes:
      energies: E₀ + n ΔE, increasing.
      frequencies: m ΔE, m = 1, 2, ...
    """

    energies: Float[Any, " energies"]
    frequencies: Float[Any, " frequencies"]


def make_grid(low: float, step: float, energies: int, frequencies: int) -> Grid:
    """Makes a grid of so many energies from the lowest on, and frequencies.

    Examples:
      >>> make_grid(-1.0, 0.5, 4, 2).frequencies.tolist()
      [0.5, 1.0]
    """
    checks.require_positive(step=step)
    checks.require_count(2, energies=energies)
    checks.require_count(1, frequencies=frequencies)
    first = low + step * np.arange(energies)
    return Grid(first, step * np.arange(1, frequencies + 1))


def check_grid(grid: Grid) -> None:
    """Checks energies and frequencies.

    Raises:
      ConfigError: energies that are not equally spaced, or frequencies that are not 1,
        2, ... times their step, or as many as energies.
    """
    energies, frequencies = np.asarray(grid.energies), np.asarray(grid.frequencies)
    steps = np.diff(energies)
    # Differences round as energies do, which no unit may hide.
    rounding = 1e-12 * np.abs(energies).max()
    close = functools.partial(np.allclose, rtol=1e-5, atol=rounding)
    good = len(energies) > 1 and close(steps, steps[0]) and steps[0] > 0
    rule = "energies must increase in equal steps"
    checks.require(bool(good), rule, steps=[*map(float, np.unique(steps)[:5])])
    wanted = steps[0] * np.arange(1, len(frequencies) + 1)
    checks.require(
        bool(close(frequencies, wanted)),
        "frequencies must be 1, 2, ... times the step of energies, or energy is lost",
        frequencies=frequencies.tolist(),
        step=float(steps[0]),
    )
    rule = "frequencies must be fewer than energies"
    counts = {"frequencies": len(frequencies), "energies": len(energies)}
    checks.require(len(frequencies) < len(energies), rule, **counts)


def lost_share(device: Device, grid: Grid, bias: float, temperature: float) -> float:
    """Returns the share of electrons that lie outside the grid's energies.

    Of the levels of the device without its leads, filled as in the fuller lead; all of
    them, of a dense matrix, which takes long for many thousand orbitals.
    """
    levels = np.linalg.eigvalsh(_join(device.electrons))
    filled = 1 / (
        1 + np.exp(np.clip((levels - abs(bias) / 2) / temperature, -700, 700))
    )
    outside = (levels < grid.energies[0]) | (levels > grid.energies[-1])
    return float((filled * outside).sum() / filled.sum())


def _join(slabs: Slabs) -> np.ndarray:
    """Returns the whole matrix, [momenta, slabs · n, slabs · n]."""
    onsite, coupling = np.asarray(slabs.onsite), np.asarray(slabs.coupling)
    count, momenta, n, _ = onsite.shape
    whole = np.zeros((momenta, count, n, count, n), complex)
    for i in range(count):
        whole[:, i, :, i] = onsite[i]
    for i in range(count - 1):
        whole[:, i, :, i + 1] = coupling[i]
        whole[:, i + 1, :, i] = coupling[i].conj().swapaxes(-1, -2)
    return whole.reshape(momenta, count * n, count * n)


def warn_of_lost(device: Device, grid: Grid, bias: float, temperature: float) -> None:
    """Warns if more than a thousandth of the electrons lies outside the grid."""
    share = lost_share(device, grid, bias, temperature)
    if share > 1e-3:
        low, high = float(grid.energies[0]), float(grid.energies[-1])
        warnings.warn(
            f"{100 * share:.2g} % of the electrons lie outside the energies {low:g} to "
            f"{high:g} and carry no current: widen the grid",
            stacklevel=3,
        )
