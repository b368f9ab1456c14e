"""Packing of symmetric matrices into half as many words.

The layout is LAPACK's rectangular full packed format, a rectangle that takes only
slices and masks. Packing row by row would take lists of indices as long as the matrix.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped


def pack_triangle(matrix: Shaped[Array, "*batch n n"]) -> Shaped[Array, "*batch m"]:
    """Returns the m = n(n+1)/2 words of a symmetric matrix.

    With h = ⌊n/2⌋, columns h … n−1 of the upper triangle stay in their rows. The part
    of the rectangle below the diagonal holds the rest of the upper triangle, its first
    h rows and columns, transposed.

    Args:
      matrix: `[..., n, n]`; only the upper triangle is read.

    References:
      Gustavson et al., Rectangular Full Packed Format for Cholesky's Algorithm, 2010.

    Examples:
      >>> pack_triangle(jnp.array([[1, 2, 3], [2, 4, 5], [3, 5, 6]])).tolist()
      [2, 3, 4, 5, 1, 6]
    """
    n = matrix.shape[-1]
    h, batch = n // 2, [(0, 0)] * (matrix.ndim - 2)
    # The rectangle has n - h columns; n or n + 1 rows make n (n + 1) / 2 words.
    rows = n + 1 - n % 2
    right = jnp.pad(matrix[..., h:], [*batch, (0, rows - n), (0, 0)])
    corner = matrix[..., :h, :h].swapaxes(-1, -2)
    below = jnp.pad(corner, [*batch, (h + 1, 0), (0, n - 2 * h)])
    return jnp.where(_stays(n), right, below).reshape(*matrix.shape[:-2], -1)


def unpack_triangle(
    packed: Shaped[Array, "*batch m"], n: int
) -> Shaped[Array, "*batch n n"]:
    """Returns the symmetric matrix `[..., n, n]` of `pack_triangle`.

    Examples:
      >>> matrix = jnp.array([[1, 2], [2, 3]])
      >>> unpack_triangle(pack_triangle(matrix), 2).tolist()
      [[1, 2], [2, 3]]
    """
    h, batch = n // 2, [(0, 0)] * (packed.ndim - 1)
    rectangle = packed.reshape(*packed.shape[:-1], n + 1 - n % 2, n - h)
    right = jnp.pad(rectangle[..., :n, :], [*batch, (0, 0), (h, 0)])
    corner = rectangle[..., h + 1 :, :h].swapaxes(-1, -2)
    upper = right + jnp.pad(corner, [*batch, (0, n - h), (0, n - h)])
    columns = jnp.arange(n)
    upper = jnp.where(columns[:, None] <= columns, upper, 0)
    strict = jnp.where(columns[:, None] < columns, upper, 0)
    return upper + strict.swapaxes(-1, -2)


def _stays(n: int) -> Bool[Array, "rows columns"]:
    """Returns a mask of the words that are in their row of the matrix."""
    h, rows = n // 2, n + 1 - n % 2
    return jnp.arange(rows)[:, None] <= h + jnp.arange(n - h)
