"""Products of a sparse matrix with a dense one in plain JAX: the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from hpcjax.kernels._sr_bcrs.format import SRBCRS
from hpcjax.kernels._sr_bcrs.nibbles import unpack_nibbles


def spmm(matrix: SRBCRS, b: Shaped[Array, "K columns"]) -> Shaped[Array, "M N"]:
    """See `kernels.spmm`."""
    if b.dtype == jnp.uint8:
        b = unpack_nibbles(b)
    tiles = matrix.tiles()
    total = "int32" if matrix.bits else "float32"
    b = b.astype("int32") if matrix.bits else b
    columns = matrix.columns.reshape(-1, matrix.stride)
    # Padding reads the last row, and multiplies it with zero; also infinity stays out.
    taken = jnp.where((columns >= 0)[..., None], b[columns], 0)
    products = jnp.einsum(
        "gvs,gsn->gvn", tiles, taken, precision="highest", preferred_element_type=total
    )
    rows = matrix.shape[0] // matrix.vector
    y = jax.ops.segment_sum(products, matrix.rows, rows, indices_are_sorted=True)
    return y.reshape(matrix.shape[0], -1)


def transposed(matrix: SRBCRS, g: Shaped[Array, "M N"]) -> Shaped[Array, "K N"]:
    """Returns aᵀ g in float32, of floats."""
    rows = matrix.shape[0] // matrix.vector
    of_rows = g.reshape(rows, matrix.vector, g.shape[1])[matrix.rows]
    products = jnp.einsum(
        "gvs,gvn->gsn",
        matrix.tiles(),
        of_rows,
        precision="highest",
        preferred_element_type="float32",
    )
    width = matrix.shape[1]
    to = jnp.where(matrix.columns < 0, width, matrix.columns)
    y = jnp.zeros((width, g.shape[1]), jnp.float32)
    return y.at[to].add(products.reshape(len(to), g.shape[1]), mode="drop")
