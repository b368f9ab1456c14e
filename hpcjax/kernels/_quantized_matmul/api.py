"""Products with quantized matrices: checks, and the choice of an implementation."""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.kernels._quantized_matmul import tiles
from hpcjax.kernels._quantized_matmul.matrix import (
    QuantizedMatrix,
    check_matrix,
    replace_scales,
)
from hpcjax.kernels._quantized_matmul.pallas import find_problem, pallas
from hpcjax.kernels._quantized_matmul.reference import reference

log = logging.getLogger(__name__)

IMPLEMENTATIONS = ("reference", "pallas")
_DTYPES = ("float16", "bfloat16", "float32")


def quantized_matmul(
    x: Float[Array, "*batch inputs"],
    matrix: QuantizedMatrix,
    *,
    implementation: str = "auto",
    output: Any = None,
    interpret: bool = False,
) -> Float[Array, "*batch outputs"]:
    """Computes y_o = Σ_i x_i s_go (q_io − z_go), where g is the group of input i.

    Sums are float32. Weights are rounded to the dtype of x before the product, except
    by the Pallas kernel for one row, which multiplies in float32. Gradients with
    respect to x, scales and zeros are those of the reference; integers have none.

    Args:
      x: `[..., inputs]`, float16, bfloat16 or float32.
      matrix: Ŵ, not stacked.
      implementation: "reference" for plain JAX; "pallas" for the GPU kernels; "auto"
        for the kernels on a GPU where they support the matrix and x has at most 256
        rows. A named implementation is never replaced by another.
      output: dtype of y; None for that of x.
      interpret: runs the Pallas kernel in Python on any device, slowly, for tests.

    Returns:
      y, `[..., outputs]`.

    Raises:
      ConfigError: shapes or dtypes that do not fit, or an unknown implementation.
      UnsupportedOp: "pallas" with groups that are not a multiple of 32 inputs.

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
    _check(x, matrix, implementation)
    if implementation == "auto":
        implementation = _choose(x, matrix)
    if implementation == "reference":
        y = reference(x, matrix)
    else:
        y = _pallas(interpret, x, matrix)
    return y.astype(output or x.dtype)


def _check(x: jax.Array, matrix: QuantizedMatrix, implementation: str) -> None:
    if implementation not in ("auto", *IMPLEMENTATIONS):
        hint = nearest(implementation, ("auto", *IMPLEMENTATIONS))
        raise ConfigError(f"no implementation {implementation!r}{hint}")
    check_matrix(matrix)
    if not x.ndim or x.shape[-1] != matrix.inputs:
        raise ConfigError(
            f"x must be [..., {matrix.inputs}] for a matrix of {matrix.inputs} inputs: "
            f"got {list(x.shape)}"
        )
    if x.dtype.name not in _DTYPES:
        raise ConfigError(f"x must be one of {', '.join(_DTYPES)}: got {x.dtype}")


def _choose(x: jax.Array, matrix: QuantizedMatrix) -> str:
    platform = jax.default_backend()
    problem = find_problem(matrix)
    if platform != "gpu":
        problem = f"the device is a {platform}"
    elif math.prod(x.shape[:-1]) > tiles.MANY_ROWS:
        problem = f"x has more than {tiles.MANY_ROWS} rows"
    chosen = "reference" if problem else "pallas"
    _log_choice(chosen, problem or "the device is a gpu")
    return chosen


@functools.cache
def _log_choice(chosen: str, because: str) -> None:
    log.info("quantized_matmul takes implementation=%r: %s", chosen, because)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pallas(interpret: bool, x: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
    return pallas(x, matrix, interpret=interpret)


def _forward(
    interpret: bool, x: jax.Array, matrix: QuantizedMatrix
) -> tuple[jax.Array, tuple[jax.Array, QuantizedMatrix]]:
    return _pallas(interpret, x, matrix), (x, matrix)


def _backward(
    interpret: bool, kept: tuple[jax.Array, QuantizedMatrix], g: jax.Array
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


_pallas.defvjp(_forward, _backward)
