"""Green's functions of slabs between leads: surfaces, the recursion over blocks.

A correlation function, lesser or greater, is skew: G† = −G. Arrays of both have them in
a first dimension of 2, the lesser one first.
"""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex, Float

from hpcjax.core import checks
from hpcjax.core.extremes import largest
from hpcjax.solvers.devices import Lead, Slabs, check_slabs, dagger, is_traced

Kind = Literal["electrons", "phonons"]
_WRONG = 1e-3  # residual of a surface's equation, whose terms are about 1
_MOVES = np.array([0, 0.3 + 0.2j])  # of modes, of which the second is tried last


class Surface(NamedTuple):
    """The Green's function of a lead's first cell.

    Attributes:
      value: [..., cell, cell].
      residual: largest entry of (z − h₀₀ − h₀₁ g h₀₁†) g − 1, [...].
      converged: whether the coupling has been decimated to the tolerance, and the
        residual is at most 1e-3, [...].
    """

    value: Complex[Array, "... cell cell"]
    residual: Float[Array, "..."]
    converged: Bool[Array, "..."]


def surface_gf(
    z: Complex[Any, "..."],
    h00: Complex[Any, "... cell cell"],
    h01: Complex[Any, "... cell cell"],
    *,
    tolerance: float = 1e-12,
    limit: int = 100,
) -> Surface:
    """Returns g = (z − h₀₀ − h₀₁ g h₀₁†)⁻¹ of a half-infinite crystal, by decimation.

    Each step halves the number of cells, as Sancho, Sancho and Rubio do (1985). That
    loses all digits where z is all but a level of some cells by themselves, as where
    bands meet or are flat; there the same steps are taken again with other eigenvalues.

    Args:
      z: with an imaginary part above 0, which the steps needed grow with 1 over.
      h00: matrix of a cell.
      h01: block of a cell and of the next one away from the surface.
      tolerance: of the largest coupling that is left, over the largest at first.
      limit: of steps.
    """
    shape = jnp.broadcast_shapes(z.shape, h00.shape[:-2], h01.shape[:-2])
    one = jnp.eye(h00.shape[-1])
    own, forth = (
        z[..., None, None] * one - h00,
        jnp.broadcast_to(h01, shape + one.shape),
    )
    moves = jnp.asarray(_MOVES, own.dtype)

    def step(state: tuple[Array, Surface]) -> tuple[Array, Surface]:
        count, last = state
        value, done = _decimate(own, forth, moves[count], tolerance, limit)
        residual = _size((own - forth @ value @ dagger(forth)) @ value - one)
        kept, good = last.converged, done & (residual <= _WRONG)
        return count + 1, Surface(
            jnp.where(kept[..., None, None], last.value, value),
            jnp.where(kept, last.residual, residual),
            kept | good,
        )

    def goes_on(state: tuple[Array, Surface]) -> Bool[Array, ""]:
        return (state[0] < len(_MOVES)) & ~state[1].converged.all()

    none = Surface(0 * (own + forth), jnp.zeros(shape), jnp.zeros(shape, bool))
    return jax.lax.while_loop(goes_on, step, (jnp.asarray(0), none))[1]


