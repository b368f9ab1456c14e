"""How integers become floats without conversions, which a GPU does slowly.

A float of 2^23 + m has m < 2^23 in its last bits. So bits p … p + b − 1 of a word,
masked in place and joined with the bits of 2^23, are the float 2^23 + q 2^p: one
logical operation, and the subtraction of 2^23 + zero 2^p leaves (q − zero) 2^p exactly.
The power of two is taken off elsewhere, once for all outputs.

A window is 32 bits of a run's stream of words, from which values are taken in place.
One that begins inside a word costs a shift, or a shift of two words joined.

Two habits of the compilers are behind details, each worth one operation more than the
three of a value: (w & c) | d becomes a single one only if d is no constant they know;
(w >> s) & c becomes the extraction of a field, which is two, if c is the lowest bits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.kernels._quantized_matmul.packing import RUN

MANTISSA, MAGIC = 23, 0x4B000000
# Every place wants a subtrahend of each output, in registers.
_PLACES = 8


class Window(NamedTuple):
    """Values that are taken from the same 32 bits.

    Attributes:
      start: the first bit of the window, in the run's stream.
      values: the values taken, numbers in the run.
      places: the first bit of each in the window.
    """

    start: int
    values: tuple[int, ...]
    places: tuple[int, ...]


@functools.cache
def windows(bits: int) -> tuple[Window, ...]:
    """Returns the windows that take out a run of 32 values, in order.

    Examples:
      >>> [(window.start, len(window.values)) for window in windows(3)]
      [(0, 7), (18, 6), (36, 6), (54, 6), (72, 6), (90, 1)]
    """
    made: list[tuple[int, list[int]]] = []
    for value in range(RUN):
        bit = value * bits
        aligned = bit % 32 == 0
        if not made or aligned or _is_full(*made[-1], bits):
            # Its first value at bit 0 only where there is no shift.
            made.append((bit if aligned else bit - bits, []))
        made[-1][1].append(value)
    return tuple(
        Window(start, tuple(values), tuple(v * bits - start for v in values))
        for start, values in made
    )


def _is_full(start: int, values: list[int], bits: int) -> bool:
    return len(values) == _PLACES or (values[-1] + 2) * bits - start > MANTISSA


def places(bits: int) -> tuple[int, ...]:
    """Returns the bit at which each value of a run lies in its window.

    Examples:
      >>> places(4)[:8]
      (0, 4, 8, 12, 16, 4, 8, 12)
    """
    return tuple(place for window in windows(bits) for place in window.places)


def offsets(zero: jax.Array, bits: int) -> dict[int, jax.Array]:
    """Returns 2^23 + zero 2^p for each place p; exact, as zero is an integer."""
    return {
        place: zero * np.float32(2.0**place) + np.float32(2.0**MANTISSA)
        for place in sorted(set(places(bits)))
    }


def scaled_values(
    words: list[jax.Array],
    subtrahend: dict[int, jax.Array],
    magic: jax.Array,
    bits: int,
) -> list[jax.Array]:
    """Returns (q − zero) 2^p in float32 of the 32 values of a run.

    Args:
      words: the run's `bits` words, each of the same shape.
      subtrahend: what `offsets` gives.
      magic: `MAGIC`, loaded.
      bits: of a value.
    """
    found = []
    for window in windows(bits):
        taken = _window(words, window, bits)
        for place in window.places:
            joined = (taken & np.uint32((2**bits - 1) << place)) | magic
            number = jax.lax.bitcast_convert_type(joined, jnp.float32)
            found.append(number - subtrahend[place])
    return found


def _window(words: list[jax.Array], window: Window, bits: int) -> jax.Array:
    number, shift = divmod(window.start, 32)
    if not shift:
        return words[number]
    low = words[number] >> np.uint32(shift)
    if (window.values[-1] + 1) * bits <= 32 * (number + 1):
        return low
    return low | (words[number + 1] << np.uint32(32 - shift))
