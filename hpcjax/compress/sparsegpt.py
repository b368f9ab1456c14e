"""SparseGPT: weights set to zero, the rest making up for it.

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
    factored,
)


class Pruned(NamedTuple):
    """A kernel with zeros.

    Attributes:
      kernel: `[inputs, outputs]`.
      kept: where weights were kept, the same shape.
      loss: ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) with the damped H that was used.
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
    """Sets weights to zero so that ½ tr((W − Ŵ)ᵀ H (W − Ŵ)) stays small.

    Those go whose w² / U_jj² is least, U being the upper Cholesky factor of H⁻¹ = UᵀU:
    the loss of their removal when all inputs before are fixed. They are chosen when a
    block of inputs is reached, among all of its weights, or with a pattern among the m
    neighbouring inputs of each output; what follows makes up as in GPTQ.

    Args:
      kernel: W, `[inputs, outputs]`, float32 or float64.
      hessian: H, `[inputs, inputs]`, such as `hessian_update` gathers.
      options: how many; None for half of them.
      name: of the layer, for errors.

    Raises:
      ConfigError: a pattern's m does not divide the inputs.
      ValueError: W or H is of another shape or dtype or not finite, or H is not
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
    return pruned(kernel, factored(hessian, options.damping, name), options)


def pruned(kernel: jax.Array, found: Factored, options: PruneOptions) -> Pruned:
    """Does what `prune` does, with a Hessian that may serve several kernels."""
    made, kept, loss = _prune(kernel, found.factor, found.alive, options=options)
    return Pruned(made, kept, jnp.sum(loss), found.damping)


@functools.partial(jax.jit, static_argnames="options")
def _prune(
    kernel: jax.Array, factor: jax.Array, alive: jax.Array, *, options: PruneOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    given = jnp.where(alive[:, None], kernel, 0)
    inputs, outputs = given.shape
    block = min(options.block, inputs)
    # The last block is filled up with inputs that are not counted.
    weight = jnp.pad(jnp.diagonal(factor) ** 2, (0, -inputs % block))
    numbers = jnp.arange(block)

    def begin(place: jax.Array, made: tuple, pending: Pending) -> tuple:
        values, kept = made
        if options.pattern is not None:
            return made
        own = jax.lax.dynamic_slice_in_dim(weight, place, block)
        rows = pending.rows(place, block)
        real = (place + numbers < inputs)[:, None]
        score = jnp.where(real, rows**2 * own[:, None], jnp.inf).ravel()
        rank = jnp.argsort(jnp.argsort(score)).reshape(rows.shape)
        counted = jnp.minimum(block, inputs - place) * outputs
        chosen = rank >= jnp.round(options.sparsity * counted)
        return values, jax.lax.dynamic_update_slice_in_dim(kept, chosen, place, 0)

    def visit(
        place: jax.Array, row: jax.Array, made: tuple, pending: Pending
    ) -> tuple[jax.Array, tuple]:
        values, kept = made
        if options.pattern is not None:
            gone, size = options.pattern

            def choose(kept: jax.Array) -> jax.Array:
                own = jax.lax.dynamic_slice_in_dim(weight, place, size)
                score = pending.rows(place, size) ** 2 * own[:, None]
                rank = jnp.argsort(jnp.argsort(score, axis=0), axis=0)
                return jax.lax.dynamic_update_slice_in_dim(kept, rank >= gone, place, 0)

            kept = jax.lax.cond(place % size == 0, choose, lambda kept: kept, kept)
        value = jnp.where(kept[place], row, 0)
        values = jax.lax.dynamic_update_index_in_dim(values, value, place, 0)
        return value, (values, kept)

    filled = jnp.ones((len(weight), outputs), bool)
    made, loss = eliminate(
        given, factor, visit, (jnp.zeros_like(given), filled), block=block, begin=begin
    )
    values, kept = made
    return values, kept[:inputs], loss
