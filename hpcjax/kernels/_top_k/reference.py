"""Selection above a threshold in plain JAX: what the kernel means."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.kernels._top_k.order import magnitudes


def select_above(
    x: Float[Array, " n"],
    threshold: Int[Array, ""],
    capacity: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `kernels.select_above`."""
    order = magnitudes(x)
    chosen = (order >= threshold) & (order > 0)
    (indices,) = jnp.nonzero(chosen, size=capacity, fill_value=len(x))
    values = x.at[indices].get(mode="fill", fill_value=0)
    return indices.astype(jnp.int32), values, jnp.sum(chosen, dtype=jnp.int32)
