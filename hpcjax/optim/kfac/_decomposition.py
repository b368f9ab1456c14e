"""Inverting the curvature of one layer: plain functions of A, G and a gradient.

Throughout, matrices are [a, g]: rows belong to A, columns to G.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.scipy import linalg
from jaxtyping import Array, Float

from hpcjax.collectives import pack_triangle, unpack_triangle
from hpcjax.optim.kfac.config import KfacOptions

Items = dict[str, jax.Array]
SIDES = ("a", "g")
Scalar = Float[Array, ""] | float


def item_shapes(options: KfacOptions, a: int, g: int) -> dict[str, tuple[int, ...]]:
    """Returns the arrays that are kept of a layer, by name, those of A first.

    `"vectors_a"`, `"vectors_g"` and either `"values_a"`, `"values_g"` or `"quotients"`
    of the eigen method; `"inverse_a"`, `"inverse_g"` of the other, as packed triangles
    where `symmetry_aware`.

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
    """Returns what is added to A and to G: γ each, or with π-damping π√γ and √γ/π.

    π = √(mean_a / mean_g) of the mean eigenvalues, and 1 where one of them is zero.
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
    """Returns the items of `item_shapes` that belong to `sides`.

    Args:
      options: the method.
      factors: A and G, `"a"` and `"g"`, symmetric positive semi-definite.
      damping: γ.
      sides: which factors to decompose; the quotients need both.

    Returns:
      Eigenvalues are clamped at zero, and are without damping unless in the quotients,
      which are 1 / (υ_A υ_Gᵀ + γ), or with π-damping 1 / ((υ_A + π√γ)(υ_G + √γ/π)ᵀ).
    """
    if options.method == "inverse":
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
    quotients = 1 / _spectrum(options, items, damping)
    kept = {f"vectors_{side}": items[f"vectors_{side}"] for side in sides}
    return kept | {"quotients": quotients}


def _inverse(
    options: KfacOptions, factor: Float[Array, "n n"], damping: Scalar
) -> jax.Array:
    """Returns (F + damping·I)⁻¹ by Cholesky, perhaps as a triangle."""
    identity = jnp.eye(factor.shape[0], dtype=factor.dtype)
    root = linalg.cho_factor(factor + damping * identity, lower=True)
    inverse = linalg.cho_solve(root, identity)
    inverse = (inverse + inverse.T) / 2
    return pack_triangle(inverse) if options.symmetry_aware else inverse


def _spectrum(
    options: KfacOptions, items: Mapping[str, jax.Array], damping: Scalar
) -> Float[Array, "a g"]:
    """Returns the damped eigenvalues of A⊗G."""
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

    With eigenvectors Q it is Q_A ((Q_Aᵀ M Q_G) / (υ_A υ_Gᵀ + γ)) Q_Gᵀ, which is exact
    for (A⊗G + γI)⁻¹; with inverses (A + γI)⁻¹ M (G + γI)⁻¹, which is not the same.

    Args:
      options: the method.
      items: what `decompose` returned, of both sides.
      matrix: the gradient.
      damping: γ, used only where eigenvalues were kept.
    """

    def product(*matrices: jax.Array) -> jax.Array:
        left, middle, right = matrices
        half = jnp.matmul(left, middle, precision=options.precision)
        return jnp.matmul(half, right, precision=options.precision)

    if options.method == "inverse":
        inverse = {side: items[f"inverse_{side}"] for side in SIDES}
        if options.symmetry_aware:
            sizes = dict(zip(SIDES, matrix.shape, strict=True))
            inverse = {s: unpack_triangle(inverse[s], sizes[s]) for s in SIDES}
        return product(inverse["a"], matrix, inverse["g"])
    vectors_a, vectors_g = items["vectors_a"], items["vectors_g"]
    turned = product(vectors_a.T, matrix, vectors_g)
    if options.prediv_used:
        turned = turned * items["quotients"]
    else:
        turned = turned / _spectrum(options, items, damping)
    return product(vectors_a, turned, vectors_g.T)
