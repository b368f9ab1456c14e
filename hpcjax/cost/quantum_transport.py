"""What scattering in quantum transport computes and sends, in two orders of sums."""

from typing import Literal, NamedTuple

from hpcjax.core import checks

Scheme = Literal["original", "tiles"]
COMPLEX = 16


class TransportSizes(NamedTuple):
    """A device and its grids; those of the papers' smaller structure as defaults.

    Attributes:
      momenta: Nkz of electrons.
      energies: NE.
      qs: Nqz of phonons.
      frequencies: Nω.
      atoms: Na.
      bonds: Nb of an atom.
      orbitals: Norb of an atom.
      directions: N3D, in which atoms move.
    """

    momenta: int
    qs: int
    energies: int = 706
    frequencies: int = 70
    atoms: int = 4864
    bonds: int = 34
    orbitals: int = 12
    directions: int = 3


def sse_flops(sizes: TransportSizes, scheme: Scheme) -> float:
    """Returns the operations of the electrons' self-energies in one iteration.

    In the original order, each of the eight loops has two products of small matrices;
    with tiles M G is computed once for each energy, not for each (q, ω):

        original  64 Na Nb N3D Nkz Nqz NE Nω Norb³
        tiles     32 Na Nb N3D Nkz Nqz NE Nω Norb³ + 96 Na Nb N3D Nkz NE Norb³

    Args:
      sizes: of the device.
      scheme: order of the sums.

    References:
      Ziogas et al., A Data-Centric Approach to Extreme-Scale Ab initio Dissipative
      Quantum Transport Simulations, SC 2019; Optimizing the Data Movement in Quantum
      Transport Simulations, SC 2019.

    Examples:
      >>> f"{sse_flops(TransportSizes(3, 3), 'tiles') / 1e15:.2f}"
      '12.38'
    """
    checks.require_choice("scheme", scheme, ("original", "tiles"))
    s = sizes
    once = s.atoms * s.bonds * s.directions * s.momenta * s.energies * s.orbitals**3
    pairs = once * s.qs * s.frequencies
    return 64.0 * pairs if scheme == "original" else 32.0 * pairs + 96.0 * once


def sse_volume(sizes: TransportSizes, scheme: Scheme, te: int, ta: int) -> float:
    """Returns the bytes of an iteration's scattering phase, over all TE · TA processes.

    Complex numbers, lesser and greater, there and back: G and D in, Σ and Π out.

        original  64 Nkz NE Nqz Nω Na Norb² + 64 Nqz Nω Na Nb N3D² P
        tiles     P (64 Nkz (NE/TE + 2 Nω) (Na/TA + Nb) Norb²
                     + 64 Nqz Nω (Na/TA + Nb) Nb N3D²),      P = TE TA

    Args:
      sizes: of the device.
      scheme: what is sent.
      te: tiles of energies.
      ta: tiles of atoms.

    Raises:
      ConfigError: more tiles than energies or atoms.

    References:
      As `sse_flops`, the tables of communication.

    Examples:
      >>> f"{sse_volume(TransportSizes(7, 7), 'tiles', 7, 256) / 2**40:.3f}"
      '2.171'
    """
    checks.require_choice("scheme", scheme, ("original", "tiles"))
    s = sizes
    rule = "tiles must hold an energy and an atom each: 1 <= TE <= NE, 1 <= TA <= Na"
    good = 1 <= te <= s.energies and 1 <= ta <= s.atoms
    checks.require(good, rule, TE=te, TA=ta, NE=s.energies, Na=s.atoms)
    unit, matrix, tensor = 4 * COMPLEX, s.orbitals**2, s.directions**2
    rounds, processes = s.qs * s.frequencies, te * ta
    if scheme == "original":
        greens = s.momenta * s.energies * rounds * s.atoms * matrix
        return float(unit * (greens + rounds * s.atoms * s.bonds * tensor * processes))
    window, held = s.energies / te + 2 * s.frequencies, s.atoms / ta + s.bonds
    greens = s.momenta * window * held * matrix
    return unit * processes * (greens + rounds * held * s.bonds * tensor)


class TilesPlan(NamedTuple):
    """Tiles of energies and of atoms, and the bytes that all processes send."""

    te: int
    ta: int
    bytes: float


def best_tiles(sizes: TransportSizes, processes: int) -> TilesPlan:
    """Returns the TE · TA = P tiles that send the fewest bytes.

    Raises:
      ConfigError: so many processes cannot be cut into tiles that hold something.

    Examples:
      >>> best_tiles(TransportSizes(7, 7), 224)[:2]
      (2, 112)
    """
    checks.require_count(1, processes=processes)
    pairs = [(t, processes // t) for t in range(1, processes + 1) if processes % t == 0]
    fit = [(t, a) for t, a in pairs if t <= sizes.energies and a <= sizes.atoms]
    rule = f"no TE <= {sizes.energies}, TA <= {sizes.atoms} have this product"
    checks.require(bool(fit), rule, processes=processes)
    plans = (TilesPlan(t, a, sse_volume(sizes, "tiles", t, a)) for t, a in fit)
    return min(plans, key=lambda plan: plan.bytes)