def _decimate(
    own: Array, forth: Array, move: Array, tolerance: float, limit: int
) -> tuple[Array, Array]:
    """Returns g, and whether couplings are gone; own is z − h₀₀.

    Modes u_n = λⁿ u_0 of the crystal have (own λ − forth λ² − forth†) u_0 = 0, and g is
    made of F, whose eigenvalues are those |λ| < 1. With λ = (μ + m) / (1 + m̄ μ), |m| <
    1, which are |μ| < 1, these are modes of another crystal, that is decimated.
    """
    turned = move.conj()
    bulk = (1 + move * turned) * own - 2 * turned * dagger(forth) - 2 * move * forth
    ahead = turned * own - turned**2 * dagger(forth) - forth
    behind = move * own - dagger(forth) - move**2 * forth
    least = tolerance * _size(ahead)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, surface, bulk, forth, back = state
        inverse = jnp.linalg.inv(bulk)
        right, left = forth @ inverse, back @ inverse
        outward = right @ back
        forth, back, inward = right @ forth, left @ back, left @ forth
        return count + 1, surface - outward, bulk - outward - inward, -forth, -back

    def goes_on(state: tuple[Any, ...]) -> Bool[Array, ""]:
        return (state[0] < limit) & jnp.any(_size(state[3]) > least)

    start = (0, bulk, bulk, ahead, behind)
    _, surface, _, ahead, _ = jax.lax.while_loop(goes_on, step, start)
    # −X has the eigenvalues μ; F = (m − X) (1 − m̄ X)⁻¹, g = (own − forth F)⁻¹.
    one, x = jnp.eye(own.shape[-1]), jnp.linalg.solve(surface, behind)
    below = one - turned * x
    value = below @ jnp.linalg.inv(own @ below - forth @ (move * one - x))
    return value, _size(ahead) <= least


def _size(x: Complex[Array, "... n m"]) -> Float[Array, "..."]:
    return largest(jnp.abs(x), (-1, -2))


class Blocks(NamedTuple):
    """Blocks of G^R = A⁻¹ and of G^≷ = G^R Σ^≷ G^A; further dimensions stand between.

    Attributes:
      retarded: on the diagonal, [slabs, ..., n, n].
      retarded_upper: (i, i + 1), [slabs − 1, ..., n, n].
      retarded_lower: (i + 1, i).
      correlation: lesser and greater on the diagonal, [slabs, 2, ..., n, n].
      correlation_upper: (i, i + 1); those of (i + 1, i) are −(…)†.
    """

    retarded: Complex[Array, "slabs ... n n"]
    retarded_upper: Complex[Array, "between ... n n"]
    retarded_lower: Complex[Array, "between ... n n"]
    correlation: Complex[Array, "slabs 2 ... n n"]
    correlation_upper: Complex[Array, "between 2 ... n n"]

    @property
    def lesser(self) -> Complex[Array, "slabs ... n n"]:
        """Blocks of G^<."""
        return self.correlation[:, 0]

    @property
    def greater(self) -> Complex[Array, "slabs ... n n"]:
        """Blocks of G^>."""
        return self.correlation[:, 1]


def rgf(
    diagonal: Complex[Any, "slabs ... n n"],
    upper: Complex[Any, "between ... n n"],
    lower: Complex[Any, "between ... n n"],
    lesser: Complex[Any, "slabs ... n n"],
    greater: Complex[Any, "slabs ... n n"],
    *,
    off_diagonal: tuple[Any, Any] | None = None,
) -> Blocks:
    """Inverts a block-tridiagonal A, and finds A⁻¹ Σ^≷ (A⁻¹)†, block by block.

    The recursive Green's function method (OMEN papers; Svizhenko et al., 2002): a sweep
    from slab 0 on joins a slab to all before it, one back adds those behind. It takes
    slabs · n³ operations in the place of (slabs · n)³.

    Args:
      diagonal: A_ii.
      upper: A_i,i+1.
      lower: A_i+1,i.
      lesser: Σ^<_ii, skew.
      greater: Σ^>_ii, skew.
      off_diagonal: Σ^<_i,i+1 and Σ^>_i,i+1, zero if None; those below are −(…)†.

    Raises:
      ConfigError: lesser or greater are not skew; traced values are not checked.
    """
    for name, given in (("lesser", lesser), ("greater", greater)):
        _check_skew(name, given)
    sigma = jnp.stack([lesser, greater], 1)
    beside = jnp.stack(off_diagonal or (jnp.zeros_like(upper),) * 2, 1)

    def join(left: tuple[Array, Array], own: tuple[Array, ...]) -> tuple[Any, Any]:
        (x, small), (a, up, low, s, between) = left, own
        joined = jnp.linalg.inv(a - low @ x @ up)
        mixed = low @ x @ between
        inner = s + low @ small @ dagger(low) + dagger(mixed) - mixed
        return (joined, joined @ inner @ dagger(joined)), left

    x = jnp.linalg.inv(diagonal[0])
    start = (x, x @ sigma[0] @ dagger(x))
    given = (diagonal[1:], upper, lower, sigma[1:], beside)
    last, before = jax.lax.scan(join, start, given)

    def add(right: tuple[Array, Array], own: tuple[Array, ...]) -> tuple[Any, Any]:
        (g, small_g), (x, small, up, low, between) = right, own
        ahead, back = x @ up, low @ x
        own_g = x + ahead @ g @ back
        inner = x @ between @ dagger(g)
        turned = ahead @ g @ low @ small - inner @ dagger(ahead)
        found = small + ahead @ small_g @ dagger(ahead) + turned - dagger(turned)
        found = (found - dagger(found)) / 2  # rounding must not grow
        beside = inner - ahead @ small_g - small @ dagger(low) @ dagger(g)
        return (own_g, found), (own_g, -ahead @ g, -g @ back, found, beside)

    given = (*before, upper, lower, beside)
    _, (g, up, low, small, beside) = jax.lax.scan(add, last, given, reverse=True)
    g, small = (
        jnp.append(x, end[None], 0) for x, end in ((g, last[0]), (small, last[1]))
    )
    return Blocks(g, up, low, small, beside)


