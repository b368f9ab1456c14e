"""Attention with linear biases, which takes the place of embedded positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def alibi_slopes(heads: int) -> Float[Array, " heads"]:
    """Returns how much each head's scores fall with the distance of a key.

    With n heads, a power of two, head h has the slope 2^(−8 (h + 1) / n). Otherwise the
    first heads have the slopes of the largest power of two below, p, and the others
    every second slope of 2 p heads, beginning with the first.

    Args:
      heads: number of heads, at least 1.

    Returns:
      Positive numbers, float32 `[heads]`.

    References:
      Press, Smith and Lewis, Train Short, Test Long, ICLR 2022, §3; the rule for other
      numbers of heads is that of the authors' code and of BLOOM.

    Examples:
      >>> alibi_slopes(3).tolist()
      [0.0625, 0.00390625, 0.25]
    """
    power = 2 ** (heads.bit_length() - 1)
    first = [-8 * (head + 1) / power for head in range(power)]
    others = [-4 * (head + 1) / power for head in range(0, 2 * power, 2)]
    exponents = (first + others)[:heads]
    return jnp.asarray([2.0**exponent for exponent in exponents], jnp.float32)
