"""Changing a matrix input after input while the inputs that follow make up for it.

With U the upper Cholesky factor of H⁻¹ = UᵀU and e = (w − w̃) / U_ii the error of input
i, the rest becomes W_j ← W_j − U_ij e: the least of ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) that the
values chosen so far allow. What w̃ is makes the method: a rounded weight is GPTQ, a
zero where a mask says so SparseGPT.

References:
  Frantar et al., GPTQ, ICLR 2023, §3; Frantar and Alistarh, SparseGPT, ICML 2023, §3.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

_TRIES, _FIRST = 3, 1e-5


class Pending(NamedTuple):
    """The inputs as they are in the middle of a block, whose updates are not applied.

    Attributes:
      weights: those before the block, `[inputs, outputs]`.
      upper: rows of U that belong to the block, `[block, inputs]`.
      errors: e of the block's inputs so far, `[block, outputs]`; the others are zero.
    """

    weights: jax.Array
    upper: jax.Array
    errors: jax.Array

    def rows(self, place: jax.Array, count: int) -> jax.Array:
        """Returns `count` inputs from `place` on with all updates applied."""
        own = jax.lax.dynamic_slice_in_dim(self.weights, place, count)
        ahead = jax.lax.dynamic_slice_in_dim(self.upper, place, count, axis=1)
        return own - _product(ahead.T, self.errors)


# (place, row, made, pending) -> (value, made): what input `place`, now `row` [outputs],
# becomes, and what the visits before made, with this one's.
Visit = Callable[[jax.Array, jax.Array, Any, Pending], tuple[jax.Array, Any]]


def eliminate(
    weights: Float[Array, "inputs outputs"],
    upper: Float[Array, "inputs inputs"],
    visit: Visit,
    made: Any,
    *,
    block: int,
    begin: Callable[[jax.Array, jax.Array, Any, Pending], Any] | None = None,
) -> tuple[Any, Float[Array, " outputs"]]:
    """Visits the inputs in order; those that follow make up for every change.

    Args:
      weights: W.
      upper: U.
      visit: what an input becomes, see `Visit`.
      made: given to the first visit.
      block: inputs whose updates reach the rest at once; changes no result.
      begin: `(place, rows of the block, made, pending) -> made` before each block. The
        last block is filled up with inputs of zeros.

    Returns:
      What the visits made, and ½ Σ e² for each output.
    """
    inputs = len(weights)
    block = min(block, inputs)
    weights, upper = _filled_up(weights, upper, -inputs % block)

    def outer(number: jax.Array, carry: tuple) -> tuple:
        weights, made, loss = carry
        start = number * block
        rows = jax.lax.dynamic_slice_in_dim(upper, start, block)
        square = jax.lax.dynamic_slice_in_dim(rows, start, block, axis=1)
        before = jax.lax.dynamic_slice_in_dim(weights, start, block)
        errors = jnp.zeros_like(before)
        if begin is not None:
            made = begin(start, before, made, Pending(weights, rows, errors))

        def inner(step: jax.Array, carry: tuple) -> tuple:
            own, made, errors = carry
            row = own[step]
            value, made = visit(start + step, row, made, Pending(weights, rows, errors))
            error = (row - value) / square[step, step]
            return (
                own - square[step][:, None] * error,
                made,
                jax.lax.dynamic_update_index_in_dim(errors, error, step, 0),
            )

        # The inputs that fill up the last block are not visited.
        count = jnp.minimum(block, inputs - start)
        _, made, errors = jax.lax.fori_loop(0, count, inner, (before, made, errors))
        # Also the block itself, which is not looked at again.
        weights = weights - _product(rows.T, errors)
        return weights, made, loss + jnp.sum(errors**2, axis=0) / 2

    carry = weights, made, jnp.zeros_like(weights[0])
    _, made, loss = jax.lax.fori_loop(0, len(weights) // block, outer, carry)
    return made, loss


def _filled_up(
    weights: jax.Array, upper: jax.Array, more: int
) -> tuple[jax.Array, jax.Array]:
    """Adds inputs of zeros, which change nothing."""
    ends = jnp.arange(len(weights), len(weights) + more)
    upper = jnp.pad(upper, ((0, more), (0, more))).at[ends, ends].set(1)
    return jnp.pad(weights, ((0, more), (0, 0))), upper


def inverse_factor(
    hessian: Float[Array, "inputs inputs"], damping: float, name: str
) -> tuple[Float[Array, "inputs inputs"], float]:
    """Returns U with (H + share · mean diagonal · I)⁻¹ = UᵀU, and the share.

    The share is `damping`, or ten times as much, up to three times, until H has a
    Cholesky factor.

    Raises:
      numpy.linalg.LinAlgError: it never has; the message names the layer.
    """
    share = damping
    for _ in range(_TRIES + 1):
        upper = _inverse_factor(hessian, jnp.asarray(share, hessian.dtype))
        if bool(jnp.isfinite(upper).all()):
            return upper, share
        share = 10 * (share or _FIRST)
    raise np.linalg.LinAlgError(
        f"{name}: the Hessian is not positive definite with a damping of {damping}, "
        f"nor of {share / 10:g}; it needs more or more varied calibration data"
    )


@jax.jit
def _inverse_factor(hessian: jax.Array, share: jax.Array) -> jax.Array:
    n = len(hessian)
    damped = hessian + share * jnp.mean(jnp.diagonal(hessian)) * jnp.eye(
        n, dtype=hessian.dtype
    )
    # H = R Rᵀ with R upper triangular, from the Cholesky factor of H back to front;
    # then U = R⁻¹.
    with jax.default_matmul_precision("highest"):
        lower = jnp.linalg.cholesky(damped[::-1, ::-1])
        inverse = jax.scipy.linalg.solve_triangular(
            lower, jnp.eye(n, dtype=hessian.dtype), lower=True
        )
    return inverse[::-1, ::-1]


def _product(left: Shaped[Array, "n k"], right: Shaped[Array, "k m"]) -> jax.Array:
    return jnp.matmul(left, right, precision="highest")
