"""The least of a unimodal function on a short list, in few measurements."""

import collections
import math
from collections.abc import Callable
from typing import NamedTuple

from hpcjax.core import checks

_REPEATS = 3


class Measurement(NamedTuple):
    """A measured value with its standard error; infinite where it is not allowed."""

    value: float
    error: float


def golden_section(
    count: int, measure: Callable[[int], Measurement]
) -> dict[int, Measurement]:
    """Measures places on the way to the least value of `count` places.

    Fibonacci's form of the golden section, which measures at most ⌈log_1.618 count⌉ + 1
    places. Two values that are closer than two standard errors of their difference are
    measured again, up to three times, and averaged. Of two infinite values the lower
    place is dropped: what is not allowed is taken to lie below what is.

    Args:
      count: number of places, at least 1.
      measure: of a place in `range(count)`.

    Returns:
      The mean of each place that was measured.

    Examples:
      >>> seen = golden_section(12, lambda place: Measurement((place - 7) ** 2, 0.0))
      >>> min(seen, key=seen.get), len(seen)
      (7, 5)
    """
    checks.require_count(1, count=count)
    seen: dict[int, list[Measurement]] = collections.defaultdict(list)

    def look(place: int, times: int = 1) -> Measurement:
        # The list is lengthened downwards to a Fibonacci number, by what is not
        # allowed.
        if place < 0:
            return Measurement(math.inf, 0.0)
        while len(seen[place]) < times:
            seen[place].append(measure(place))
        return _mean(seen[place])

    # The least lies in the open interval (low, low + large); `small` and `large` are
    # Fibonacci numbers, one after the other.
    small, large = 1, 2
    while large < count + 1:
        small, large = large, small + large
    low = count - large
    while large > 2:
        small, large = large - small, small
        left, right = low + small, low + large
        for times in range(1, _REPEATS + 2):
            first, second = look(left, times), look(right, times)
            if not _are_close(first, second):
                break
        if first.value >= second.value:
            low = left
    look(low + 1)
    return {place: _mean(found) for place, found in seen.items()}


def _are_close(first: Measurement, second: Measurement) -> bool:
    apart = abs(first.value - second.value)
    return apart < 2 * math.hypot(first.error, second.error)


def _mean(found: list[Measurement]) -> Measurement:
    values, errors = zip(*found, strict=True)
    return Measurement(sum(values) / len(found), math.hypot(*errors) / len(found))