def _check_skew(name: str, given: Any) -> None:
    if not is_traced(given):
        apart = float(np.abs(given + dagger(given)).max())
        good = apart <= 1e-6 * float(np.abs(given).max())
        checks.require(good, f"{name} must be skew, x = -conj(x).T", apart=apart)


class Boundary(NamedTuple):
    """What leads do to the device's first and last slab.

    Attributes:
      retarded: Σ^R of the left and the right lead, [2, momenta, energies, n, n].
      rate: Γ = i (Σ^R − Σ^A), likewise.
      converged: whether both surfaces have, [momenta, energies].
    """

    retarded: Complex[Array, "2 momenta energies n n"]
    rate: Complex[Array, "2 momenta energies n n"]
    converged: Bool[Array, "momenta energies"]


def boundary(
    slabs: Slabs,
    energies: Float[Any, " energies"],
    kind: Kind,
    eta: float | Float[Any, ""],
) -> Boundary:
    """Returns Σ^R = τ g τ† of both leads.

    Args:
      slabs: matrices of electrons or phonons.
      energies: E, or frequencies ω.
      kind: surfaces are those at E + iη or (ω + iη)².
      eta: η, which the leads alone have: in the device it would lose particles.
    """
    z = (energies + 1j * eta) ** (2 if kind == "phonons" else 1)

    def of(*leads: Lead) -> tuple[Array, Array]:
        onsite, coupling, contact = (
            jnp.stack([getattr(lead, name) for lead in leads])[:, :, None]
            for name in ("onsite", "coupling", "contact")
        )
        surface = surface_gf(z, onsite, coupling)
        return contact @ surface.value @ dagger(contact), surface.converged

    both = slabs.left, slabs.right
    alike = slabs.left.contact.shape == slabs.right.contact.shape
    found = [of(*both)] if alike else [of(each) for each in both]
    retarded, converged = (jnp.concatenate(each) for each in zip(*found, strict=True))
    rate = 1j * (retarded - dagger(retarded))
    return Boundary(retarded, rate, converged.all(0))


class Scattering(NamedTuple):
    """Self-energies of scattering, lesser and greater: Σ^R is half their difference.

    Attributes:
      diagonal: [slabs, 2, momenta, energies, n, n].
      upper: of (i, i + 1), [slabs − 1, 2, ...]; None for zeros.
    """

    diagonal: Complex[Array, "slabs 2 momenta energies n n"]
    upper: Complex[Array, "between 2 momenta energies n n"] | None = None


