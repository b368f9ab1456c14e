"""Devices between two leads: slabs, bonds, and what makes them.

Matrices of electrons (energies) and of phonons (squares of frequencies, divided by
roots of masses) are block-tridiagonal over slabs. They are given at equally spaced
momenta, 2π k / Nk, of a direction in which the device repeats. The unit of time is
that of energy with ħ = 1, and e = 1.
"""

import operator
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Complex, Float, Int, Shaped

from hpcjax.core import checks
from hpcjax.core.structs import pytree


@pytree
class Lead:
    """A crystal that goes on for ever from an end of the device.

    Attributes:
      onsite: matrix of a cell, at each momentum.
      coupling: block of a cell and of the next one away from the device.
      contact: block of the device's last slab and the lead's first cell.
    """

    onsite: Shaped[Any, "momenta cell cell"]
    coupling: Shaped[Any, "momenta cell cell"]
    contact: Shaped[Any, "momenta slab cell"]


@pytree
class Slabs:
    """A Hermitian block-tridiagonal matrix at each momentum, with both leads.

    Attributes:
      onsite: diagonal blocks.
      coupling: blocks of a slab and the one to the right of it.
      left: the lead before slab 0.
      right: the lead behind the last slab.
    """

    onsite: Shaped[Any, "slabs momenta slab slab"]
    coupling: Shaped[Any, "between momenta slab slab"]
    left: Lead
    right: Lead


@pytree
class Device:
    """Electrons and phonons of a device, and how bonds couple them.

    Atoms are numbered slab by slab, as many in each.

    Attributes:
      electrons: the Hamiltonian.
      phonons: the dynamical matrix.
      gradients: ∇_i H_ab of each bond, by the difference of places R_b − R_a. Those of
        (b, a) are −(∇_i H_ab)†.
      neighbours: b of each bond, in the slab of a or one beside it. An atom with fewer
        bonds has itself, with gradients of zero.
      masses: of atoms.
    """

    electrons: Slabs
    phonons: Slabs
    gradients: Shaped[Any, "atoms bonds directions orbitals orbitals"]
    neighbours: Int[Any, "atoms bonds"]
    masses: Float[Any, " atoms"]


def dagger(x: Complex[Any, "... n m"]) -> Complex[Any, "... m n"]:
    """Returns the conjugate transpose of the last two dimensions."""
    return x.conj().swapaxes(-1, -2)


