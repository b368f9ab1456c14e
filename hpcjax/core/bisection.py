"""The largest number that a condition allows, found bit by bit.

So the k-th largest of many numbers is found by counts: it is the largest number that at
least k of them reach. Counts of parts add up, so nothing is sorted or gathered.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


def find_largest(
    holds: Callable[[Array], Array], bits: int, dtype: Any
) -> Shaped[Array, ""]:
    """Returns the largest number of so many bits for which `holds` is true.

    Bits are decided from the highest to the lowest: one is set if `holds` is still true
    with it.

    Args:
      holds: true of all numbers up to the result; of 0 without being asked.
      bits: of the number; the highest is not a sign.
      dtype: of the number, an integer.

    Examples:
      >>> int(find_largest(lambda number: number * number <= 50, 8, jnp.int32))
      7
    """

    def decide_bit(number: Any, decided: Array) -> Array:
        tried = decided | (jnp.ones((), dtype) << (bits - 1 - number).astype(dtype))
        return jnp.where(holds(tried), tried, decided)

    if not bits:
        return jnp.zeros((), dtype)
    # The first bit outside the loop, for the loop's carry must have one type: inside
    # `shard_map` the result may vary over mesh axes, along which a constant does not.
    first = decide_bit(jnp.zeros((), jnp.int32), jnp.zeros((), dtype))
    return jax.lax.fori_loop(1, bits, decide_bit, first)
