"""Inverse p-th roots of symmetric positive semi-definite matrices."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpcjax.core import checks
from hpcjax.core.extremes import largest
from hpcjax.optim import norms

TINY = 1e-30
POWER_ITERATIONS = 200
NEWTON_ITERATIONS = 100
NEWTON_TOLERANCE = 1e-6

_dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def largest_eigenvalue(matrix: Float[Array, "n n"]) -> Float[Array, ""]:
    """Returns λ_max of a positive semi-definite matrix by power iteration.

    Starts from a fixed random vector, since a structured one, such as all ones, may be
    orthogonal to the eigenvector. Stops when the Rayleigh quotient changes by less than
    its rounding error, or after 200 products.

    Args:
      matrix: symmetric positive semi-definite.

    Examples:
      >>> round(float(largest_eigenvalue(jnp.diag(jnp.array([1.0, 3.0])))), 4)
      3.0
    """
    size = matrix.shape[0]
    fixed = np.random.Generator(np.random.Philox(0)).normal(size=size)
    start = jnp.asarray(fixed / np.linalg.norm(fixed), matrix.dtype)
    tolerance = float(jnp.finfo(matrix.dtype).eps)

    def quotient(vector: Array) -> tuple[Array, Array]:
        image = _dot(matrix, vector)
        length = norms.norm(image)
        return image / jnp.where(length > 0, length, 1), jnp.sum(vector * image)

    def unconverged(carry: tuple[Array, Array, Array, Array]) -> Array:
        _, value, old, count = carry
        moved = jnp.abs(value - old) > tolerance * jnp.abs(value)
        return moved & (count < POWER_ITERATIONS)

    def body(carry: tuple[Array, Array, Array, Array]):
        vector, value, _, count = carry
        vector, new = quotient(vector)
        return vector, new, value, count + 1

    vector, value = quotient(start)
    # `old` must vary over the same mesh axes before and after the loop, so it is made
    # of `value`; -1 is no eigenvalue of a positive semi-definite matrix.
    first = (vector, value, 0 * value - 1, jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(unconverged, body, first)[1]


@jax.custom_batching.custom_vmap
def eigh(
    matrix: Float[Array, "n n"],
) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Returns eigenvalues, ascending, and eigenvectors of a symmetric matrix.

    Under `vmap` on CPU the matrices are decomposed one after another: the batched
    LAPACK call waits for workers of the thread pool in which it runs itself, so that it
    deadlocks where convolutions fill that pool (jax 0.10.2 and 0.11.2, two cores).
    """
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors


@eigh.def_vmap
def _eigh_batched(
    size: int, batched: list[bool], matrices: Float[Array, "batch n n"]
) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
    del size, batched
    results = jax.lax.platform_dependent(
        matrices,
        cpu=lambda stack: jax.lax.map(lambda matrix: tuple(eigh(matrix)), stack),
        default=lambda stack: tuple(jnp.linalg.eigh(stack)),
    )
    return results, (True, True)


def inverse_root_eigh(
    matrix: Float[Array, "n n"],
    power: int,
    eps: float = 1e-6,
    damping: Literal["floor", "ridge"] = "floor",
) -> Float[Array, "n n"]:
    """Returns A^(−1/p) by an eigendecomposition.

    `"floor"` raises the eigenvalues below ε·λ_max to it, `"ridge"` adds ε·λ_max to
    all: two different matrices, 9 % apart at condition 1e6 and ε = 1e-6.

    Args:
      matrix: A, symmetric positive semi-definite.
      power: p.
      eps: ε.
      damping: what is done with small eigenvalues.

    Raises:
      ConfigError: an unknown damping, or p < 1.

    Examples:
      >>> root = inverse_root_eigh(16 * jnp.eye(2), power=4, eps=0.0)
      >>> [round(float(x), 4) for x in root.ravel()]
      [0.5, 0.0, 0.0, 0.5]
    """
    checks.require_choice("damping", damping, ("floor", "ridge"))
    checks.require_count(1, power=power)
    values, vectors = eigh(matrix)
    shift = eps * jnp.maximum(values[-1], 0)
    damped = values + shift if damping == "ridge" else jnp.maximum(values, shift)
    roots = jnp.maximum(damped, TINY) ** (-1 / power)
    return _dot(vectors * roots, vectors.T)