def is_traced(*trees: Any) -> bool:
    """Says whether values are not known yet, and cannot be checked."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(trees))


def check_device(device: Device) -> None:
    """Checks that values are those of a device.

    Raises:
      ConfigError: blocks, bonds or masses that do not belong together, a matrix that is
        not Hermitian or not finite, a mass that is not above 0, a bond that is listed
        twice or is an atom's with itself, or gradients of a bond and its reverse that
        differ.
    """
    shape = np.shape(device.gradients)
    rule = "gradients must be [atoms, bonds, directions, orbitals, orbitals]"
    checks.require(len(shape) == 5, rule, shape=shape)
    atoms, bonds, directions, orbitals, _ = shape
    slabs = len(device.electrons.onsite)
    checks.require(
        len(device.phonons.onsite) == slabs and atoms % slabs == 0,
        "electrons and phonons need the same slabs, of as many atoms each",
        electrons=slabs,
        phonons=len(device.phonons.onsite),
        atoms=atoms,
    )
    wanted = {
        "gradients": (atoms, bonds, directions, orbitals, orbitals),
        "neighbours": (atoms, bonds),
        "masses": (atoms,),
    }
    _check_shapes(device, wanted)
    check_slabs(device.electrons, "electrons", atoms // slabs * orbitals)
    check_slabs(device.phonons, "phonons", atoms // slabs * directions)
    least = float(np.min(device.masses))
    checks.require(least > 0, "masses must be above 0", least=least)
    _check_bonds(device, atoms // slabs)
    electrons, phonons = (x.onsite.shape[1] for x in (device.electrons, device.phonons))
    checks.require(
        electrons % phonons == 0,
        "the momenta of phonons must be a sub-grid of those of electrons",
        electrons=electrons,
        phonons=phonons,
    )


def check_slabs(slabs: Slabs, name: str = "slabs", size: int | None = None) -> None:
    """Checks that blocks of a device and its leads are those of a Hermitian matrix.

    Args:
      slabs: that are checked.
      name: of these.
      size: of a slab's block; None for that of the first one.

    Raises:
      ConfigError: other shapes, numbers that are not finite, or a block on the diagonal
        that is not Hermitian.
    """
    shape = np.shape(slabs.onsite)
    rule = f"{name}.onsite must be [slabs, momenta, n, n], of one slab at least"
    checks.require(len(shape) == 4 and min(shape) > 0, rule, shape=shape)
    count, momenta, n = shape[0], shape[1], shape[2] if size is None else size
    wanted: dict[str, tuple[int, ...]] = {
        "onsite": (count, momenta, n, n),
        "coupling": (count - 1, momenta, n, n),
    }
    for side in ("left", "right"):
        cell = np.shape(getattr(slabs, side).onsite)[-1]
        wanted[f"{side}.onsite"] = wanted[f"{side}.coupling"] = (momenta, cell, cell)
        wanted[f"{side}.contact"] = (momenta, n, cell)
    _check_shapes(slabs, wanted, f"{name}.")
    for field in wanted:
        finite = bool(np.isfinite(operator.attrgetter(field)(slabs)).all())
        checks.require(finite, f"{name}.{field} must be finite", finite=finite)
    for field in ("onsite", "left.onsite", "right.onsite"):
        block = np.asarray(operator.attrgetter(field)(slabs))
        apart = float(np.abs(block - block.conj().swapaxes(-1, -2)).max())
        good = apart <= 1e-9 * np.abs(block).max()
        checks.require(good, f"{name}.{field} must be Hermitian", apart=apart)


def _check_shapes(
    tree: Any, wanted: Mapping[str, tuple[int, ...]], name: str = ""
) -> None:
    """Checks the shapes of fields, and of fields of these."""
    for field, shape in wanted.items():
        found = np.shape(operator.attrgetter(field)(tree))
        checks.require(found == shape, f"{name}{field} must be {shape}", shape=found)


def _check_bonds(device: Device, per_slab: int) -> None:
    neighbours, gradients = map(np.asarray, (device.neighbours, device.gradients))
    atoms, bonds = neighbours.shape
    rule = f"neighbours must be atoms, 0 to {atoms - 1}"
    ends = {"least": int(neighbours.min()), "most": int(neighbours.max())}
    checks.require(ends["least"] >= 0 and ends["most"] < atoms, rule, **ends)
    first = np.arange(atoms)[:, None]
    apart = int(np.abs(neighbours // per_slab - first // per_slab).max())
    rule = "neighbours must be in the same slab or in one beside it"
    checks.require(apart <= 1, rule, slabs_between=apart)
    used = (gradients != 0).any((2, 3, 4))
    own = np.argwhere(used & (neighbours == first))[:, 0].tolist()
    rule = "an atom's gradients must be zero where it is its own neighbour"
    checks.require(not own, rule, atoms=own[:1])
    back = np.zeros(gradients.shape, complex)
    for n in range(bonds):
        others = used & used[:, n, None] & (np.arange(bonds) != n)
        twice = np.argwhere(others & (neighbours == neighbours[:, n, None]))
        pairs = [(int(a), int(neighbours[a, b])) for a, b in twice[:1]]
        rule = "a pair of atoms must be one bond, with the sum of its gradients"
        checks.require(not pairs, rule, twice=pairs)
        returns = neighbours[neighbours, n] == first
        back += returns[..., None, None, None] * gradients[neighbours, n]
    wrong = float(np.abs((gradients + dagger(back))[used]).max(initial=0))
    good = wrong <= 1e-9 * np.abs(gradients).max(initial=0)
    checks.require(good, "gradients of (b, a) must be -conj(a, b).T", apart=wrong)


def lattice(
    cell: Float[np.ndarray, "atoms 3"],
    period: float,
    slabs: int,
    *,
    directions: int,
    length: float = 1.0,
    hopping: float = -1.0,
    spring: float = 1.0,
    bending: float = 0.0,
) -> Device:
    """Makes a device of equal slabs with bonds between nearest neighbours.

    Hopping over a distance d is t (d₀ / d)², which gives the gradients; a bond's
    springs are k r rᵀ + k' (1 − r rᵀ) along its direction r. Leads go on as the device.

    Args:
      cell: places of the atoms of a slab.
      period: from a slab to the next, along x.
      slabs: their number.
      directions: in which atoms move, x first.
      length: d₀ of bonds; atoms farther than 1.1 d₀ apart have none.
      hopping: t, an energy.
      spring: k, a squared frequency for a mass of 1.
      bending: k', likewise.

    Raises:
      ConfigError: no slab or direction, or bonds that pass over a slab.
    """
    checks.require_count(1, slabs=slabs, directions=directions)
    atoms = len(cell)
    beyond = cell[None] + [2 * period, 0.0, 0.0] - cell[:, None]
    least = float(np.linalg.norm(beyond, axis=-1).min())
    rule = "slabs must be so long that bonds end in the next one"
    checks.require(least >= 1.1 * length, rule, period=period, length=length)
    away = cell[None] + np.array([[[s * period, 0.0, 0.0]] for s in (-1, 0, 1)])
    between = away[:, None] - cell[None, :, None]  # [slab, a, b, 3]
    distance = np.linalg.norm(between, axis=-1)
    bonded = (distance > 0.1 * length) & (distance < 1.1 * length)
    unit = between[..., :directions] / np.where(bonded, distance, 1.0)[..., None]
    along = unit[..., :, None] * unit[..., None, :]
    springs = spring * along + bending * (np.eye(directions) - along)
    force = -springs * bonded[..., None, None]
    force[1, range(atoms), range(atoms)] -= force.sum((0, 2))
    flat = force.transpose(0, 1, 3, 2, 4).reshape(3, atoms * directions, -1)
    ratio = np.where(bonded, distance, length) / length
    slope = -2 * hopping / length * bonded / ratio**3
    neighbours, gradients = _list_bonds(bonded, slope[..., None] * unit, slabs)
    hop = (hopping * bonded / ratio**2)[:, None].astype(complex)
    flat = flat[:, None].astype(complex)
    return Device(
        electrons=repeat(hop[1], hop[2], slabs),
        phonons=repeat(flat[1], flat[2], slabs),
        gradients=gradients[..., None, None].astype(complex),
        neighbours=neighbours,
        masses=np.ones(slabs * atoms),
    )


def repeat(
    onsite: Shaped[np.ndarray, "momenta slab slab"],
    coupling: Shaped[np.ndarray, "momenta slab slab"],
    slabs: int,
) -> Slabs:
    """Returns slabs and leads that are all alike."""
    back = coupling.conj().swapaxes(-1, -2)
    return Slabs(
        onsite=np.stack([onsite] * slabs),
        coupling=np.array([coupling] * (slabs - 1)).reshape(-1, *coupling.shape),
        left=Lead(onsite=onsite, coupling=back, contact=back),
        right=Lead(onsite=onsite, coupling=coupling, contact=coupling),
    )


def _list_bonds(
    bonded: np.ndarray, gradient: np.ndarray, slabs: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns neighbours and gradients of every atom, filled up to as many for each."""
    atoms = bonded.shape[1]
    most = int(bonded.sum((0, 2)).max())
    neighbours = np.tile(np.arange(slabs * atoms)[:, None], most)
    gradients = np.zeros((slabs * atoms, most, gradient.shape[-1]))
    for number in range(slabs * atoms):
        slab, a = divmod(number, atoms)
        ends = [
            (atoms * (slab + d - 1) + b, gradient[d, a, b])
            for d, b in np.argwhere(bonded[:, a])
            if 0 <= slab + d - 1 < slabs
        ]
        for place, (b, slope) in enumerate(ends):
            neighbours[number, place], gradients[number, place] = b, slope
    return neighbours, gradients


