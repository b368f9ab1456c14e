"""Table look-up."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def embedding(
    table: Float[Array, "rows dim"],
    indices: Int[Array, "*batch"],
    *,
    compute: str = "float32",
) -> Float[Array, "*batch dim"]:
    """Returns the rows of a table; an index outside it gives NaN.

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
    rows = table.at[indices].get(
        mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
    )
    return rows.astype(compute)
