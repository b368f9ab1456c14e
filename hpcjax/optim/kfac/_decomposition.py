"""Inverting the curvature of one layer: functions of its factors and gradient.

The curvature of a layer is approximated by the Kronecker product A⊗G, with A `[a, a]`
the second moment of its inputs and G `[g, g]` that of its output gradients. Gradients
are matrices M `[a, g]`, rows belonging to A and columns to G, for which
(A⊗G)⁻¹ vec(M) = vec(A⁻¹ M G⁻¹).

References:
  Martens and Grosse, ICML 2015; Pauloski et al., KAISA, SC 2021, §2.1.3.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.scipy import linalg
from jaxtyping import Array, Float

from hpcjax.collectives import pack_triangle, unpack_triangle
from hpcjax.optim.kfac.options import KfacOptions

Items = dict[str, jax.Array]
SIDES = ("a", "g")
Scalar = Float[Array, ""] | float


def item_shapes(options: KfacOptions, a: int, g: int) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the arrays that are kept for a layer, A's first.

    The eigen method keeps `"vectors_a"` and `"vectors_g"`, with `"quotients"` if
    `prediv`, otherwise with `"values_a"` and `"values_g"`. The inverse method keeps
    `"inverse_a"` and `"inverse_g"`, as packed triangles if `symmetry_aware`.

    Examples:
      >>> item_shapes(KfacOptions(), 3, 2)
      {'vectors_a': (3, 3), 'vectors_g': (2, 2), 'quotients': (3, 2)}
    """
    sizes = {"a": a, "g": g}
    if options.method == "inverse":
        packed = options.symmetry_aware
        return {
            f"inverse_{side}": (n * (n + 1) // 2,) if packed else (n, n)
            for side, n in sizes.items()
        }
    shapes: dict[str, tuple[int, ...]] = {}
    for side, n in sizes.items():
        shapes[f"vectors_{side}"] = (n, n)
        if not options.prediv_used:
            shapes[f"values_{side}"] = (n,)
    return shapes | ({"quotients": (a, g)} if options.prediv_used else {})


def shared_damping(
    options: KfacOptions, mean_a: Scalar, mean_g: Scalar, damping: Scalar
) -> dict[str, Scalar]:
    """Returns the dampings that are added to A and to G.

    Without π-damping γ is added to both. With it A gets π√γ and G √γ/π, whose product
    is γ, and π = √(mean_a / mean_g) from the factors' mean eigenvalues, or 1 if one of
    these is zero: the larger factor gets the larger damping.

    References:
      Martens and Grosse, ICML 2015, §6.3.
    """
    if not options.pi_damping:
        return {"a": damping, "g": damping}
    usable = (mean_a > 0) & (mean_g > 0)
    ratio = jnp.where(usable, mean_a, 1.0) / jnp.where(usable, mean_g, 1.0)
    pi, root = jnp.sqrt(ratio), jnp.sqrt(damping)
    return {"a": pi * root, "g": root / pi}


def decompose(
    options: KfacOptions,
    factors: Mapping[str, Float[Array, "n n"]],
    damping: Scalar,
    sides: tuple[str, ...] = SIDES,
) -> Items:
    """Decomposes factors into those arrays of `item_shapes` that belong to `sides`.

    Args:
      options: the method.
      factors: A and G, `"a"` and `"g"`, symmetric positive semi-definite.
      damping: γ.
      sides: which factors to decompose; the quotients need both.

    Returns:
      The arrays by name. Eigenvalues are clamped at zero, since rounding makes small
      ones negative, and undamped. The quotients are 1 / (υ_A υ_Gᵀ + γ), or with
      π-damping 1 / ((υ_A + π√γ)(υ_G + √γ/π)ᵀ).
    """
    if options.method == "inverse":
        # The trace of a matrix is the sum of its eigenvalues.
        mean_a, mean_g = (jnp.diag(factors[side]).mean() for side in SIDES)
        added = shared_damping(options, mean_a, mean_g, damping)
        return {
            f"inverse_{side}": _inverse(options, factors[side], added[side])
            for side in sides
        }
    items: Items = {}
    for side in sides:
        values, vectors = jnp.linalg.eigh(factors[side], symmetrize_input=False)
        items[f"vectors_{side}"] = vectors
        items[f"values_{side}"] = jnp.maximum(values, 0)
    if not options.prediv_used:
        return items
    # Divisions at every step become products: `prediv`.
    quotients = 1 / _spectrum(options, items, damping)
    kept = {f"vectors_{side}": items[f"vectors_{side}"] for side in sides}
    return kept | {"quotients": quotients}


def _inverse(
    options: KfacOptions, factor: Float[Array, "n n"], damping: Scalar
) -> jax.Array:
    """Returns (F + damping·I)⁻¹ by Cholesky, as a triangle if `symmetry_aware`."""
    identity = jnp.eye(factor.shape[0], dtype=factor.dtype)
    root = linalg.cho_factor(factor + damping * identity, lower=True)
    inverse = linalg.cho_solve(root, identity)
    # Exactly symmetric, so that packing it as a triangle loses nothing.
    inverse = (inverse + inverse.T) / 2
    return pack_triangle(inverse) if options.symmetry_aware else inverse


def _spectrum(
    options: KfacOptions, items: Mapping[str, jax.Array], damping: Scalar
) -> Float[Array, "a g"]:
    """Returns the damped eigenvalues of A⊗G; [i, j] is for vector i of A, j of G."""
    values_a, values_g = items["values_a"], items["values_g"]
    if not options.pi_damping:
        return jnp.outer(values_a, values_g) + damping
    added = shared_damping(options, values_a.mean(), values_g.mean(), damping)
    return jnp.outer(values_a + added["a"], values_g + added["g"])


def precondition(
    options: KfacOptions,
    items: Mapping[str, jax.Array],
    matrix: Float[Array, "a g"],
    damping: Scalar,
) -> Float[Array, "a g"]:
    """Returns the gradient `matrix` multiplied by the inverse curvature.

    The eigen method applies (A⊗G + γI)⁻¹ exactly: with eigenvectors Q and eigenvalues υ
    it is Q_A ((Q_Aᵀ M Q_G) / (υ_A υ_Gᵀ + γ)) Q_Gᵀ, as A⊗G has the eigenvectors Q_A⊗Q_G
    and the eigenvalues υ_A υ_Gᵀ. The inverse method damps each factor by itself,
    (A + γI)⁻¹ M (G + γI)⁻¹, which is a different matrix.

    Args:
      options: the method.
      items: the result of `decompose` for both sides, maybe rounded to 16 bits.
      matrix: the gradient; its dtype is that of the products.
      damping: γ; used only if eigenvalues are kept, other arrays contain it already.
    """

    def product(*matrices: jax.Array) -> jax.Array:
        left, middle, right = matrices
        half = jnp.matmul(left, middle, precision=options.precision)
        return jnp.matmul(half, right, precision=options.precision)

    items = {name: item.astype(matrix.dtype) for name, item in items.items()}
    if options.method == "inverse":
        inverse = {side: items[f"inverse_{side}"] for side in SIDES}
        if options.symmetry_aware:
            sizes = dict(zip(SIDES, matrix.shape, strict=True))
            inverse = {s: unpack_triangle(inverse[s], sizes[s]) for s in SIDES}
        return product(inverse["a"], matrix, inverse["g"])
    vectors_a, vectors_g = items["vectors_a"], items["vectors_g"]
    rotated = product(vectors_a.T, matrix, vectors_g)
    if options.prediv_used:
        rotated = rotated * items["quotients"]
    else:
        rotated = rotated / _spectrum(options, items, damping)
    return product(vectors_a, rotated, vectors_g.T)