def chain(slabs: int = 4, hopping: float = -1.0, spring: float = 1.0) -> Device:
    """Makes a chain of atoms at distance 1 that move along it; bands are ±2 t, 2 √k.

    Examples:
      >>> chain(3).neighbours.tolist()
      [[1, 0], [0, 2], [1, 2]]
    """
    options: Any = {"hopping": hopping, "spring": spring}
    return lattice(np.zeros((1, 3)), 1.0, slabs, directions=1, **options)


def ribbon(
    slabs: int = 4,
    width: int = 4,
    edge: Literal["zigzag", "armchair"] = "zigzag",
    hopping: float = -2.7,
    spring: float = 0.03,
) -> Device:
    """Makes a ribbon of graphene with bonds of length 1, atoms moving in its plane.

    Args:
      slabs: unit cells between the leads.
      width: of zigzag chains, or of pairs across an armchair ribbon.
      edge: along the leads.
      hopping: of nearest neighbours.
      spring: of bonds; a fifth of it acts across them.
    """
    checks.require_choice("edge", edge, ("zigzag", "armchair"))
    checks.require_count(1, width=width)
    half = np.sqrt(3) / 2
    if edge == "zigzag":
        period, first = 2 * half, [(half * (i % 2), 1.5 * i) for i in range(width)]
        second = [(half - x, y + 0.5) for x, y in first]
    else:
        period, first = 3.0, [(1.5 * (i % 2), half * i) for i in range(width)]
        second = [(x + 1.0, y) for x, y in first]
    places = np.array([(x, y, 0.0) for x, y in first + second])
    options: Any = {"hopping": hopping, "spring": spring, "bending": spring / 5}
    return lattice(places, period, slabs, directions=2, **options)


