"""Extracts packed integers as floats without conversions, which are slow on GPUs.

The float32 2^23 + m has the integer m < 2^23 in its last 23 bits. So if the bits from p
on of a word hold q, the masked word, or-ed with the bits of 2^23, is the float 2^23 +
q 2^p: one logical operation. Subtracting 2^23 + zero 2^p leaves (q − zero) 2^p exactly.
The factor 2^p is removed elsewhere, once for all outputs.

A window is 32 bits of a run's stream of words, from which values are extracted in
place. A window that begins inside a word costs a shift, or two shifts and an or.

Some details below avoid an extra operation per value, besides the three needed, that
compilers would make: (w & c) | d is a single operation only if d is not a known
constant; and (w >> s) & c becomes the extraction of a bit field, which takes two, if c
is the lowest bits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.kernels._quantized_matmul.packing import RUN

MANTISSA, MAGIC = 23, 0x4B000000
# Most values of a window: every place p needs a subtrahend per output in registers.
_PLACES = 8


class Window(NamedTuple):
    """Values that are extracted from the same 32 bits.

    Attributes:
      start: first bit of the window in the run's stream.
      values: numbers of the values in the run.
      places: p, the first bit of each value in the window.
    """

    start: int
    values: tuple[int, ...]
    places: tuple[int, ...]


@functools.cache
def windows(bits: int) -> tuple[Window, ...]:
    """Returns the windows of a run of 32 values, in order.

    Examples:
      >>> [(window.start, len(window.values)) for window in windows(3)]
      [(0, 7), (18, 6), (36, 6), (54, 6), (72, 6), (90, 1)]
    """
    starts: list[tuple[int, list[int]]] = []
    for value in range(RUN):
        bit = value * bits
        aligned = bit % 32 == 0
        if not starts or aligned or _is_full(*starts[-1], bits):
            # Without a shift the first value is at bit 0. With one, it is at bit b, so
            # that no mask is of the lowest bits.
            starts.append((bit if aligned else bit - bits, []))
        starts[-1][1].append(value)
    return tuple(
        Window(start, tuple(values), tuple(v * bits - start for v in values))
        for start, values in starts
    )


def _is_full(start: int, values: list[int], bits: int) -> bool:
    # The next value would end beyond the 23 bits of the mantissa.
    return len(values) == _PLACES or (values[-1] + 2) * bits - start > MANTISSA


def places(bits: int) -> tuple[int, ...]:
    """Returns the place p of each value of a run in its window.

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
    """Returns (q − zero) 2^p in float32 for the 32 values of a run.

    Args:
      words: the run's `bits` words, arrays of one shape.
      subtrahend: as from `offsets`.
      magic: `MAGIC`, loaded from memory so that the compiler does not know it.
      bits: of a value.
    """
    values = []
    for window in windows(bits):
        word = _read_window(words, window, bits)
        for place in window.places:
            joined = (word & np.uint32((2**bits - 1) << place)) | magic
            number = jax.lax.bitcast_convert_type(joined, jnp.float32)
            values.append(number - subtrahend[place])
    return values


def _read_window(words: list[jax.Array], window: Window, bits: int) -> jax.Array:
    """Returns the 32 bits of a window, possibly from two words."""
    number, shift = divmod(window.start, 32)
    if not shift:
        return words[number]
    low = words[number] >> np.uint32(shift)
    if (window.values[-1] + 1) * bits <= 32 * (number + 1):
        return low
    return low | (words[number + 1] << np.uint32(32 - shift))
