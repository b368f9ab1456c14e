"""Products with quantized matrices: checks, and the choice of an implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core.errors import ConfigError
from hpcjax.kernels._dispatch import INTERPRETED, choose
from hpcjax.kernels._quantized_matmul import launch
from hpcjax.kernels._quantized_matmul.matrix import (
    QuantizedMatrix,
    check_matrix,
    replace_scales,
)
from hpcjax.kernels._quantized_matmul.reference import reference

_DTYPES = ("float16", "bfloat16", "float32")


def quantized_matmul(
    x: Float[Array, "*batch inputs"],
    matrix: QuantizedMatrix,
    *,
    implementation: str = "auto",
    output: Any = None,
) -> Float[Array, "*batch outputs"]:
    """Computes y_o = Σ_i x_i s_go (q_io − z_go), where g is the group of input i.

    Sums are float32, and weights are rounded to the dtype of x. The kernel for one row
    of a lower dtype instead adds 32 products at a time in float16, of weights that are
    not rounded. Gradients with respect to x, scales and zeros are those of the
    reference; integers have none.

    Args:
      x: `[..., inputs]`, float16, bfloat16 or float32.
      matrix: Ŵ, not stacked.
      implementation: "reference" for plain JAX; "triton" for the GPU kernels;
        "interpreted" for these by numpy on the CPU, slowly; "auto" for the kernel on a
        GPU where it supports the matrix and x has one row: the one for several has not
        been timed against the reference. What is named is never replaced.
      output: dtype of y; None for that of x.

    Returns:
      y, `[..., outputs]`.

    Raises:
      ConfigError: shapes or dtypes that do not fit, or an unknown implementation.
      UnsupportedOp: a kernel is named and cannot run here, or groups are not a multiple
        of 32 inputs.

    References:
      Frantar et al., GPTQ, ICLR 2023, §5 (the product of one token).

    Examples:
      >>> from hpcjax.kernels import quantized_matrix
      >>> integers = jnp.array([[0], [3]], jnp.uint8)
      >>> one = jnp.ones((1, 1))
      >>> matrix = quantized_matrix(integers, 2 * one, one, bits=2)
      >>> quantized_matmul(jnp.array([1.0, 10.0]), matrix).tolist()
      [38.0]
    """
    _check(x, matrix)
    chosen = choose(
        "quantized_matmul",
        implementation,
        unsupported=launch.find_problem(matrix),
        slower=None if x.size == matrix.inputs else "x has several rows",
    )
    if chosen == "reference":
        y = reference(x, matrix)
    else:
        y = _by_kernel(chosen == INTERPRETED, x, matrix)
    return y.astype(output or x.dtype)


def _check(x: jax.Array, matrix: QuantizedMatrix) -> None:
    check_matrix(matrix)
    if not x.ndim or x.shape[-1] != matrix.inputs:
        raise ConfigError(
            f"x must be [..., {matrix.inputs}] for a matrix of {matrix.inputs} inputs: "
            f"got {list(x.shape)}"
        )
    if x.dtype.name not in _DTYPES:
        raise ConfigError(f"x must be one of {', '.join(_DTYPES)}: got {x.dtype}")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(interpreted: bool, x: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
    return launch.product(x, matrix, interpreted=interpreted)


def _forward(
    interpreted: bool, x: jax.Array, matrix: QuantizedMatrix
) -> tuple[jax.Array, tuple[jax.Array, QuantizedMatrix]]:
    return _by_kernel(interpreted, x, matrix), (x, matrix)


def _backward(
    interpreted: bool, kept: tuple[jax.Array, QuantizedMatrix], g: jax.Array
) -> tuple[jax.Array, Any]:
    x, matrix = kept
    # The cotangent may be float32: in the dtype of x, both operands of the products
    # below have low precision and use tensor cores.
    g = g.astype(x.dtype).reshape(-1, g.shape[-1])
    rows = (x if matrix.order is None else x[..., matrix.order]).reshape(len(g), -1)
    weights, pull = jax.vjp(
        lambda scale, zero: replace_scales(matrix, scale, zero).rows(x.dtype),
        matrix.scale,
        matrix.zero,
    )
    product = functools.partial(jnp.matmul, precision="highest")
    dx = product(g, weights.T, preferred_element_type="float32").astype(x.dtype)
    if matrix.order is not None:
        # Back from the order of rows to that of inputs.
        dx = jnp.zeros_like(dx).at[:, matrix.order].set(dx)
    # The gradient of the dense weights is xᵀ g; `pull` sums it over groups.
    scale, zero = pull(product(rows.T, g))
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jax.dtypes.float0), matrix)
    return dx.reshape(x.shape), replace_scales(none, scale, zero)


_by_kernel.defvjp(_forward, _backward)
