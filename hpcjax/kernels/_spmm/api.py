"""Products of a sparse matrix with a dense one: checks, and who computes them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.kernels._dispatch import INTERPRETED, choose
from hpcjax.kernels._sddmm import launch as sddmm_launch
from hpcjax.kernels._sddmm import reference as sddmm_reference
from hpcjax.kernels._spmm import launch, reference
from hpcjax.kernels._sr_bcrs.format import SRBCRS, with_values

# Bits of the sparse and of the dense operand.
PAIRS = ((16, 16), (16, 8), (8, 8), (16, 4), (12, 4), (8, 4), (4, 4))
FLOATS = ("float32", "float16", "bfloat16")
_RIGHT = {"int16": 16, "int8": 8, "uint8": 4}


def spmm(
    matrix: SRBCRS,
    b: Shaped[Array, "K columns"],
    *,
    implementation: str = "auto",
) -> Shaped[Array, "M N"]:
    """Multiplies a sparse matrix of column vectors with a dense one.

    Products of integers are exact modulo 2³², never saturated. Of floats, sums are
    float32, and there are gradients with respect to the values and b.

    Args:
      matrix: `[M, K]`, of integers or floats.
      b: `[K, N]`: int16, int8, or uint8 `[K, N / 2]` of `pack_nibbles`, with limbs of
        the matrix of 8, 8 and 4 bits; or of the matrix' floats.
      implementation: "reference" for plain JAX; "triton" for the GPU kernel;
        "interpreted" for the same by numpy, slowly; "auto" for the kernel on a GPU.

    Returns:
      `[M, N]`, int32, or float32 of floats.

    Raises:
      ConfigError: shapes, bits or dtypes that do not fit.
      UnsupportedOp: the kernel is named and cannot run here, or takes another stride.

    References:
      Li, Osawa and Hoefler, Efficient Quantized Sparse Matrix Operations on Tensor
      Cores, SC 2022, §4.2 and §4.4.

    Examples:
      >>> from hpcjax import kernels
      >>> matrix = kernels.sr_bcrs(jnp.array([[0, 1], [0, -2]]), vector=2)
      >>> spmm(matrix, jnp.array([[5], [3]], jnp.int8)).tolist()
      [[3], [-6]]
    """
    right = _check(matrix, b)
    problem = launch.find_problem(matrix)
    chosen = choose("spmm", implementation, unsupported=problem)
    if right:
        return _multiply(chosen, matrix, b, right)
    return _of_floats(chosen, matrix, b)


def _multiply(chosen: str, matrix: SRBCRS, b: jax.Array, right: int) -> jax.Array:
    if chosen == "reference":
        return reference.spmm(matrix, b)
    return launch.spmm(matrix, b, right, interpreted=chosen == INTERPRETED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_floats(chosen: str, matrix: SRBCRS, b: jax.Array) -> jax.Array:
    return _multiply(chosen, matrix, b, 0)


def _forward(chosen: str, matrix: SRBCRS, b: jax.Array) -> tuple[Any, Any]:
    return _of_floats(chosen, matrix, b), (matrix, b)


def _backward(chosen: str, kept: Any, g: jax.Array) -> tuple[Any, Any]:
    matrix, b = kept
    g = g.astype(b.dtype)
    if chosen == "reference":
        tiles = sddmm_reference.sddmm(g, b, matrix)
    else:
        interpreted = chosen == INTERPRETED
        tiles = sddmm_launch.sddmm(g, b, matrix, 0, interpreted=interpreted)
    to_b = reference.transposed(matrix, g).astype(b.dtype)
    return zero_but_values(matrix, tiles.astype(matrix.values.dtype)), to_b


_of_floats.defvjp(_forward, _backward)


def zero_but_values(matrix: SRBCRS, tiles: jax.Array) -> SRBCRS:
    """Returns the cotangent of a matrix: of its numbers; places have none."""
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jax.dtypes.float0), matrix)
    return with_values(none, tiles)


def _check(matrix: SRBCRS, b: jax.Array) -> int:
    """Returns the bits of b, 0 for floats."""
    if b.ndim != 2 or b.shape[0] != matrix.shape[1]:
        raise ConfigError(
            f"b must be [{matrix.shape[1]}, N] for a matrix of {list(matrix.shape)}: "
            f"got {list(b.shape)}"
        )
    if matrix.bits is None:
        dtype = matrix.values.dtype
        good = b.dtype == dtype and dtype.name in FLOATS
        rule = f"both operands must be of one dtype of {FLOATS}"
        checks.require(good, rule, matrix=dtype.name, b=b.dtype.name)
        return 0
    right = _RIGHT.get(b.dtype.name, 0)
    good = (matrix.bits, right) in PAIRS
    rule = f"bits of matrix and b must be one of {PAIRS}; b int16, int8 or packed uint8"
    checks.require(good, rule, matrix=matrix.bits, b=b.dtype.name)
    limb = min(8, right)
    rule = f"limbs for b of {right} bits must have {limb} bits: sr_bcrs(limb={limb})"
    checks.require(matrix.limb == limb, rule, limb=matrix.limb)
    return right
