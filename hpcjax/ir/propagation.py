"""What a node in a map reads and writes, seen from outside of the map.

In each axis an index is put at the corners of the ranges, innermost parameter first.
The result always holds all elements that are taken. Its first and last index, and the
greatest common divisor of differences, are exact where it says so: if no range is empty
or depends on others with a step, nor is cut by a minimum against its direction.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcjax.ir.affine import Affine, Range, Ranges
from hpcjax.ir.sdfg import Array, Node, accesses


class Reach(NamedTuple):
    """The elements that an edge can touch.

    Attributes:
      subset: a box; None if there are no iterations.
      exact: whether its ends and steps are those of the elements.
    """

    subset: tuple[Range, ...] | None
    exact: bool


class Edge(NamedTuple):
    """What moves between a container and a node, in all iterations of the node."""

    data: str
    writes: bool
    reach: Reach


def propagate(subset: Sequence[Range], ranges: Ranges) -> Reach:
    """Returns what a subset reaches over ranges; other names stay.

    Examples:
      >>> i, j = Range.of("1:N"), Range.of("0:25")
      >>> inner = (Range.of("i"), Range.of("j:j+10:2"))
      >>> [str(each) for each in propagate(inner, [("i", i), ("j", j)]).subset]
      ['1:N', '0:33']
    """
    ranges = tuple(ranges)
    if any(_lengths(own, ranges[:n])[1] < 0 for n, (_, own) in enumerate(ranges)):
        return Reach(None, True)
    boxes = [box(_INDEX, (*ranges, ("", own))) for own in subset]
    return Reach(tuple(each for each, _, _ in boxes), all(sure for *_, sure in boxes))


_INDEX = Affine((("", 1),))


@functools.lru_cache(maxsize=2**14)
def box(index: Affine, ranges: Ranges) -> tuple[Range, Affine, bool]:
    """Returns an index's range, its value at first, and whether the range is exact."""
    low, base, highs = index, index, (index,)
    step, exact, aligned = 0, True, True
    for place in range(len(ranges) - 1, -1, -1):
        name, own = ranges[place]
        shortest, longest = _lengths(own, ranges[:place])
        exact &= shortest >= 0
        start, ends = own.start, own.ends
        length = (ends[0] - start).number if len(ends) == 1 else None
        if length is not None:  # The last value that is taken.
            ends = (start + length // own.step * own.step,)
        regular = length is not None or own.step == 1
        if longest >= own.step:
            step = math.gcd(step, base.factor(name) * own.step)
        if low.factor(name) < 0:
            exact &= len(ends) == 1
            aligned &= regular
        low = low.put({name: start if low.factor(name) >= 0 else ends[-1]})
        signs = {each.factor(name) > 0 for each in highs if each.factor(name)}
        exact &= len(signs) < 2 and (regular or not signs)
        highs = tuple(
            each.put({name: end})
            for each in highs
            for end in (ends if each.factor(name) > 0 else (start,))
        )
        base = base.put({name: start})
    highs = tuple(dict.fromkeys(highs))
    step = step if step and aligned else 1
    return Range(low, highs, step), base, exact and aligned


def _lengths(own: Range, ranges: Ranges) -> tuple[float, float]:
    """Returns bounds of the last index less the first; names that stay are positive."""
    spans = [box(end - own.start, ranges)[0] for end in own.ends]
    ends = (end.number for span in spans for end in span.ends)
    longest = (math.inf if number is None else number for number in ends)
    return min(least(span.start) for span in spans), min(longest)


def least(index: Affine) -> float:
    """Returns the least value with names that are at least 1, or minus infinity."""
    if any(n < 0 for _, n in index.terms):
        return -math.inf
    return index.constant + sum(n for _, n in index.terms)


def edges(node: Node, arrays: Mapping[str, Array]) -> list[Edge]:
    """Returns what moves in and out of a node, an edge for each container and way."""
    found: dict[tuple[str, bool], list[Reach]] = {}
    for each in accesses(node):
        if each.memlet.data not in each.private:
            key = (each.memlet.data, each.writes)
            reach = propagate(each.memlet.subset, each.ranges)
            found.setdefault(key, []).append(reach)
    return [
        Edge(data, writes, _join(parts, arrays[data]))
        for (data, writes), parts in found.items()
    ]


def _join(parts: Sequence[Reach], array: Array) -> Reach:
    """Returns the box around several."""
    taken = list(
        dict.fromkeys(each.subset for each in parts if each.subset is not None)
    )
    if len(taken) < 2:
        return Reach(taken[0] if taken else None, all(each.exact for each in parts))
    axes = zip(*taken, array.whole, strict=True)
    return Reach(tuple(_around(own, whole) for *own, whole in axes), False)


def _around(parts: Sequence[Range], whole: Range) -> Range:
    """Returns the range around several, the whole axis if they cannot be compared."""
    first = parts[0]
    if len({*parts}) == 1:
        return first
    starts = [each.start - first.start for each in parts]
    ends = [end - first.ends[0] for each in parts for end in each.ends]
    if any(gap.terms for gap in (*starts, *ends)) or len(ends) > len(parts):
        return whole
    gaps = [gap.constant for gap in starts]
    steps = (each.step for each in parts if each.ends != (each.start,))
    last = first.ends[0] + max(gap.constant for gap in ends)
    return Range(first.start + min(gaps), (last,), math.gcd(*gaps, *steps) or 1)
