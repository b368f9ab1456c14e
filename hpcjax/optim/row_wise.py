"""Transforms for tables of which a step uses few rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.optim.admission import list_integers
from hpcjax.optim.full_precision import in_full_precision

# Steps that a period may have to be found; longer ones are of schedules.
_LONGEST = 30


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


def check_rows_apart(tx: optax.GradientTransformation, name: str = "table") -> None:
    """Raises ConfigError unless a transform leaves rows without a gradient alone.

    Such a transform may be given a part of a table's rows, which holds all that have a
    gradient, in place of the table. It is tried on a table whose rows lose their
    gradients one after the other: from then on a row, and what is kept of it, must stay
    as it is to the bit, whatever has been counted by then. Another table lacks a row.
    `optim.sgd` has a buffer of momentum even where this is 0, which changes: plain SGD
    is `optax.sgd`.

    Args:
      tx: of averaged gradients; must not communicate.
      name: of the table among the parameters.
    """
    rng = np.random.default_rng(0)
    steps = _longest_period(tx, name) + 2
    shape = (steps + 1, 4)
    table = rng.normal(size=shape).astype(np.float32)
    # Large, so that they are clipped where anything is.
    grads = 1e6 * rng.normal(size=(2 * steps, *shape)).astype(np.float32)
    for row in range(steps):
        grads[row + 1 :, row] = 0
    whole = _rows_after_each(tx, name, table, grads)
    part = _rows_after_each(tx, name, table[:-1], grads[:, :-1])
    moved = any(
        not _same(_row(whole[row], row), _row(after, row))
        for row in range(steps)
        for after in whole[row:]
    )
    mixed = not _same([leaf[:-1] for leaf in whole[-1]], part[-1])
    if moved or mixed:
        why = "changes rows that have no gradient" if moved else "mixes rows"
        raise ConfigError(
            "a table in parts needs an optimizer by rows, such as SGD without momentum "
            f"and weight decay, or row-wise Adagrad: got one that {why}"
        )


def _longest_period(tx: optax.GradientTransformation, name: str) -> int:
    """Returns the largest integer up to 30 that stands in an update, at least 4.

    What is done every so many steps, as by `optax.MultiSteps`, shows in such a number.
    """
    params = {name: jnp.zeros((3, 4))}
    update = optax.with_extra_args_support(tx).update
    traced = jax.make_jaxpr(update)(params, tx.init(params), params)
    found = [each for each in list_integers(traced.jaxpr) if each <= _LONGEST]
    return max([4, *found])


def _rows_after_each(
    tx: optax.GradientTransformation, name: str, table: np.ndarray, grads: np.ndarray
) -> list[list[np.ndarray]]:
    """Returns a table after each of some steps, and what is kept of its rows."""
    rows, state = jnp.asarray(table), tx.init({name: jnp.asarray(table)})
    found = []
    for each in grads:
        made: Any = tx.update({name: jnp.asarray(each)}, state, {name: rows})
        updates, state = made
        rows = rows + updates[name]
        kept = [
            np.asarray(leaf)
            for leaf in jax.tree.leaves(state)
            if getattr(leaf, "shape", ())[:1] == table.shape[:1]
        ]
        found.append([np.asarray(rows), *kept])
    return found


def _row(arrays: list[np.ndarray], row: int) -> list[np.ndarray]:
    return [leaf[row] for leaf in arrays]


def _same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    pairs = zip(left, right, strict=True)
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in pairs)
