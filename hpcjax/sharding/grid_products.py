"""Products of matrices that are cut over grids of devices: the peers of `tensor3d`.

For use inside `shard_map`. Their gradients gather operands again, and do not keep them.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

Product = Callable[[jax.Array, jax.Array], jax.Array]


def _forget_gathered(product: Product) -> Product:
    """Returns a product whose backward pass gathers again."""
    policy = jax.checkpoint_policies.nothing_saveable
    return jax.checkpoint(product, policy=policy)


def summa(
    a: Float[Array, "m k"], b: Float[Array, "k n"], axes: tuple[str, str]
) -> Float[Array, "m n"]:
    """Returns this device's block of A B on a square of devices.

    Of q × q devices, the one in row i and column j has the blocks A_ij and B_ij; the
    blocks of A in its row and those of B in its column are gathered, which sends as
    much as the panels that SUMMA broadcasts one after the other.

    Args:
      a: block of A.
      b: block of B.
      axes: of the mesh, along which i and j count.

    References:
      van de Geijn and Watts, SUMMA, 1997; Xu et al., Optimus, arXiv 2104.05343, 2021.
    """
    rows, columns = axes

    @_forget_gathered
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        wide = jax.lax.all_gather(a, columns, axis=1, tiled=True)
        tall = jax.lax.all_gather(b, rows, axis=0, tiled=True)
        return wide @ tall

    return product(a, b)


def cube_product(
    a: Float[Array, "m k"], b: Float[Array, "k n"], axes: tuple[str, str, str]
) -> Float[Array, "m n"]:
    """Returns this device's block of A B on a cube of devices.

    Of q × q × q devices the one at (i, j, l) has of A the l-th of q parts of columns of
    block (i, j), of B the i-th of q parts of rows of block (j, l), and gets of A B the
    j-th of q parts of columns of block (i, l).

    Args:
      a: `[M / q, K / q²]`.
      b: `[K / q², N / q]`.
      axes: of the mesh, along which i, j and l count.

    Returns:
      `[M / q, N / q²]`.

    References:
      Bian et al., Maximizing Parallelism in Distributed Training for Huge Neural
      Networks, arXiv 2105.14450, 2021.
    """
    first, second, third = axes

    @_forget_gathered
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        block = jax.lax.all_gather(a, third, axis=1, tiled=True)
        other = jax.lax.all_gather(b, first, axis=0, tiled=True)
        return jax.lax.psum_scatter(
            block @ other, second, scatter_dimension=1, tiled=True
        )

    return product(a, b)
