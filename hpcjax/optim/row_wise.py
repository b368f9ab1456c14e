"""Adagrad, for tables of which a step uses few rows."""

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


class AdagradState(NamedTuple):
    """State of `scale_by_adagrad`.

    Attributes:
      total: sums of squares, as the parameters.
    """

    total: optax.Updates


def _divide(g: jax.Array, total: jax.Array, eps: float) -> jax.Array:
    """Returns g / (√s + ε), zero where both are."""
    root = jnp.sqrt(total) + eps
    return g / jnp.where(root == 0, 1, root)


def scale_by_adagrad(
    eps: float = 1e-10,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with one number for each entry of a parameter, from zero.

    s ← s + g²;  u = g / (√s + ε).  Entries without a gradient keep s, and have no
    update. Expects averaged gradients. optax.adagrad has ε below the root, and starts
    from 0.1.

    Args:
      eps: ε.

    Examples:
      >>> tx = scale_by_adagrad(eps=0.0)
      >>> updates, state = tx.update(jnp.array([3.0, 0.0]), tx.init(jnp.zeros(2)))
      >>> updates.tolist(), state.total.tolist()
      ([1.0, 0.0], [9.0, 0.0])

    References:
      Duchi et al., JMLR 2011; Waleffe et al., MariusGNN, EuroSys 2023, its code.
    """
    checks.require_finite(0.0, eps=eps)

    def init(params: optax.Params) -> AdagradState:
        return AdagradState(jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        total = jax.tree.map(lambda s, g: s + jnp.square(g), state.total, updates)
        scaled = jax.tree.map(lambda g, s: _divide(g, s, eps), updates, total)
        return scaled, AdagradState(total)

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))


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
        return _divide(g, spread(total, g), eps)

    def init(params: optax.Params) -> RowAdagradState:
        return RowAdagradState(
            jax.tree.map(lambda p: jnp.zeros(p.shape[:1], p.dtype), params)
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        total = jax.tree.map(lambda s, g: s + square(g), state.total, updates)
        return jax.tree.map(scale, updates, total), RowAdagradState(total)

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))
