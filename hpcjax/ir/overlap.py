"""Whether iterations of maps touch the same elements: by counting, or by bounds.

Spaces of up to `MOST` iterations without symbols are counted. In others a pair of edges
is apart if the boxes or the residues of an axis are, or if each parameter is told by an
axis that both index alike. What this does not decide is never taken for apart.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hpcjax.ir import affine
from hpcjax.ir.propagation import box, least
from hpcjax.ir.sdfg import Access

MOST = 4096
_UNKNOWN = "not decided"


class Meeting(NamedTuple):
    """Two iterations that touch one element, or that what they touch is not known."""

    data: str
    element: tuple[int, ...] | str
    first: tuple[int, ...] = ()
    second: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.element == _UNKNOWN:
            return f"{self.data}: {_UNKNOWN}: symbols, or more than {MOST} iterations"
        at = ", ".join(map(str, self.element))
        return f"element {self.data}[{at}], iterations {self.first} and {self.second}"

    @property
    def known(self) -> bool:
        """Whether there is such an element."""
        return self.element != _UNKNOWN


def meeting(
    one: Access, other: Access, own: Sequence[str], around: Sequence[str] = ()
) -> Meeting | None:
    """Returns where different iterations of maps meet; None if nowhere.

    Args:
      one: an edge within the first map.
      other: an edge to the same container in the second map, whose parameters have the
        same names.
      own: parameters of the maps.
      around: parameters outside of them, of equal values in both.
    """
    if one.memlet.data != other.memlet.data or _apart(one, other, own, around):
        return None
    if not (countable(one) and countable(other)):
        return Meeting(one.memlet.data, _UNKNOWN)
    depth, names = len(around), [*around, *own]
    seen: dict[tuple[Any, ...], dict[tuple[int, ...], None]] = {}
    for place, element in touched([one], names):
        seen.setdefault((place[:depth], element), {})[place[depth:]] = None
    for place, element in touched([other], names):
        for before in seen.get((place[:depth], element), ()):
            if before != place[depth:]:
                return Meeting(one.memlet.data, element, before, place[depth:])
    return None


def countable(access: Access) -> bool:
    """Whether an edge depends on no symbols and has few elements."""
    free = {name for name, _ in access.ranges}
    used = (
        own.names for own in (*(r for _, r in access.ranges), *access.memlet.subset)
    )
    if not all(names <= free for names in used):
        return False
    return affine.count(access.ranges, access.memlet.subset) <= MOST


def touched(
    edges: Iterable[Access], params: Sequence[str]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields iterations, and the elements that they touch."""
    for each in edges:
        for values in affine.iterate(each.ranges, {}):
            iteration = tuple(values[name] for name in params)
            for element in affine.elements(each.memlet.subset, values):
                yield iteration, element


def _apart(
    one: Access, other: Access, own: Sequence[str], around: Sequence[str]
) -> bool:
    """Whether bounds, residues or equal indices tell that iterations do not meet."""
    left = set(own)
    for first, second in zip(one.memlet.subset, other.memlet.subset, strict=True):
        inner = [
            tuple((n, r) for n, r in (*each.ranges, ("", axis)) if n not in around)
            for each, axis in ((one, first), (other, second))
        ]
        index = affine.Affine((("", 1),))
        (a, a_base, _), (b, b_base, _) = (box(index, ranges) for ranges in inner)
        gaps = [low.start - end for low, high in ((a, b), (b, a)) for end in high.ends]
        if any(least(gap) >= 1 for gap in gaps if not gap.names & set(around)):
            return True
        if (a_base - b_base).number is not None:
            steps = [_residue(index, ranges) for ranges in inner]
            step = math.gcd(*steps)
            if step and (a_base - b_base).constant % step:
                return True
        names = first.names - set(around)
        if first == second and first.ends == (first.start,) and len(names & left) == 1:
            told = names & left
            if not (names - told) & {n for n, _ in (*one.ranges, *other.ranges)}:
                left -= told
    return not left and bool(own)


def _residue(index: affine.Affine, ranges: affine.Ranges) -> int:
    """Returns what all differences of an index's values are multiples of."""
    step = 0
    for name, own in reversed(ranges):
        if own.ends != (own.start,):
            step = math.gcd(step, index.factor(name) * own.step)
        index = index.put({name: own.start})
    return step
