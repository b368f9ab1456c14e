"""Magnitudes as integers, and the exact k-th largest of them by bisection."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.kernels._top_k.masks import count

_SIGN = 0x7FFFFFFF
_BITS = 31


def magnitudes(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Returns integers that are ordered as |x|: the bits of float32 but the sign.

    Unlike floats they tell denormal numbers apart on a CPU, where XLA takes these for
    zero. Infinity stands above all numbers, NaN above infinity.

    Examples:
      >>> order = magnitudes(jnp.array([-2.0, 0.5, -0.0]))
      >>> jnp.argsort(order).tolist(), int(order[2])
      ([2, 1, 0], 0)
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & _SIGN


def kth_magnitude(
    order: Int[Array, "*shape"],
    k: int | Int[Array, ""],
    *,
    total: Callable[[jax.Array], jax.Array] = lambda count: count,
) -> Int[Array, ""]:
    """Returns the k-th largest of `magnitudes`, exactly, by 31 counts and no sort.

    Args:
      order: see `magnitudes`.
      k: from 1 on; with more than there are numbers, 0 is returned, which all reach.
      total: the sum over devices of a count, if each has a part of the numbers, such as
        a `psum`: what travels is 31 numbers, whatever the size.

    Examples:
      >>> order = magnitudes(jnp.array([3.0, -4.0, 1.0, 4.0]))
      >>> bool(kth_magnitude(order, 3) == order[0])
      True
    """
    order = order.reshape(-1)

    def halve(number: jax.Array, found: jax.Array) -> jax.Array:
        tried = found | (1 << (_BITS - 1 - number))
        reached = total(count(order >= tried))
        return jnp.where(reached >= k, tried, found)

    # The first one apart: it has the type, as to devices, that the loop keeps.
    first = halve(jnp.int32(0), jnp.int32(0))
    return jax.lax.fori_loop(1, _BITS, halve, first)
