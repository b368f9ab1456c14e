"""Where the values of a run lie for a kernel that multiplies two at once.

A word can hold two float16. A value q of b bits at place p of such a half, all other
bits zero, is the float16 q · 2^(p − 24), exactly: below its least normal number a
float16 is an integer in units of 2^−24, and GPUs compute with these at full speed. So
one logical operation makes two factors of packed values, without a conversion.

A window is a word whose halves are 16 bits of the run's stream each, `apart` bits from
each other, so that values lie at the same places of both: in a window of 2, 4 or 8 bits
these are 32 bits in a row, and of 3 bits, 16 bits from each of two groups of eight
values. Values whose place would be above the ten bits are shifted down.
"""

from typing import NamedTuple

# The unit of a float16 below its least normal number, as a power of two.
UNIT = -24
_PAIRS = 16
# By bits, of the values of a window's low half: where the window begins, its shift, and
# the place. Ten bits hold a value with its place.
_PLACES = {
    2: tuple(
        (0, shift, place)
        for shift, end in ((0, 10), (10, 6))
        for place in range(0, end, 2)
    ),
    3: (
        (0, 0, 0),
        (0, 0, 3),
        (0, 0, 6),
        (8, 0, 1),
        (8, 0, 4),
        (8, 0, 7),
        (8, 10, 0),
        (8, 10, 3),
    ),
    4: ((0, 0, 0), (0, 0, 4), (0, 8, 0), (0, 8, 4)),
    8: ((0, 0, 0), (0, 8, 0)),
}


class Pair(NamedTuple):
    """Two values of a run that are multiplied at once.

    Attributes:
      first: number of the value in the low half.
      second: of the one in the high half.
      start: first bit of the window in the run's stream.
      shift: of the window to the right.
      place: p, of both values in the shifted window.
    """

    first: int
    second: int
    start: int
    shift: int
    place: int


def apart(bits: int) -> int:
    """Returns how many bits of the stream lie between the beginnings of the halves."""
    return 24 if bits == 3 else 16


def pairs(bits: int) -> tuple[Pair, ...]:
    """Returns the 16 pairs of a run of 32 values, window by window.

    Examples:
      >>> [tuple(pair) for pair in pairs(4)[1:3]]
      [(1, 5, 0, 0, 4), (2, 6, 0, 8, 0)]
    """
    found = _PLACES[bits]
    count = len(found)
    return tuple(
        Pair(first, first + count, 2 * block * apart(bits) + begin, shift, place)
        for block in range(_PAIRS // count)
        for first, (begin, shift, place) in enumerate(found, 2 * block * count)
    )
