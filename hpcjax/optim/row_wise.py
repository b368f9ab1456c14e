"""Transforms for tables of which a step uses few rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from hpcjax.core import checks
from hpcjax.optim.full_precision import in_full_precision


class RowAdagradState(NamedTuple):
    """State of `scale_by_row_adagrad`.

    Attributes:
      total: sums of mean squares, [rows] for each parameter; scalars have their own.
    """

    total: optax.Updates


def scale_by_row_adagrad(
    eps: float = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with one number for each row of a parameter, in place of one an entry.

    s ← s + mean(g²) over all axes but the first;  u = g / (√s + ε).  Rows without a
    gradient keep s, and have no update. Expects averaged gradients.

    Args:
      eps: ε.

    Examples:
      >>> tx = scale_by_row_adagrad(eps=0.0)
      >>> grads = jnp.array([[3.0, 3.0], [0.0, 0.0]])
      >>> updates, state = tx.update(grads, tx.init(jnp.zeros((2, 2))))
      >>> state.total.tolist()
      [9.0, 0.0]

    References:
      Naumov et al., DLRM, 2019; torch.ops.fbgemm's EXACT_ROWWISE_ADAGRAD.
    """
    checks.require_finite(0.0, eps=eps)

    def spread(total: jax.Array, like: jax.Array) -> jax.Array:
        return total.reshape(total.shape + (1,) * (like.ndim - total.ndim))

    def square(g: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(g), axis=tuple(range(1, g.ndim)))

    def scale(g: jax.Array, total: jax.Array) -> jax.Array:
        root = spread(jnp.sqrt(total), g) + eps
        return g / jnp.where(root > 0, root, 1)

    def init(params: optax.Params) -> RowAdagradState:
        return RowAdagradState(
            jax.tree.map(lambda p: jnp.zeros(p.shape[:1], p.dtype), params)
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        total = jax.tree.map(lambda s, g: s + square(g), state.total, updates)
        return jax.tree.map(scale, updates, total), RowAdagradState(total)

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))
