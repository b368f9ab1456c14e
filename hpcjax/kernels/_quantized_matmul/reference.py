"""Products with quantized matrices in plain JAX: the definition."""

import jax
import jax.numpy as jnp

from hpcjax.kernels._quantized_matmul.matrix import QuantizedMatrix


def reference(x: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
    """Returns x Ŵ in float32, with weights rounded to the dtype of x.

    Args:
      x: `[..., inputs]`.
      matrix: Ŵ, `[inputs, outputs]`.
    """
    if matrix.order is not None:
        x = x[..., matrix.order]
    return jnp.matmul(
        x, matrix.rows(x.dtype), precision="highest", preferred_element_type="float32"
    )
