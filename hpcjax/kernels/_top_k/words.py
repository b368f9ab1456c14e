"""Count and indices of the true entries of a mask on CPUs, by words of 32 flags.

XLA:CPU vectorizes the packing of a comparison's flags into words, but neither their sum
nor the search for their indices. With packed flags, the latter two work on n / 32 words
and on the indices found. The table `oktopk/selection` measures the gain.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

_BITS = 32


def flags(mask: Bool[Array, " n"]) -> UInt32[Array, " words"]:
    """Packs a mask: bit b of word w is entry 32 w + b; the last word may be empty.

    Examples:
      >>> [bin(word) for word in flags(jnp.arange(35) == 33).tolist()]
      ['0b0', '0b10']
    """
    # Only the rest is padded: if the whole mask were, XLA would compute it in a loop of
    # its own and not fuse it with the packing.
    whole = len(mask) // _BITS * _BITS
    rest = jnp.pad(mask[whole:], (0, _BITS - (len(mask) - whole)))
    return jnp.concatenate([_pack_flags(mask[:whole]), _pack_flags(rest)])


def count(mask: Bool[Array, " n"]) -> Int[Array, ""]:
    """See `kernels.count`."""
    return jnp.sum(_count_ones(flags(mask)), dtype=jnp.int32)


def nonzero(mask: Bool[Array, " n"], capacity: int) -> tuple[jax.Array, jax.Array]:
    """See `kernels.nonzero`."""
    words = flags(mask)
    counts = _count_ones(words)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    starts, total = ends - counts, ends[-1]
    # The result's slot s belongs to the last word with starts[word] <= s. Each word is
    # written to the slot of its first index, and a running maximum fills the slots in
    # between. Words without flags are dropped.
    first = jnp.where(counts > 0, starts, capacity)
    numbers = jnp.arange(len(words), dtype=jnp.int32)
    word = jnp.zeros(capacity, jnp.int32).at[first].max(numbers, mode="drop")
    word = jax.lax.cummax(word)
    slot = jnp.arange(capacity, dtype=jnp.int32)
    place = _BITS * word + _nth_one(words[word], slot - starts[word])
    return jnp.where(slot < total, place, len(mask)), total


def _pack_flags(mask: jax.Array) -> jax.Array:
    # The sum of different powers of two is their bitwise or; int32 wraps at bit 31.
    place = jnp.arange(_BITS, dtype=jnp.int32)
    placed = mask.reshape(-1, _BITS).astype(jnp.int32) << place
    return jax.lax.bitcast_convert_type(jnp.sum(placed, axis=1), jnp.uint32)


def _count_ones(words: UInt32[Array, " n"]) -> Int[Array, " n"]:
    return jax.lax.population_count(words).astype(jnp.int32)


def _nth_one(words: UInt32[Array, " n"], number: Int[Array, " n"]) -> Int[Array, " n"]:
    """Returns the position of a word's set bit of a given number, from 0."""
    # Bisection: is the bit in the lower half? If not, skip the bits counted there.
    place = jnp.zeros_like(number)
    for width in (16, 8, 4, 2, 1):
        low = words & jnp.uint32(2**width - 1)
        above = number >= _count_ones(low)
        number = number - jnp.where(above, _count_ones(low), 0)
        words = jnp.where(above, words >> width, low)
        place = place + jnp.where(above, width, 0)
    return place
