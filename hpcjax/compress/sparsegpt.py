"""SparseGPT: weights are set to zero, and later inputs compensate for the error.

References:
  Frantar and Alistarh, SparseGPT, ICML 2023.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from hpcjax.compress.config import PruneOptions
from hpcjax.compress.elimination import (
    Factored,
    Pending,
    check_problem,
    eliminate,
    factorize,
)


class Pruned(NamedTuple):
    """A pruned kernel.

    Attributes:
      kernel: Ŵ, `[inputs, outputs]`.
      kept: mask of the kept weights, `[inputs, outputs]`.
      loss: ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) with the damped H.
      damping: share of the mean diagonal that was added to H.
    """

    kernel: Float[Array, "inputs outputs"]
    kept: Bool[Array, "inputs outputs"]
    loss: Float[Array, ""]
    damping: float


def prune(
    kernel: Float[Array, "inputs outputs"],
    hessian: Float[Array, "rows columns"],
    options: PruneOptions | None = None,
    *,
    name: str = "the layer",
) -> Pruned:
    """Sets weights to zero such that ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) stays small.

    The weights with the least w² / U_jj² are removed, U being the upper Cholesky factor
    of H⁻¹ = UᵀU; this is the loss of their removal if all earlier inputs are fixed.
    They are chosen among all weights of a block of inputs when the block is reached,
    or, with a pattern, among m neighbouring inputs of each output. Later inputs
    compensate for the error as in GPTQ.

    Args:
      kernel: W, `[inputs, outputs]`, float32 or float64.
      hessian: H, `[inputs, inputs]`, such as from `hessian_update`.
      options: how many weights to remove; None for half of them.
      name: of the layer, for errors.

    Raises:
      ConfigError: the pattern's m does not divide the inputs.
      ValueError: W or H has a wrong shape or dtype or is not finite, or H is not
        symmetric.
      numpy.linalg.LinAlgError: H is not positive definite, see `solve`.

    Examples:
      >>> kernel = jnp.array([[1.0], [-3.0], [2.0], [0.5]])
      >>> prune(kernel, jnp.eye(4)).kernel.ravel().tolist()
      [0.0, -3.0, 2.0, 0.0]
    """
    options = options or PruneOptions()
    check_problem(kernel, hessian, name)
    options.check_inputs(kernel.shape[0], name)
    return prune_factored(kernel, factorize(hessian, options.damping, name), options)


def prune_factored(
    kernel: jax.Array, hessian: Factored, options: PruneOptions
) -> Pruned:
    """Prunes as `prune` does, with a Hessian that several kernels may share."""
    values, kept, loss = _prune(kernel, hessian.factor, hessian.alive, options=options)
    return Pruned(values, kept, jnp.sum(loss), hessian.damping)


@functools.partial(jax.jit, static_argnames="options")
def _prune(
    kernel: jax.Array, factor: jax.Array, alive: jax.Array, *, options: PruneOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    alive_kernel = jnp.where(alive[:, None], kernel, 0)
    inputs, outputs = alive_kernel.shape
    block = min(options.block, inputs)
    # 1 / U_jj² = R_jj² with the factor R = U⁻¹. The last block is padded with inputs
    # that are not counted.
    weight = jnp.pad(jnp.diagonal(factor) ** 2, (0, -inputs % block))
    numbers = jnp.arange(block)

    def begin(place: jax.Array, state: tuple, pending: Pending) -> tuple:
        """Chooses the weights of a block that are kept."""
        values, kept = state
        if options.pattern is not None:
            return state
        own = jax.lax.dynamic_slice_in_dim(weight, place, block)
        rows = pending.rows(place, block)
        real = (place + numbers < inputs)[:, None]
        score = jnp.where(real, rows**2 * own[:, None], jnp.inf).ravel()
        # The argsort of the order is the rank of each weight, 0 for the least score.
        rank = jnp.argsort(jnp.argsort(score)).reshape(rows.shape)
        counted = jnp.minimum(block, inputs - place) * outputs
        chosen = rank >= jnp.round(options.sparsity * counted)
        return values, jax.lax.dynamic_update_slice_in_dim(kept, chosen, place, 0)

    def visit(
        place: jax.Array, row: jax.Array, state: tuple, pending: Pending
    ) -> tuple[jax.Array, tuple]:
        values, kept = state
        if options.pattern is not None:
            removed, size = options.pattern

            def choose(kept: jax.Array) -> jax.Array:
                own = jax.lax.dynamic_slice_in_dim(weight, place, size)
                score = pending.rows(place, size) ** 2 * own[:, None]
                rank = jnp.argsort(jnp.argsort(score, axis=0), axis=0)
                chosen = rank >= removed
                return jax.lax.dynamic_update_slice_in_dim(kept, chosen, place, 0)

            kept = jax.lax.cond(place % size == 0, choose, lambda kept: kept, kept)
        value = jnp.where(kept[place], row, 0)
        values = jax.lax.dynamic_update_index_in_dim(values, value, place, 0)
        return value, (values, kept)

    nothing = jnp.zeros_like(alive_kernel), jnp.ones((len(weight), outputs), bool)
    state, loss = eliminate(
        alive_kernel, factor, visit, nothing, block=block, begin=begin
    )
    values, kept = state
    return values, kept[:inputs], loss
