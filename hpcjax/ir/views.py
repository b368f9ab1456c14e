"""Arrays as parts of containers: slices, transposes and reshapes that move nothing."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcjax.ir.affine import Affine, Index, Range, point
from hpcjax.ir.sdfg import Memlet


def axis(place: int) -> str:
    """Returns the name of an axis of a view."""
    return f"i{place}"


class View(NamedTuple):
    """What an array is of a container.

    Attributes:
      data: the container; "" for a constant.
      shape: of the array.
      index: for each axis of the container, an expression of `axis(0)`, `axis(1)`, ...
      value: of a constant, as in a tasklet's code.
    """

    data: str
    shape: tuple[int, ...]
    index: tuple[Affine, ...] = ()
    value: str = ""

    @classmethod
    def whole(cls, data: str, shape: Sequence[int]) -> "View":
        """Returns the view of all of a container."""
        index = (Affine.of(axis(place)) for place in range(len(shape)))
        return cls(data, tuple(shape), tuple(index))

    @property
    def memlet(self) -> Memlet:
        """The element at `axis(0)`, `axis(1)`, ..."""
        return Memlet(self.data, tuple(map(point, self.index)))

    def put(self, shape: Sequence[int], *indices: Index) -> "View":
        """Returns an array that is this one at an expression for each axis."""
        values = {axis(place): index for place, index in enumerate(indices)}
        index = tuple(each.put(values) for each in self.index)
        return self._replace(shape=tuple(shape), index=index)

    def pick(self, place: int, index: Index) -> "View":
        """Returns it at an index of an axis, which is gone."""
        shape = self.shape[:place] + self.shape[place + 1 :]
        names = [axis(k) for k in range(len(shape))]
        return self.put(shape, *names[:place], index, *names[place:])

    def slice(
        self, start: Sequence[int], shape: Sequence[int], step: Sequence[int] = ()
    ) -> "View":
        """Returns a part; a step can be negative."""
        steps = step or (1,) * len(shape)
        parts = (
            Affine(((axis(place), by),), first)
            for place, (first, by) in enumerate(zip(start, steps, strict=True))
        )
        return self.put(shape, *parts)

    def transpose(self, order: Sequence[int]) -> "View":
        """Returns it with the axes in another order."""
        shape = (self.shape[place] for place in order)
        return self.put(
            tuple(shape), *(axis(order.index(k)) for k in range(len(order)))
        )

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> "View":
        """Returns it in a larger shape, of which it has some axes."""
        pairs = zip(self.shape, axes, strict=True)
        return self.put(
            shape,
            *(axis(to) if size == shape[to] else Affine() for size, to in pairs),
        )

    def reshape(self, shape: Sequence[int]) -> "View | None":
        """Returns it with its elements in another shape; None if no index is affine."""
        if not self.data:
            return self._replace(shape=tuple(shape))
        values = dict.fromkeys(map(axis, range(len(self.shape))), Affine())
        for old, new in groups(self.shape, shape):
            number = Affine()
            for place in new:
                later = [shape[other] for other in new if other > place]
                number += Affine(((axis(place), math.prod(later)),))
            strides = [math.prod(self.shape[o] for o in old if o > k) for k in old]
            last = axis(old[-1])
            for each in self.index:
                wanted = [each.factor(last) * stride for stride in strides]
                if [each.factor(axis(k)) for k in old] != wanted:
                    return None
            values[last] = number
        return self.put(shape, *values.values())

    def box(self) -> tuple[tuple[Range, ...], tuple[int, ...]] | None:
        """Returns what it takes, and its axis at each one of the container.

        An axis of the container at one index has -1. None if it takes no product of
        ranges, each of an axis of its own.
        """
        subset, places = [], []
        for each in self.index:
            names = [*each.names]
            place = int(names[0][1:]) if len(names) == 1 and names[0][0] == "i" else -1
            if place < 0 and any(name[0] == "i" for name in names):
                return None
            if place < 0:
                subset.append(point(each))
            elif each.factor(names[0]) < 1:
                return None
            else:
                ends = (each.put({names[0]: self.shape[place] - 1}),)
                start = each.put({names[0]: 0})
                subset.append(Range(start, ends, each.factor(names[0])))
            places.append(place)
        wanted = [*range(len(self.shape))]
        found = sorted(place for place in places if place >= 0)
        return (tuple(subset), tuple(places)) if found == wanted else None


def groups(
    old: Sequence[int], new: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the least groups of axes that have as many elements in both shapes."""
    first, second = ([k for k, n in enumerate(s) if n != 1] for s in (old, new))
    while first or second:
        ones, others = [first.pop(0)], [second.pop(0)]
        while (gap := math.prod(old[k] for k in ones)) != (
            other := math.prod(new[k] for k in others)
        ):
            if gap < other:
                ones.append(first.pop(0))
            else:
                others.append(second.pop(0))
        yield ones, others
