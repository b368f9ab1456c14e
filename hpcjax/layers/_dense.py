"""The affine map over the last axis."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import kernels
from hpcjax.kernels import QuantizedMatrix
from hpcjax.layers import _precision


def dense(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"] | QuantizedMatrix,
    bias: Float[Array, " outputs"] | None = None,
    *,
    compute: str = "float32",
    output: str | None = None,
) -> Float[Array, "*batch outputs"]:
    """Computes y = x W + b over the last axis.

    The product runs in `compute` with float32 accumulation; the bias is added in
    float32 and the sum is then rounded once.

    Args:
      x: `[..., inputs]`.
      kernel: W, `[inputs, outputs]`, or a quantized one, whose product runs as
        `kernels.quantized_matmul` chooses.
      bias: b, `[outputs]`, or None.
      compute: dtype of the product's operands.
      output: dtype of the result; None means `compute`.

    Returns:
      `[..., outputs]`.

    Examples:
      >>> dense(jnp.ones((2, 3)), jnp.ones((3, 1)), jnp.ones(1)).tolist()
      [[4.0], [4.0]]
    """

    def product(x: jax.Array, kernel: jax.Array, accumulate: str | None) -> jax.Array:
        return jnp.matmul(x, kernel, preferred_element_type=accumulate)

    if isinstance(kernel, QuantizedMatrix):
        y = kernels.quantized_matmul(x.astype(compute), kernel, output="float32")
    else:
        y = _precision.accumulate_float32(product, x, kernel, compute)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(output or compute)
