"""How often, and where, a mask holds: what is fast on the device."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from hpcjax.core import checks
from hpcjax.kernels._top_k import words


def count(mask: Bool[Array, " n"]) -> Int[Array, ""]:
    """Returns how often a mask holds, int32.

    On a CPU by words of flags, see `words`.

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
    """Returns where a mask holds, ascending, int32, and how often.

    Args:
      mask: fewer than 2³¹ places.
      capacity: places there is room for; the first are kept, n stands where there is
        none.

    Raises:
      ConfigError: no capacity.

    Examples:
      >>> indices, found = nonzero(jnp.array([True, False, True]), 4)
      >>> indices.tolist(), int(found)
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
