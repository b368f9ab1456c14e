"""Self-energies of electrons and phonons that scatter off each other.

The same sums in four orders, which move different amounts of data. Energies are
multiples of one step, and so are phonons' frequencies, ω_m = m ΔE with m = 1, 2, ...;
what would leave the grid of energies is dropped from both self-energies alike, so that
nothing is lost.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Complex, Float, Int

from hpcjax.core import checks
from hpcjax.core.varying import vary_like
from hpcjax.solvers.devices import dagger

Algorithm = Literal["sequential", "batched", "fissioned", "tiled"]
Padded = Complex[Any, "momenta padded all_atoms orbitals orbitals"]
Bonds = Complex[Any, "qs frequencies atoms bonds directions directions"]
Gradients = Complex[Any, "atoms bonds directions orbitals orbitals"]
Neighbours = Int[Any, "atoms bonds"]
SelfEnergy = Complex[Array, "momenta energies atoms orbitals orbitals"]


class Flags(NamedTuple):
    """Terms of the self-energies, arguments of one compiled program.

    All but the first two are for negative controls, which break conservation.

    Attributes:
      scattering: 0 for ballistic electrons and phonons.
      feedback: 0 for phonons that electrons do not heat.
      swapped: 1 takes lesser for greater phonons in what is absorbed.
      transposed: 0 leaves D^ij as it is in what is absorbed, where D^ji belongs.
      spin: of electrons that phonons see; 1 forgets half of them.
      between: sign of Π_ab of two atoms over the right one.
    """

    scattering: float | Array = 1.0
    feedback: float | Array = 1.0
    swapped: float | Array = 0.0
    transposed: float | Array = 1.0
    spin: float | Array = 2.0
    between: float | Array = 1.0


def electron_self_energy(
    greens: Complex[Any, "2 momenta energies atoms orbitals orbitals"],
    bonds: Complex[Any, "2 qs frequencies atoms bonds directions directions"],
    gradients: Gradients,
    neighbours: Neighbours,
    step: float | Float[Any, ""],
    *,
    algorithm: Algorithm = "tiled",
    flags: Flags | None = None,
) -> Complex[Array, "2 momenta energies atoms orbitals orbitals"]:
    """Returns Σ^< and Σ^> of electrons that emit and absorb phonons.

    With bonds (a, b), M = ∇H, frequencies ω > 0 and the mean over q

        Σ^<_a(E, k) = i ΔE / (2π Nq) Σ M^i_ab [G^<_b(E − ω, k − q) D^<,ij_ab(ω, q)
                      + G^<_b(E + ω, k + q) D^>,ji_ab(ω, q)] (M^j_ab)†

    and Σ^> with < and > exchanged (OMEN papers, eq. 3).

    Args:
      greens: G^< and G^> of each atom.
      bonds: D_aa + D_bb − D_ab − D_ba of phonons, lesser and greater; see `to_bonds`.
      gradients: M.
      neighbours: b.
      step: ΔE of energies and frequencies.
      algorithm: the order of sums. "sequential": eight loops; "batched": loops over
        (k, E, q, ω), all bonds at once; "fissioned": the products M G and Σ_j D M† by
        themselves, each once, then loops over (q, ω); "tiled": atom by atom these
        products and one more of the two, of which parts are shifted and added.
      flags: terms; None for all.

    Raises:
      ConfigError: an unknown algorithm, or momenta of phonons that are no sub-grid of
        those of electrons.
    """
    before = bonds.shape[2]
    padding = [(0, 0)] * greens.ndim
    padding[2] = (before, before)
    return sum_emitted_absorbed(
        jnp.pad(greens, padding), bonds, gradients, neighbours, step, algorithm, flags
    )


def sum_emitted_absorbed(
    padded: Complex[Any, "2 momenta padded all_atoms orbitals orbitals"],
    bonds: Complex[Any, "2 qs frequencies atoms bonds directions directions"],
    gradients: Gradients,
    neighbours: Neighbours,
    step: float | Float[Any, ""],
    algorithm: Algorithm,
    flags: Flags | None = None,
) -> Complex[Array, "2 momenta energies atoms orbitals orbitals"]:
    """Returns what `electron_self_energy` does of a window of energies.

    Args:
      padded: G of the window and of as many energies before and behind it as there are
        frequencies, zero where there are none; of atoms that bonds end at.
      bonds: as there, and so are the others.
      gradients: of bonds.
      neighbours: places in `padded`.
      step: of energies.
      algorithm: the order of sums.
      flags: terms.
    """
    flags = Flags() if flags is None else flags
    before = bonds.shape[2]
    other = jnp.where(flags.swapped, bonds, bonds[::-1])
    other = jnp.where(flags.transposed, other.swapaxes(-1, -2), other)
    # Absorption is emission with E and k in reverse order. All four sums are one loop,
    # so that a program has the sum once.
    turned = jax.vmap(_turn)(padded[:, :, before:])
    given = jnp.stack([padded[:, :, : padded.shape[2] - before], turned])
    found = jax.lax.map(
        lambda each: emit(each[0], each[1], gradients, neighbours, algorithm),
        tuple(x.reshape(-1, *x.shape[2:]) for x in (given, jnp.stack([bonds, other]))),
    )
    total = found[:2] + jax.vmap(_turn)(found[2:])
    return flags.scattering * 1j * step / (2 * jnp.pi * bonds.shape[1]) * total


def _turn(x: Complex[Array, "momenta energies ..."]) -> Any:
    """Returns x(−1 − k, −1 − E): the way back undoes the −1."""
    return x[::-1, ::-1]


def emit(
    padded: Padded,
    bonds: Bonds,
    gradients: Gradients,
    neighbours: Neighbours,
    algorithm: Algorithm,
) -> SelfEnergy:
    """Returns Σ_q,ω,b,i,j M^i_ab G_b(E − ω, k − q) D^ij_ab(ω, q) (M^j_ab)†.

    Args:
      padded: G, with as many energies before the first as there are frequencies.
      bonds: D.
      gradients: M.
      neighbours: b.
      algorithm: as of `electron_self_energy`.

    Raises:
      ConfigError: as there.
    """
    checks.require_choice("algorithm", algorithm, get_args(Algorithm))
    checks.require(
        len(padded) % len(bonds) == 0,
        "phonons' momenta must be a sub-grid of electrons': Nk a multiple of Nq",
        Nk=len(padded),
        Nq=len(bonds),
    )
    return _ALGORITHMS[algorithm](padded, bonds, gradients, neighbours)


def _loop(
    sizes: tuple[int, ...], body: Callable[..., Any], value: Any, *indices: Any
) -> Any:
    """Runs `body(value, *indices)` in nested loops."""
    if not sizes:
        return body(value, *indices)
    return jax.lax.fori_loop(
        0, sizes[0], lambda n, value: _loop(sizes[1:], body, value, *indices, n), value
    )


def _sequential(
    padded: Padded, bonds: Bonds, gradients: Gradients, neighbours: Neighbours
) -> SelfEnergy:
    """Adds one product of four small matrices after the other."""
    qs, frequencies, atoms, per_atom, directions, _ = bonds.shape
    momenta, energies = len(padded), padded.shape[1] - frequencies

    def add(sigma: SelfEnergy, *at: Array) -> SelfEnergy:
        k, e, q, w, i, j, a, b = at
        greens = padded[_minus(k, q, momenta, qs), e + frequencies - w - 1]
        left = gradients[a, b, i] @ greens[neighbours[a, b]]
        right = bonds[q, w, a, b, i, j] * dagger(gradients[a, b, j])
        return sigma.at[k, e, a].add(left @ right)

    loops = (momenta, energies, qs, frequencies, directions, directions)
    return _loop((*loops, atoms, per_atom), add, _zeros(padded, energies, atoms))


def _batched(
    padded: Padded, bonds: Bonds, gradients: Gradients, neighbours: Neighbours
) -> SelfEnergy:
    """Does all bonds and directions of one (k, E, q, ω) at once."""
    qs, frequencies = bonds.shape[:2]
    momenta, energies = len(padded), padded.shape[1] - frequencies

    def add(sigma: SelfEnergy, *at: Array) -> SelfEnergy:
        k, e, q, w = at
        greens = padded[_minus(k, q, momenta, qs), e + frequencies - w - 1]
        left = left_factor(greens, gradients, neighbours)
        right = right_factor(bonds[q, w], gradients)
        return sigma.at[k, e].add(jnp.einsum("abiop,abipr->aor", left, right))

    sizes = (momenta, energies, qs, frequencies)
    return _loop(sizes, add, _zeros(padded, energies, len(neighbours)))


def _fissioned(
    padded: Padded, bonds: Bonds, gradients: Gradients, neighbours: Neighbours
) -> SelfEnergy:
    """Makes each factor once, and multiplies them for one (q, ω) after the other."""
    qs, frequencies = bonds.shape[:2]
    momenta, energies = len(padded), padded.shape[1] - frequencies
    left = left_factor(padded, gradients, neighbours)
    right = right_factor(bonds, gradients)

    def add(sigma: SelfEnergy, q: Array, w: Array) -> SelfEnergy:
        taken = left[_minus(jnp.arange(momenta), q, momenta, qs)]
        start = frequencies - w - 1
        window = jax.lax.dynamic_slice_in_dim(taken, start, energies, 1)
        return sigma + jnp.einsum("keabiop,abipr->keaor", window, right[q, w])

    return _loop((qs, frequencies), add, _zeros(padded, energies, len(neighbours)))


def _tiled(
    padded: Padded, bonds: Bonds, gradients: Gradients, neighbours: Neighbours
) -> SelfEnergy:
    """Makes both factors of an atom, and one product of them, then goes on."""

    def of_atom(own: tuple[Array, ...]) -> Array:
        bonds, gradients, neighbours = own
        left = left_factor(padded, gradients[None], neighbours[None])[:, :, 0]
        right = right_factor(bonds[:, :, None], gradients[None])[:, :, 0]
        return sum_shifted(left, right)

    given = (jnp.moveaxis(bonds, 2, 0), gradients, neighbours)
    return jnp.moveaxis(jax.lax.map(of_atom, given), 0, 2)


def sum_shifted(
    left: Complex[Any, "momenta padded bonds directions orbitals orbitals"],
    right: Complex[Any, "qs frequencies bonds directions orbitals orbitals"],
) -> Complex[Array, "momenta energies orbitals orbitals"]:
    """Returns Σ_q,ω X(k − q, E − ω) Y(q, ω), sums over bonds and directions inside.

    X and Y are matrices of (k, E, orbital) and (q, ω, orbital) with the sums' indices
    between: one product has all terms, and what is left is to add parts of it.
    """
    momenta, (qs, frequencies) = len(left), right.shape[:2]
    energies, rows = left.shape[1] - frequencies, left.shape[-2]
    columns = right.shape[-1]
    product = multiply(
        jnp.einsum("kebiop->keobip", left).reshape(momenta * left.shape[1] * rows, -1),
        jnp.einsum("qwbipr->bipwqr", right).reshape(-1, qs * frequencies * columns),
    ).reshape(momenta, -1, rows, 2, frequencies, qs, columns)

    def add(total: Array, w: Array) -> Array:
        part = jax.lax.dynamic_slice_in_dim(product, frequencies - w - 1, energies, 1)
        part = jax.lax.dynamic_index_in_dim(part, w, 4, keepdims=False)
        apart = momenta // qs
        rolled = [jnp.roll(part[..., q, :], q * apart, axis=0) for q in range(qs)]
        return total + functools.reduce(jnp.add, rolled)

    start = jnp.zeros((momenta, energies, rows, 2, columns), product.dtype)
    total = _loop((frequencies,), add, vary_like(start, product))
    return jax.lax.complex(total[..., 0, :], total[..., 1, :])


def multiply(
    x: Complex[Array, "rows inner"], y: Complex[Array, "inner columns"]
) -> Float[Array, "rows parts"]:
    """Returns real and imaginary part of x y, [Re, Im] side by side.

    As one product of real matrices, [Re x, Im x] [[Re y, Im y], [−Im y, Re y]]: on CPUs
    XLA takes 1.7 times as long for complex ones.
    """
    above = jnp.concatenate([y.real, y.imag], 1)
    below = jnp.concatenate([-y.imag, y.real], 1)
    return jnp.concatenate([x.real, x.imag], 1) @ jnp.concatenate([above, below])


def left_factor(
    greens: Complex[Any, "... all_atoms orbitals orbitals"],
    gradients: Gradients,
    neighbours: Neighbours,
) -> Complex[Array, "... atoms bonds directions orbitals orbitals"]:
    """Returns M^i_ab G_b."""
    taken = greens[..., neighbours, :, :]
    return jnp.einsum("abiop,...abpr->...abior", gradients, taken)


def right_factor(
    bonds: Complex[Any, "... atoms bonds directions directions"],
    gradients: Gradients,
) -> Complex[Array, "... atoms bonds directions orbitals orbitals"]:
    """Returns Σ_j D^ij (M^j_ab)†."""
    return jnp.einsum("...abij,abjor->...abior", bonds, dagger(gradients))


def _minus(k: Any, q: Any, momenta: int, qs: int) -> Any:
    """Returns the number of k − q, whose grid is a part of that of k."""
    return (k - q * (momenta // qs)) % momenta


def _zeros(padded: Padded, energies: int, atoms: int) -> SelfEnergy:
    shape = (len(padded), energies, atoms, *padded.shape[-2:])
    return jnp.zeros(shape, padded.dtype)


_ALGORITHMS: dict[str, Callable[..., SelfEnergy]] = {
    "sequential": _sequential,
    "batched": _batched,
    "fissioned": _fissioned,
    "tiled": _tiled,
}


def phonon_self_energy(
    greens: Complex[Any, "2 momenta energies atoms orbitals orbitals"],
    gradients: Gradients,
    neighbours: Neighbours,
    step: float | Float[Any, ""],
    *,
    momenta: int,
    frequencies: int,
    flags: Flags | None = None,
) -> Complex[Array, "2 qs frequencies atoms bonds directions directions"]:
    """Returns P^< and P^> of each bond, of which Π is made.

    With the mean over k, g_s = 2 and energies off the grid dropped

        P^≷,ij_ab(ω, q) = −i g_s ΔE / (2π Nk) Σ_k,E tr[(M^i_ab)† G^≷_a(E + ω, k + q)
                          M^j_ab G^≶_b(E, k)]

    Args:
      greens: G^< and G^> of each atom.
      gradients: M.
      neighbours: b.
      step: ΔE.
      momenta: Nq, of phonons.
      frequencies: their number.
      flags: terms; None for all.

    Raises:
      ConfigError: momenta of phonons that are no sub-grid of those of electrons.
    """
    flags = Flags() if flags is None else flags
    ks, energies = greens.shape[1:3]
    rule = "phonons' momenta must be a sub-grid of electrons': Nk a multiple of Nq"
    checks.require(ks % momenta == 0, rule, Nk=ks, Nq=momenta)
    own = jnp.einsum("abipo,...apr->...abior", gradients.conj(), greens)
    own = jnp.pad(own, [(0, frequencies * (d == 2)) for d in range(own.ndim)])
    other = left_factor(greens[::-1], gradients, neighbours)

    def of(at: Array) -> Array:
        q, w = at // frequencies, at % frequencies
        moved = own[:, (jnp.arange(ks) + q * (ks // momenta)) % ks]
        window = jax.lax.dynamic_slice_in_dim(moved, w + 1, energies, 2)
        return jnp.einsum("skeabiop,skeabjpo->sabij", window, other)

    found = jax.lax.map(of, jnp.arange(momenta * frequencies))
    found = jnp.moveaxis(found, 1, 0)
    found = found.reshape(2, momenta, frequencies, *found.shape[2:])
    factor = flags.scattering * flags.feedback * flags.spin * step / (2 * jnp.pi * ks)
    return -1j * factor * found
