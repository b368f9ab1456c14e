"""Largest entries that keep NaN, as those of XLA do not on a CPU."""

import jax.numpy as jnp
from jax import Array


def largest(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Returns the largest entries along axes, NaN where one is; 0 of none.

    XLA's maximum of 4096 numbers and more leaves NaN out on a CPU, and is −inf where
    all are (jaxlib 0.10.2 to 0.11.2): a loop that compares it with a tolerance would
    converge.

    Args:
      x: floating, of magnitudes.
      axis: along which, None for all.

    Examples:
      >>> bad = jnp.ones(5000).at[7].set(jnp.nan)
      >>> bool(jnp.isnan(largest(bad))), bool(largest(bad[8:]) == 1)
      (True, True)
    """
    found = jnp.max(x, axis, initial=0)
    return jnp.where(jnp.isnan(x).any(axis), jnp.nan, found)
