"""Bilinear operations in a low-precision dtype that accumulate in float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Bilinear = Callable[..., jax.Array]


def accumulate_float32(
    operation: Bilinear,
    x: jax.Array,
    kernel: jax.Array,
    compute: Any,
    *integers: jax.Array,
) -> jax.Array:
    """Returns float32 `operation(x, kernel, float32)` of operands cast to `compute`.

    The automatic transpose of a product bfloat16 × bfloat16 → float32 multiplies a
    float32 gradient by a bfloat16 operand, which falls off the fast units of a GPU (and
    is refused for convolutions). Here the gradient is cast to `compute` first. So with
    a low-precision `compute` only reverse-mode differentiation works; with float32 the
    operation is used as it is.

    Args:
      operation: `(x, kernel, preferred_element_type, *integers) -> y`, linear in x and
        in kernel.
      x: left operand.
      kernel: right operand.
      compute: dtype to which both operands are cast.
      *integers: further traced operands, without gradient; `operation` must not close
        over traced arrays.
    """
    x, kernel = x.astype(compute), kernel.astype(compute)
    if jnp.dtype(compute).itemsize >= 4:
        return operation(x, kernel, None, *integers)

    @jax.custom_vjp
    def product(x: jax.Array, kernel: jax.Array, *integers: jax.Array) -> jax.Array:
        return operation(x, kernel, "float32", *integers)

    def forward(*operands: jax.Array) -> tuple[jax.Array, Any]:
        return product(*operands), operands

    def backward(operands: Any, g: jax.Array) -> tuple[Any, ...]:
        x, kernel, *integers = operands
        # Without `preferred_element_type` the transposed products take both operands in
        # `compute`, too.
        _, pull = jax.vjp(lambda x, k: operation(x, k, None, *integers), x, kernel)
        return (*pull(g.astype(compute)), *(None for _ in integers))

    product.defvjp(forward, backward)
    return product(x, kernel, *integers)
