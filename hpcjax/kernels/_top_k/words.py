"""Places where a mask holds, by words of 32 flags: for CPUs.

XLA:CPU packs the flags of a comparison with vector instructions, with which it neither
adds them up nor finds their places; what is left to do is on n / 32 words, and on the
places that are found. The table `oktopk/selection` measures what comes of it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

_BITS = 32


def flags(mask: Bool[Array, " n"]) -> UInt32[Array, " words"]:
    """Returns bit b of word w for place 32 w + b; the last word may be empty.

    Examples:
      >>> [bin(word) for word in flags(jnp.arange(35) == 33).tolist()]
      ['0b0', '0b10']
    """
    # Padded as a whole, the comparison would not be part of the same loop.
    whole = len(mask) // _BITS * _BITS
    rest = jnp.pad(mask[whole:], (0, _BITS - (len(mask) - whole)))
    return jnp.concatenate([_packed(mask[:whole]), _packed(rest)])


def count(mask: Bool[Array, " n"]) -> Int[Array, ""]:
    """See `kernels.count`."""
    return jnp.sum(_ones(flags(mask)), dtype=jnp.int32)


def nonzero(mask: Bool[Array, " n"], capacity: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first places where a mask holds, else its length; and their count."""
    words = flags(mask)
    counts = _ones(words)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts, total = ends - counts, ends[-1]
    # A word stands where the first of its places goes, and is taken over by the next.
    first = jnp.where(counts > 0, starts, capacity)
    numbers = jnp.arange(len(words), dtype=jnp.int32)
    word = jnp.zeros(capacity, jnp.int32).at[first].max(numbers, mode="drop")
    word = jax.lax.cummax(word)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    place = _BITS * word + _nth_one(words[word], slot - starts[word])
    return jnp.where(slot < total, place, len(mask)), total


def _packed(mask: jax.Array) -> jax.Array:
    place = jnp.arange(_BITS, dtype=jnp.int32)
    placed = mask.reshape(-1, _BITS).astype(jnp.int32) << place
    return jax.lax.bitcast_convert_type(jnp.sum(placed, axis=1), jnp.uint32)


def _ones(words: UInt32[Array, " n"]) -> Int[Array, " n"]:
    return jax.lax.population_count(words).astype(jnp.int32)


def _nth_one(words: UInt32[Array, " n"], number: Int[Array, " n"]) -> Int[Array, " n"]:
    """Returns the place of a word's set bit, counted from 0, by halving."""
    place = jnp.zeros_like(number)
    for width in (16, 8, 4, 2, 1):
        low = words & jnp.uint32(2**width - 1)
        above = number >= _ones(low)
        number = number - jnp.where(above, _ones(low), 0)
        words = jnp.where(above, words >> width, low)
        place = place + jnp.where(above, width, 0)
    return place