class _Newton(NamedTuple):
    """Loop state: X, M = XᵖA, the residual of the best X, whether it rose, steps."""

    x: Array
    m: Array
    error: Array
    stuck: Array
    count: Array


class NewtonRoot(NamedTuple):
    """An inverse root found by iteration, and how well it converged.

    Attributes:
      root: X ≈ A^(−1/p).
      error: max|M − I| of the residual M = XᵖA of the damped A.
      iterations: Newton steps done.
    """

    root: Float[Array, "n n"]
    error: Float[Array, ""]
    iterations: Int[Array, ""]


def _int_power(matrix: Array, power: int) -> Array:
    """Returns the matrix to a positive integer power by repeated squaring."""
    if power == 1:
        return matrix
    half = _int_power(_dot(matrix, matrix), power // 2)
    return _dot(half, matrix) if power % 2 else half


def inverse_root_newton(
    matrix: Float[Array, "n n"], power: int, eps: float = 1e-6
) -> NewtonRoot:
    """Returns A^(−1/p) by the coupled Newton iteration, which needs only products.

    With A ← A + ε·λ_max·I, z = (1+p)/(2‖A‖_F), X = z^(1/p)·I and M = zA,
    it repeats Q = (1 + 1/p)I − M/p, X ← XQ, M ← QᵖM until max|M − I| < 1e-6, at most
    100 times. The ridge is that of `inverse_root_eigh(..., damping="ridge")`. In exact
    arithmetic the residual falls from the second step on; once it does not, rounding
    has taken over, and the iteration stops with the best X.

    Args:
      matrix: A, symmetric positive semi-definite.
      power: p.
      eps: ε.

    Raises:
      ConfigError: p < 1.

    Examples:
      >>> found = inverse_root_newton(16 * jnp.eye(2), power=4, eps=0.0)
      >>> [round(float(x), 4) for x in found.root.ravel()]
      [0.5, 0.0, 0.0, 0.5]
    """
    checks.require_count(1, power=power)
    size = matrix.shape[0]
    identity = jnp.eye(size, dtype=matrix.dtype)
    shift = jnp.maximum(eps * largest_eigenvalue(matrix), TINY)
    damped = matrix + shift * identity
    # The iteration on an eigenvalue m of M converges to 1 for m in (0, 1 + p). As ‖A‖_F
    # bounds λ_max, this z puts every m in (0, (1 + p)/2].
    z = (1 + power) / (2 * norms.norm(damped))

    def residual(m: Array) -> Array:
        return largest(jnp.abs(m - identity))

    def unconverged(carry: _Newton) -> Array:
        large = carry.error >= NEWTON_TOLERANCE
        return large & ~carry.stuck & (carry.count < NEWTON_ITERATIONS)

    def body(carry: _Newton) -> _Newton:
        q = (1 + 1 / power) * identity - carry.m / power
        m = _dot(_int_power(q, power), carry.m)
        error = residual(m)
        # m ↦ m(1 + (1 - m)/p)ᵖ maps (0, 1 + p) into (0, 1], on which it only grows: the
        # first step may increase the residual, later ones do by rounding alone.
        better = (error < carry.error) | (carry.count == 0)
        return _Newton(
            x=jnp.where(better, _dot(carry.x, q), carry.x),
            m=m,
            error=jnp.where(better, error, carry.error),
            stuck=~better,
            count=carry.count + 1,
        )

    m = z * damped
    error = residual(m)
    start = _Newton(
        x=z ** (1 / power) * identity,
        m=m,
        error=error,
        stuck=jnp.isnan(error),
        count=jnp.zeros((), jnp.int32),
    )
    end = jax.lax.while_loop(unconverged, body, start)
    return NewtonRoot(end.x, end.error, end.count)