def junction(
    atoms: int = 4,
    orbitals: int = 2,
    directions: int = 2,
    momenta: tuple[int, int] = (1, 1),
    coupling: float = 0.04,
    spring: float = 0.0015,
    seed: int = 0,
) -> Device:
    """Makes a random junction, an atom a slab, in which no two bonds are alike.

    Nothing in it is symmetric, under time reversal neither, so that mistakes show.

    Args:
      atoms: their number, also of slabs.
      orbitals: of an atom.
      directions: in which atoms move.
      momenta: Nk of electrons and Nq of phonons.
      coupling: size of gradients' entries.
      spring: size of springs; frequencies reach about √(6 k).
      seed: of all draws.
    """
    checks.require_count(2, atoms=atoms)
    rng = np.random.Generator(np.random.Philox(seed))
    gradients = np.zeros((atoms, 2, directions, orbitals, orbitals), complex)
    steps = range(1, atoms)
    drawn = coupling * _draw(rng, atoms - 1, directions, orbitals, orbitals)
    gradients[:-1, 1], gradients[1:, 0] = drawn, -drawn.conj().swapaxes(-1, -2)
    neighbours = np.stack([[0, *range(atoms - 1)], [*steps, atoms - 1]], 1)
    return Device(
        electrons=_random_electrons(rng, atoms, orbitals, momenta[0]),
        phonons=_random_phonons(rng, atoms, directions, momenta[1], spring),
        gradients=gradients,
        neighbours=neighbours,
        masses=np.ones(atoms),
    )


def _draw(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)) / np.sqrt(2)


def _cut(onsite: np.ndarray, coupling: np.ndarray) -> Slabs:
    """Makes leads of the first and last of slabs, and a device of those between.

    Args:
      onsite: [slabs + 2, momenta, n, n].
      coupling: [slabs + 1, momenta, n, n].
    """
    back = coupling[0].conj().swapaxes(-1, -2)
    return Slabs(
        onsite=onsite[1:-1],
        coupling=coupling[1:-1],
        left=Lead(onsite=onsite[0], coupling=back, contact=back),
        right=Lead(onsite=onsite[-1], coupling=coupling[-1], contact=coupling[-1]),
    )


def _random_electrons(
    rng: np.random.Generator, atoms: int, orbitals: int, momenta: int
) -> Slabs:
    shape = (atoms + 2, orbitals, orbitals)
    own, across = 0.05 * _draw(rng, *shape), 0.03 * _draw(rng, *shape)
    along = 0.3 * np.eye(orbitals) + 0.05 * _draw(rng, *shape)[1:]
    phases = np.exp(2j * np.pi * np.arange(momenta) / momenta)
    half = own[:, None] + across[:, None] * phases[:, None, None]
    onsite = half + half.conj().swapaxes(-1, -2)
    return _cut(onsite, np.stack([along] * momenta, 1))


def _random_phonons(
    rng: np.random.Generator, atoms: int, directions: int, momenta: int, spring: float
) -> Slabs:
    """Springs are positive, so that no frequency is imaginary at any momentum."""
    root = rng.normal(size=(2, atoms + 3, directions, directions)) / 2
    springs = spring * (np.eye(directions) + root @ root.swapaxes(-1, -2))
    along, across = springs[0], springs[1, 1:] / 4
    along[0], along[-1] = along[1], along[-2]  # a lead's are all alike
    angle = 2 * np.pi * np.arange(momenta) / momenta
    pulled = across[:, None] * (2 - 2 * np.cos(angle))[:, None, None]
    onsite = (along[:-1] + along[1:])[:, None] + pulled
    coupling = np.stack([along[1:-1]] * momenta, 1)
    return _cut(onsite.astype(complex), -coupling.astype(complex))
