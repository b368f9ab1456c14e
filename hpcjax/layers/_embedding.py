"""Table look-up."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core import shards


def embedding(
    table: Float[Array, "rows dim"] | shards.Part,
    indices: Int[Array, "*batch"],
    *,
    compute: str = "float32",
) -> Float[Array, "*batch dim"]:
    """Returns the rows of a table; an index outside it gives NaN.

    Of a `core.shards.Part` that is cut between rows, inside `shard_map`, each device
    looks up its own, and what they have found is summed.

    Args:
      table: `[rows, dim]`.
      indices: `[...]`, in [0, rows).
      compute: dtype of the result.

    Returns:
      `[..., dim]`.

    Examples:
      >>> embedding(jnp.eye(2), jnp.array([1, 0])).tolist()
      [[0.0, 1.0], [1.0, 0.0]]
    """
    table, axes, _ = shards.open_part(table, -2, -1)
    if not axes:
        return _look_up(table, indices, jnp.nan).astype(compute)
    indices = indices.astype(jnp.int32)  # of bytes, 256 would be 0
    first = jax.lax.axis_index(axes) * len(table)
    found = _look_up(table, indices - first, 0).astype(compute)
    rows = jax.lax.psum(found, axes)
    size = len(table) * jax.lax.axis_size(axes)
    inside = (indices >= 0) & (indices < size)
    return jnp.where(inside[..., None], rows, jnp.nan)


def _look_up(table: jax.Array, indices: jax.Array, fill: float) -> jax.Array:
    return table.at[indices].get(
        mode="fill", fill_value=fill, wrap_negative_indices=False
    )
