"""From blocks of slabs to atoms and bonds, and back."""

import jax.numpy as jnp
from jaxtyping import Array, Complex

from hpcjax.solvers.devices import Device, dagger
from hpcjax.solvers.green import Blocks, Scattering


def to_atoms(
    blocks: Complex[Array, "slabs 2 momenta energies n n"], orbitals: int
) -> Complex[Array, "2 momenta energies atoms orbitals orbitals"]:
    """Returns an atom's own blocks."""
    per_slab = blocks.shape[-1] // orbitals
    cut = blocks.reshape(*blocks.shape[:-2], per_slab, orbitals, per_slab, orbitals)
    own = jnp.einsum("s...aoap->...saop", cut)
    return own.reshape(*own.shape[:3], -1, orbitals, orbitals)


def from_atoms(
    sigma: Complex[Array, "2 momenta energies atoms orbitals orbitals"], slabs: int
) -> Complex[Array, "slabs 2 momenta energies n n"]:
    """Returns blocks of slabs with those of atoms on the diagonal, and zeros."""
    *front, atoms, orbitals, _ = sigma.shape
    cut = sigma.reshape(*front, slabs, atoms // slabs, orbitals, orbitals)
    own = jnp.einsum("...saop,ab->s...aobp", cut, jnp.eye(atoms // slabs))
    return own.reshape(slabs, *front, *(atoms * orbitals // slabs,) * 2)


def _places(device: Device) -> tuple[Array, ...]:
    """Returns slabs and places of the atoms of bonds, for each of the four blocks."""
    slabs, (atoms, bonds) = len(device.phonons.onsite), device.neighbours.shape
    a = jnp.broadcast_to(jnp.arange(atoms)[:, None], (atoms, bonds))
    b = jnp.asarray(device.neighbours)
    first, second = jnp.stack([a, b, a, b]), jnp.stack([a, b, b, a])
    per_slab = atoms // slabs
    # Blocks stand in a band: of the slab before, of the slab itself, of the next.
    beside = second // per_slab - first // per_slab + 1
    return first // per_slab, beside, first % per_slab, second % per_slab


def _weights(device: Device) -> Array:
    """Returns 1 / √(m m') of each of the four blocks, with the sign of u_b − u_a."""
    root = 1 / jnp.sqrt(jnp.asarray(device.masses))
    a, b = root[:, None], root[jnp.asarray(device.neighbours)]
    return jnp.stack([a * a + 0 * b, b * b, -a * b, -b * a])


def to_bonds(
    phonons: Blocks, device: Device
) -> Complex[Array, "2 qs frequencies atoms bonds directions directions"]:
    """Returns D_aa + D_bb − D_ab − D_ba of each bond, by masses: how it stretches."""
    own, upper = phonons.correlation, phonons.correlation_upper
    none = jnp.zeros_like(own[:1])
    lower = jnp.concatenate([none, -dagger(upper)])
    band = jnp.stack([lower, own, jnp.concatenate([upper, none])], 1)
    directions = device.gradients.shape[2]
    cut = band.reshape(
        *band.shape[:-2], -1, directions, band.shape[-1] // directions, directions
    )
    slab, beside, first, second = _places(device)
    found = cut[
        slab, beside, ..., first, :, second, :
    ]  # [4, atoms, bonds, 2, q, w, i, j]
    return jnp.einsum("fab...ij,fab->...abij", found, _weights(device))


def to_scattering(
    bonds: Complex[Array, "2 qs frequencies atoms bonds directions directions"],
    device: Device,
    between: float | Array = 1.0,
) -> Scattering:
    """Returns Π of slabs: P_ab at (a, a) and (b, b), its negative at (a, b), (b, a).

    Args:
      bonds: P^< and P^>.
      device: whose bonds these are.
      between: factor of what stands between two atoms.
    """
    slabs, (atoms, _) = len(device.phonons.onsite), device.neighbours.shape
    *front, _, _, directions, _ = bonds.shape
    weights = _weights(device) * jnp.stack([1.0, 1.0, between, between])[:, None, None]
    values = jnp.einsum("...abij,fab->fab...ij", bonds, weights)
    per_slab = atoms // slabs
    shape = (slabs, 3, *front, per_slab, directions, per_slab, directions)
    slab, beside, first, second = _places(device)
    band = jnp.zeros(shape, bonds.dtype)
    band = band.at[slab, beside, ..., first, :, second, :].add(values)
    band = band.reshape(slabs, 3, *front, *(per_slab * directions,) * 2)
    return Scattering(band[:, 1], band[:-1, 2])
