"""Selection above a threshold in plain JAX: the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.kernels._top_k.masks import nonzero
from hpcjax.kernels._top_k.order import magnitudes


def select_above(
    x: Float[Array, " n"],
    threshold: Int[Array, ""],
    capacity: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `kernels.select_above`."""
    # At least 1, so that zeros are not selected.
    chosen = magnitudes(x) >= jnp.maximum(threshold, 1)
    indices, count = nonzero(chosen, capacity)
    return indices, x.at[indices].get(mode="fill", fill_value=0), count
