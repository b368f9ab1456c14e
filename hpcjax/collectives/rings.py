"""Reduce-scatter and all-gather around rings of members, several at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.collectives.group import Group, Vector


class Rings(NamedTuple):
    """Disjoint rings of equally many members.

    Attributes:
      size: members of each.
      places: where in its ring each member of the group is; 0 for those in none.
      pairs: (source, target) of each step.
    """

    size: int
    places: np.ndarray
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, walks: Sequence[Sequence[int]], members: int) -> "Rings":
        """Returns rings that send along walks, among the `members` of a group."""
        places = np.zeros(members, np.int32)
        for walk in walks:
            places[list(walk)] = np.arange(len(walk))
        pairs = tuple(
            (walk[place - 1], walk[place])
            for walk in walks
            for place in range(len(walk))
            if len(walk) > 1
        )
        return cls(len(walks[0]), places, pairs)


def scatter_sum(group: Group, x: Vector, rings: Rings) -> Vector:
    """Returns the sum of one of `size` equal parts of x over our ring: part `place`.

    The partial sum of a part starts at the member behind its owner and travels around
    the ring. After step s, the member at `place` has that of part place − s − 2, so at
    the end, s = size − 2, the whole sum of part `place`. Every value is added up in one
    order, so that all members get the same bits.
    """
    count, parts = rings.size, x.reshape(rings.size, -1)
    place = group.xp.asarray(rings.places)[group.rank]
    total = parts[(place - 1) % count]
    for step in range(count - 1):
        total = group.permute(total, rings.pairs) + parts[(place - step - 2) % count]
    return total


def gather_parts(group: Group, part: Vector, rings: Rings) -> Vector:
    """Returns the parts of all members of our ring, in the order of their places."""
    count = rings.size
    place = group.xp.asarray(rings.places)[group.rank]
    parts = [part]
    # Those of the members at place, place - 1, … arrive in this order.
    for _ in range(count - 1):
        parts.append(group.permute(parts[-1], rings.pairs))
    order = (place - group.xp.arange(count)) % count
    return group.xp.stack(parts)[order].reshape(-1)