def correlations(
    slabs: Slabs,
    energies: Float[Any, " energies"],
    kind: Kind,
    leads: Complex[Any, "2 2 momenta energies n n"],
    ends: Boundary,
    scattering: Scattering | None = None,
) -> Blocks:
    """Returns Green's functions of the device at each momentum and energy.

    With A = E − H − Σ^R, or ω² − Φ − Π^R, whose E and ω are real.

    Args:
      slabs: H or Φ.
      energies: E or ω.
      kind: of particles.
      leads: Σ^< and Σ^> of the left and the right lead: [lesser or greater, side, ...].
      ends: of the same leads.
      scattering: of the device; None for none.
    """
    z = energies ** (2 if kind == "phonons" else 1)
    onsite, coupling = (
        jnp.asarray(x)[:, :, None] for x in (slabs.onsite, slabs.coupling)
    )
    diagonal = z[:, None, None] * jnp.eye(onsite.shape[-1]) - onsite
    upper = jnp.broadcast_to(-coupling, (len(coupling), *diagonal.shape[1:]))
    lower = dagger(upper)
    sigma = jnp.zeros((len(diagonal), 2, *diagonal.shape[1:]), diagonal.dtype)
    off_diagonal = None
    if scattering is not None:
        sigma = scattering.diagonal
        diagonal = diagonal - (sigma[:, 1] - sigma[:, 0]) / 2
        if scattering.upper is not None:
            off_diagonal = (scattering.upper[:, 0], scattering.upper[:, 1])
            half = (off_diagonal[1] - off_diagonal[0]) / 2
            upper, lower = upper - half, lower + dagger(half)
    diagonal = diagonal.at[0].add(-ends.retarded[0]).at[-1].add(-ends.retarded[1])
    sigma = sigma.at[0].add(leads[:, 0]).at[-1].add(leads[:, 1])
    lesser, greater = sigma[:, 0], sigma[:, 1]
    return rgf(diagonal, upper, lower, lesser, greater, off_diagonal=off_diagonal)


def transmission(
    slabs: Slabs,
    energies: Float[Any, " energies"],
    *,
    kind: Kind = "electrons",
    eta: float | Float[Any, ""] = 1e-6,
) -> Float[Array, "momenta energies"]:
    """Returns T = tr[Γ_L G^R Γ_R G^A], the channels that are open from lead to lead.

    It is tr[Γ_L G^<] / i of the first slab where the right lead alone is full, and NaN
    where a lead's surface has not converged: a larger η helps there. Exactly at the
    edge of a parabolic band it is a half more, as η goes to 0, than beside the band.

    Args:
      slabs: matrices of electrons or of phonons.
      energies: E, or frequencies.
      kind: of particles.
      eta: imaginary part of the leads' energies.

    Raises:
      ConfigError: without float64, an η that is not above 0, energies that are no
        vector of finite real numbers, or blocks that do not belong together. Traced
        values are not checked.

    Examples:
      >>> from hpcjax.solvers import chain
      >>> with jax.enable_x64(True):
      ...     through = jax.jit(transmission)(chain().electrons, np.array([0.5, 3.0]))
      >>> through.round(2).tolist()
      [[1.0, 0.0]]
    """
    require_float64()
    checks.require_choice("kind", kind, get_args(Kind))
    checks.require_positive(eta=eta)
    if not is_traced(slabs, energies):
        check_slabs(slabs)
        given = np.asarray(energies)
        good = given.ndim == 1 and given.size > 0 and np.isrealobj(given)
        rule = "energies must be a vector of real, finite numbers"
        checks.require(good and bool(np.isfinite(given).all()), rule, energies=given)
    ends = boundary(slabs, energies, kind, eta)
    full = 1j * ends.rate.at[0].set(0)
    leads = jnp.stack([full, jnp.zeros_like(full)])
    found = correlations(slabs, energies, kind, leads, ends)
    through = jnp.einsum("...nm,...mn->...", ends.rate[0], found.lesser[0]).imag
    return jnp.where(ends.converged, through, jnp.nan)


def require_float64() -> None:
    """Raises ConfigError if numbers are of single precision, too coarse for leads."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    rule = "transport needs float64: call it under jax.enable_x64(True)"
    checks.require(dtype == jnp.float64, rule, dtype=str(dtype))
