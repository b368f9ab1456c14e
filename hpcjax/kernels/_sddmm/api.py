"""Products of dense matrices at a sparse one's places: checks, and the choice."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Shaped

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.kernels._dispatch import INTERPRETED, choose
from hpcjax.kernels._sddmm import launch, reference
from hpcjax.kernels._spmm import reference as spmm_reference
from hpcjax.kernels._sr_bcrs.format import SRBCRS, with_values

# Bits of both operands, by dtype; 0 for floats.
BITS = {"int16": 16, "int8": 8, "uint8": 4, "float32": 0, "float16": 0, "bfloat16": 0}


def sddmm(
    x: Shaped[Array, "M width"],
    y: Shaped[Array, "N width"],
    pattern: SRBCRS,
    *,
    implementation: str = "auto",
) -> SRBCRS:
    """Computes x yᵀ at the vectors of a sparse matrix alone.

    Products of integers are exact modulo 2³², never saturated. Of floats, sums are
    float32, and there are gradients with respect to x and y.

    Args:
      x: `[M, K]`: int16, int8, uint8 `[M, K / 2]` of `pack_nibbles`, or floats.
      y: `[N, K]`, of the same dtype.
      pattern: `[M, N]`, of which the numbers do not count.
      implementation: as for `spmm`.

    Returns:
      A matrix of the pattern's places with int32, or float32 of floats.

    Raises:
      ConfigError: shapes or dtypes that do not fit.
      UnsupportedOp: the kernel is named and cannot run here, or takes another stride.

    References:
      Li, Osawa and Hoefler, Efficient Quantized Sparse Matrix Operations on Tensor
      Cores, SC 2022, §4.3.

    Examples:
      >>> import jax.numpy as jnp
      >>> from hpcjax import kernels
      >>> pattern = kernels.sr_bcrs(jnp.array([[0, 1], [0, 1]]), vector=2)
      >>> x, y = jnp.array([[1], [2]], jnp.int8), jnp.array([[5], [3]], jnp.int8)
      >>> sddmm(x, y, pattern).to_dense().tolist()
      [[0, 3], [0, 6]]
    """
    _check(x, y, pattern)
    problem = launch.find_problem(pattern)
    chosen = choose("sddmm", implementation, unsupported=problem)
    if BITS[x.dtype.name]:
        return with_values(pattern, _multiply(chosen, x, y, pattern))
    return with_values(pattern, _of_floats(chosen, pattern, x, y))


def _multiply(chosen: str, x: jax.Array, y: jax.Array, pattern: SRBCRS) -> jax.Array:
    if chosen == "reference":
        return reference.sddmm(x, y, pattern)
    bits, interpreted = BITS[x.dtype.name], chosen == INTERPRETED
    return launch.sddmm(x, y, pattern, bits, interpreted=interpreted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_floats(chosen: str, pattern: SRBCRS, x: jax.Array, y: jax.Array) -> jax.Array:
    return _multiply(chosen, x, y, pattern)


def _forward(chosen: str, pattern: SRBCRS, *operands: jax.Array) -> tuple[Any, Any]:
    return _of_floats(chosen, pattern, *operands), (pattern, *operands)


def _backward(chosen: str, kept: Any, g: jax.Array) -> tuple[Any, Any, Any]:
    pattern, x, y = kept
    # The products of a sparse matrix whose numbers are the cotangent.
    matrix = with_values(pattern, g.astype(x.dtype))
    to_x = spmm_reference.spmm(matrix, y).astype(x.dtype)
    to_y = spmm_reference.transposed(matrix, x).astype(y.dtype)
    return None, to_x, to_y


_of_floats.defvjp(_forward, _backward)


def _check(x: jax.Array, y: jax.Array, pattern: SRBCRS) -> None:
    good = x.dtype == y.dtype and x.dtype.name in BITS
    rule = f"x and y must be of one dtype of {', '.join(BITS)}"
    checks.require(good, rule, x=x.dtype.name, y=y.dtype.name)
    height, width = pattern.shape
    shapes = [list(x.shape), list(y.shape)]
    if x.ndim != 2 or shapes != [[height, x.shape[1]], [width, x.shape[1]]]:
        raise ConfigError(
            f"x must be [{height}, K] and y [{width}, K] for a pattern of "
            f"[{height}, {width}]: got {shapes[0]} and {shapes[1]}"
        )
