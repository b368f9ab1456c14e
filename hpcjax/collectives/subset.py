"""Sums over a subset of a group's members, and broadcasts inside of subsets."""

from collections.abc import Sequence

import numpy as np

from hpcjax.collectives.group import Group, Vector
from hpcjax.collectives.rings import Rings, gather_parts, scatter_sum


def subset_sum(group: Group, x: Vector, members: Sequence[int]) -> Vector:
    """Sums over some members of a group; the result of all others is meaningless.

    The c members form a ring for a reduce-scatter and an all-gather. Each of them sends
    2 (c − 1) messages of ⌈n / c⌉ values, and the others none. Every value is added up
    in one place only, so that all members get the same bits.

    Args:
      group: all its members must call this.
      x: ours, `[n]`; that of non-members is not used.
      members: ranks of the members, all different.
    """
    count, n = len(members), x.shape[0]
    if count < 2:
        return x
    padded = group.xp.concatenate([x, group.xp.zeros(-n % count, x.dtype)])
    ring = Rings.of([members], group.size)
    return gather_parts(group, scatter_sum(group, padded, ring), ring)[:n]


def spread(group: Group, x: Vector, groups: Sequence[Sequence[int]]) -> Vector:
    """Broadcasts the value of the first member of each of several disjoint groups.

    By binomial trees: in round k the first 2ᵏ members of a group send to the next 2ᵏ. A
    group of p members sends (p − 1) n values in all. Members in no group keep their
    own value.
    """
    for pairs in _list_rounds(groups):
        receives = np.zeros(group.size, bool)
        receives[[target for _, target in pairs]] = True
        received = group.permute(x, pairs)
        x = group.xp.where(group.xp.asarray(receives)[group.rank], received, x)
    return x


def _list_rounds(groups: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Returns the (source, target) pairs of each round."""
    rounds = []
    have, largest = 1, max((len(group) for group in groups), default=0)
    while have < largest:
        rounds.append(
            [
                (group[place - have], group[place])
                for group in groups
                for place in range(have, min(2 * have, len(group)))
            ]
        )
        have *= 2
    return rounds
