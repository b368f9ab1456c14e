"""Magnitudes as integers, and the exact k-th largest of them by bisection."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.bisection import find_largest
from hpcjax.kernels._top_k.masks import count

_SIGN = 0x7FFFFFFF
_BITS = 31


def magnitudes(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Returns integers in the order of |x|: the bits of float32 without the sign.

    Positive floats of IEEE 754 are ordered as their bits are as integers. Unlike
    floats, the integers distinguish denormal numbers on a CPU, where XLA treats those
    as zero. Infinity is above all numbers, and NaN above infinity.

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
    """Returns the k-th largest of `magnitudes` exactly, by 31 counts without a sort.

    Args:
      order: see `magnitudes`.
      k: at least 1. If there are fewer than k values, the result is 0.
      total: sums a count over devices, such as a `psum`, if each device has a part of
        the values. Only 31 counts are communicated, whatever the size.

    Examples:
      >>> order = magnitudes(jnp.array([3.0, -4.0, 1.0, 4.0]))
      >>> bool(kth_magnitude(order, 3) == order[0])
      True
    """
    order = order.reshape(-1)

    def reaches(value: jax.Array) -> jax.Array:
        return total(count(order >= value)) >= k

    return find_largest(reaches, _BITS, jnp.int32)
