"""Electrons and phonons at the leads, and the currents of their Green's functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex, Float, Int

from hpcjax.solvers.devices import Device, Slabs, dagger
from hpcjax.solvers.green import (
    Blocks,
    Boundary,
    Kind,
    Scattering,
    boundary,
    correlations,
)
from hpcjax.solvers.grids import Grid

SPIN = 2


class Result(NamedTuple):
    """What flows, into the device at a contact and to the right between slabs.

    With e = 1, ħ = 1: a current of 1 / (2π) for each channel and unit of bias, spins
    counted.

    Attributes:
      current: of electrons at the left and the right contact.
      energy: of electrons there.
      heat: of phonons there; the sum with `energy` is zero.
      cuts: coherent current of electrons from a slab to the next.
      assisted: what the coherent current gains in each slab from others by phonons'
        help: that of a cut is the left contact's with these of all slabs before it.
      heat_cuts: coherent heat of phonons from a slab to the next.
      residuals: of the iterations.
      iterations: their number.
      converged: whether the last residual is at most the tolerance, and the leads'
        surfaces have converged, too.
      electrons: their Green's functions.
      phonons: theirs.
    """

    current: Float[Array, " 2"]
    energy: Float[Array, " 2"]
    heat: Float[Array, " 2"]
    cuts: Float[Array, " between"]
    assisted: Float[Array, " slabs"]
    heat_cuts: Float[Array, " between"]
    residuals: Float[Array, " limit"]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]
    electrons: Blocks
    phonons: Blocks

    def imbalance(self) -> Float[Any, ""]:
        """Returns |I_L + I_R| / |I_L|."""
        return jnp.abs(self.current.sum() / self.current[0])

    def energy_ratio(self) -> Float[Any, ""]:
        """Returns phonons' heat over electrons' energy, −1 if none is lost."""
        return self.heat.sum() / self.energy.sum()

    def flatness(self) -> Float[Any, ""]:
        """Returns how far coherent and assisted current vary along the device."""
        inside = self.cuts - jnp.cumsum(self.assisted)[:-1]
        along = jnp.array([self.current[0], *inside, -self.current[1]])
        return (along.max() - along.min()) / jnp.abs(self.current[0])


class Particles(NamedTuple):
    """What does not change in the loop, of electrons or phonons.

    Attributes:
      slabs: their matrices.
      energies: E or ω.
      kind: which of both.
      ends: what leads do.
      leads: Σ^< and Σ^> of leads, [lesser or greater, side, momenta, energies, n, n].
    """

    slabs: Slabs
    energies: Float[Array, " energies"]
    kind: Kind
    ends: Boundary
    leads: Complex[Array, "2 2 momenta energies n n"]

    def solve(self, scattering: Scattering | None) -> Blocks:
        """Returns Green's functions."""
        return correlations(
            self.slabs, self.energies, self.kind, self.leads, self.ends, scattering
        )


def prepare(
    device: Device, bias: Array, temperature: Array, grid: Grid, eta: Array
) -> tuple[Particles, Particles]:
    """Returns electrons and phonons with what leads put into them.

    Σ^<_c = i f Γ, Σ^>_c = −i (1 − f) Γ, Π^<_c = −i n Γ, Π^>_c = −i (1 + n) Γ with the
    distributions of Fermi and Bose.

    Args:
      device: between the leads.
      bias: of the left lead over the right.
      temperature: of the left and of the right one.
      grid: energies and frequencies.
      eta: imaginary part of the leads' energies.
    """
    kinds: tuple[tuple[Slabs, Any, Kind], ...] = (
        (device.electrons, grid.energies, "electrons"),
        (device.phonons, grid.frequencies, "phonons"),
    )
    potential = jnp.array([0.5, -0.5]) * bias
    made = []
    for slabs, given, kind in kinds:
        energies = jnp.asarray(given)
        ends = boundary(slabs, energies, kind, eta)
        if kind == "electrons":
            x = (energies - potential[:, None]) / temperature[:, None]
            full, free = jax.nn.sigmoid(-x), -jax.nn.sigmoid(x)
        else:
            full = -1 / jnp.expm1(energies / temperature[:, None])
            free = full - 1
        shares = jnp.stack([full, free])[:, :, None, :, None, None]
        made.append(Particles(slabs, energies, kind, ends, 1j * shares * ends.rate))
    return made[0], made[1]


def measure(
    electrons: Particles,
    phonons: Particles,
    own: Blocks,
    other: Blocks,
    scattering: Complex[Array, "slabs 2 momenta energies n n"],
    step: Array,
) -> Result:
    """Returns the currents of Green's functions, as of a loop of no iteration.

    I_c = g_s <Σ ΔE / 2π tr[Σ^<_c G^> − Σ^>_c G^<]>, with E for energy, for phonons with
    ω, without g_s and with the other sign.

    Args:
      electrons: at the leads.
      phonons: at the leads.
      own: Green's functions of electrons.
      other: of phonons.
      scattering: Σ^< and Σ^> in each slab.
      step: ΔE.
    """
    unit = step / (2 * jnp.pi)
    rates = SPIN * unit * _at_contacts(electrons, own)
    heat = -unit * phonons.energies * _at_contacts(phonons, other)
    return Result(
        current=rates.mean(1).sum(1),
        energy=(electrons.energies * rates).mean(1).sum(1),
        heat=heat.mean(1).sum(1),
        cuts=SPIN * unit * _between(electrons, own).mean(1).sum(1),
        assisted=SPIN * unit * _lost(scattering, own.correlation).mean(1).sum(1),
        heat_cuts=-unit * (phonons.energies * _between(phonons, other)).mean(1).sum(1),
        residuals=jnp.zeros(0),
        iterations=jnp.asarray(0),
        converged=electrons.ends.converged.all() & phonons.ends.converged.all(),
        electrons=own,
        phonons=other,
    )


def is_carried(electrons: Particles, own: Blocks) -> Bool[Array, ""]:
    """Says whether leads can carry the current: a channel an orbital and energy.

    More, by over a thousandth of it, flows only where correlations are none of a state.
    """
    rates = jnp.abs(_at_contacts(electrons, own).mean(1).sum(1))
    most = own.correlation.shape[-1] * len(electrons.energies)
    return rates.max() <= 1.001 * most


def _at_contacts(particles: Particles, greens: Blocks) -> Array:
    """Returns tr[Σ^< G^> − Σ^> G^<] of each contact, [2, momenta, energies]."""
    leads = particles.leads.swapaxes(0, 1)
    ends = jnp.stack([greens.correlation[0], greens.correlation[-1]])
    return _lost(leads, ends)


def _lost(sigma: Array, greens: Array) -> Array:
    """Returns tr[Σ^< G^> − Σ^> G^<] of arrays with both in dimension 1."""
    return (
        jnp.einsum("s...nm,s...mn->s...", sigma[:, 0], greens[:, 1]).real
        - jnp.einsum("s...nm,s...mn->s...", sigma[:, 1], greens[:, 0]).real
    )


def _between(particles: Particles, greens: Blocks) -> Array:
    """Returns 2 Re tr[H_i,i+1 G^<_i+1,i], [slabs − 1, momenta, energies]."""
    coupling = jnp.asarray(particles.slabs.coupling)
    below = -dagger(greens.correlation_upper[:, 0])
    return 2 * jnp.einsum("skmn,sk...nm->sk...", coupling, below).real
