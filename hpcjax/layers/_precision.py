"""Bilinear operations in a low-precision dtype that accumulate in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Bilinear = Callable[[jax.Array, jax.Array, Any], jax.Array]


def accumulate_float32(
    operation: Bilinear, x: jax.Array, kernel: jax.Array, compute: Any
) -> jax.Array:
    """Returns float32 `operation(x, kernel, float32)` of operands cast to `compute`.

    The automatic transpose of a product bfloat16 × bfloat16 → float32 multiplies a
    float32 gradient by a bfloat16 operand, which falls off the fast units of a GPU (and
    is refused for convolutions). Here the gradient is cast to `compute` first. So with
    a low-precision `compute` only reverse-mode differentiation works; with float32 the
    operation is used as it is.

    Args:
      operation: `(x, kernel, preferred_element_type) -> y`, linear in x and in kernel.
      x: left operand.
      kernel: right operand.
      compute: dtype both are cast to.
    """
    x, kernel = x.astype(compute), kernel.astype(compute)
    if jnp.dtype(compute).itemsize >= 4:
        return operation(x, kernel, None)

    @jax.custom_vjp
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return operation(x, kernel, "float32")

    def forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
        return product(x, kernel), (x, kernel)

    def backward(operands: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, pull = jax.vjp(lambda x, kernel: operation(x, kernel, None), *operands)
        return pull(g.astype(compute))

    product.defvjp(forward, backward)
    return product(x, kernel)
