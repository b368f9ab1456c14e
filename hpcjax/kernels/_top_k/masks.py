"""Count and indices of the true entries of a mask, as is fast on the device."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from hpcjax.core import checks
from hpcjax.kernels._top_k import words


def count(mask: Bool[Array, " n"]) -> Int[Array, ""]:
    """Counts the true entries of a mask, int32; on a CPU see `words`.

    Examples:
      >>> int(count(jnp.array([True, False, True])))
      2
    """
    if _on_cpu():
        return words.count(mask)
    return jnp.sum(mask, dtype=jnp.int32)


def nonzero(
    mask: Bool[Array, " n"], capacity: int
) -> tuple[Int[Array, " capacity"], Int[Array, ""]]:
    """Returns the indices of the true entries of a mask, and their number.

    Args:
      mask: of length n < 2³¹.
      capacity: size of the result; if there are more indices, the first are returned.

    Returns:
      The indices in ascending order, int32, padded with n, and the number of true
      entries, which may exceed the capacity.

    Raises:
      ConfigError: no capacity.

    Examples:
      >>> indices, total = nonzero(jnp.array([True, False, True]), 4)
      >>> indices.tolist(), int(total)
      ([0, 2, 3, 3], 2)
    """
    checks.require_count(1, capacity=capacity)
    if _on_cpu():
        return words.nonzero(mask, capacity)
    (indices,) = jnp.nonzero(mask, size=capacity, fill_value=mask.size)
    return indices.astype(jnp.int32), count(mask)


@functools.cache
def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
