"""Products of dense matrices at a sparse one's places in plain JAX: the definition."""

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from hpcjax.kernels._sr_bcrs.format import SRBCRS
from hpcjax.kernels._sr_bcrs.nibbles import unpack_nibbles


def sddmm(
    x: Shaped[Array, "M width"], y: Shaped[Array, "N width"], pattern: SRBCRS
) -> Shaped[Array, "groups V s"]:
    """See `kernels.sddmm`; returns the tiles."""
    if x.dtype == jnp.uint8:
        x, y = unpack_nibbles(x), unpack_nibbles(y)
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    total = "int32" if integer else "float32"
    if integer:
        x, y = x.astype(total), y.astype(total)
    columns = pattern.columns.reshape(-1, pattern.stride)
    rows = pattern.shape[0] // pattern.vector
    products = jnp.einsum(
        "gvk,gsk->gvs",
        x.reshape(rows, pattern.vector, x.shape[1])[pattern.rows],
        y[columns],
        precision="highest",
        preferred_element_type=total,
    )
    return jnp.where((columns >= 0)[:, None], products, 0)
