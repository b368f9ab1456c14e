"""Fixed points by mixing, and whether they have been found."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hpcjax.core import checks
from hpcjax.core.extremes import largest


class FixedPoint(NamedTuple):
    """Where an iteration has come to.

    Attributes:
      value: the last one.
      residuals: of the iterations, NaN behind the last.
      iterations: their number.
      converged: whether the last residual is at most the tolerance.
    """

    value: Any
    residuals: Float[Array, " limit"]
    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


def fixed_point(
    function: Callable[[Any], Any],
    start: Any,
    *,
    mixing: float | Float[Array, ""],
    tolerance: float | Float[Array, ""],
    limit: int,
) -> FixedPoint:
    """Finds x = f(x) by x ← x + s (f(x) − x), one compiled loop.

    The residual is max |f(x) − x| / max |f(x)|, the largest of any array of x. The loop
    ends when it is at most the tolerance, at the limit, or when it is no number.

    Args:
      function: f, of a tree of arrays to its like.
      start: the first x.
      mixing: s, in (0, 1].
      tolerance: of the residual.
      limit: of iterations.

    Raises:
      ConfigError: a limit below 1, or mixing out of its range; traced mixing is not
        checked.

    Examples:
      >>> options = {"mixing": 0.6, "tolerance": 1e-6, "limit": 50}
      >>> found = fixed_point(jnp.cos, jnp.ones(()), **options)
      >>> f"{found.value:.4f}", bool(found.converged)
      ('0.7391', True)
    """
    checks.require_count(1, limit=limit)
    checks.require_positive(mixing=mixing)
    good = not checks.is_plain(mixing) or mixing <= 1
    checks.require(bool(good), "mixing must be at most 1", mixing=mixing)

    def goes_on(state: FixedPoint) -> Bool[Array, ""]:
        last = state.residuals[jnp.maximum(state.iterations - 1, 0)]
        finite = (state.iterations == 0) | jnp.isfinite(last)
        return (state.iterations < limit) & ~state.converged & finite

    def step(state: FixedPoint) -> FixedPoint:
        new = function(state.value)
        residual = _distance(new, state.value)
        mixed = jax.tree.map(lambda x, y: x + mixing * (y - x), state.value, new)
        residuals = state.residuals.at[state.iterations].set(residual)
        done = residual <= tolerance
        return FixedPoint(mixed, residuals, state.iterations + 1, done)

    residuals = jnp.full(limit, jnp.nan)
    first = FixedPoint(start, residuals, jnp.asarray(0), jnp.asarray(False))
    return jax.lax.while_loop(goes_on, step, first)


def _distance(new: Any, old: Any) -> Float[Array, ""]:
    """Returns max |new − old| / max |new|, of arrays of zeros 0."""

    def of(x: Array, y: Array) -> Array:
        size = largest(jnp.abs(x))
        return largest(jnp.abs(x - y)) / jnp.where(size == 0, 1, size)

    return largest(jnp.stack(jax.tree.leaves(jax.tree.map(of, new, old))))
