"""Symmetric matrices in half as many words, to send or to keep.

The layout is LAPACK's rectangular full packed one: a rectangle that slices and masks
make. Index lists, which row-by-row packing takes, would be as long as the matrix.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped


def pack_triangle(matrix: Shaped[Array, "*batch n n"]) -> Shaped[Array, "*batch m"]:
    """Returns the m = n(n+1)/2 words of a symmetric matrix.

    With h = ⌊n/2⌋, the right columns h … n−1 down to the diagonal stay in their place,
    and below them lies the transposed upper triangle of the first h rows and columns.

    Args:
      matrix: `[..., n, n]`; what is below the diagonal is not looked at.

    References:
      Gustavson et al., Rectangular Full Packed Format for Cholesky's Algorithm, 2010.

    Examples:
      >>> pack_triangle(jnp.array([[1, 2, 3], [2, 4, 5], [3, 5, 6]])).tolist()
      [2, 3, 4, 5, 1, 6]
    """
    n = matrix.shape[-1]
    h, batch = n // 2, [(0, 0)] * (matrix.ndim - 2)
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
    """Says which words of the rectangle stand where they do in the matrix."""
    h, rows = n // 2, n + 1 - n % 2
    return jnp.arange(rows)[:, None] <= h + jnp.arange(n - h)
