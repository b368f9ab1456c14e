"""Sums over some members of a group, and one member's value for others."""

from collections.abc import Sequence

import numpy as np

from hpcjax.collectives.group import Group, Vector


def subset_sum(group: Group, x: Vector, members: Sequence[int]) -> Vector:
    """Returns to some members the sum over them; the others get what means nothing.

    A ring of the c members: a reduce-scatter and an all-gather, 2 (c - 1) messages of
    ⌈n / c⌉ numbers from each of them and none from others. Every number is added up
    once, so that all members get the same bits.

    Args:
      group: all of it calls this.
      x: ours, `[n]`; not looked at of others than `members`.
      members: their numbers, none twice.
    """
    count, n = len(members), x.shape[0]
    if count < 2:
        return x
    padded = group.xp.concatenate([x, group.xp.zeros(-n % count, x.dtype)])
    parts = padded.reshape(count, -1)
    places = np.zeros(group.size, np.int32)
    places[list(members)] = np.arange(count)
    place = group.xp.asarray(places)[group.rank]
    ring = [(members[i], members[(i + 1) % count]) for i in range(count)]

    made = parts[(place - 1) % count]
    for step in range(count - 1):
        made = group.permute(made, ring) + parts[(place - step - 2) % count]
    sums = [made]  # of the parts place, place - 1, …
    for _ in range(count - 1):
        sums.append(group.permute(sums[-1], ring))
    order = (place - group.xp.arange(count)) % count
    return group.xp.stack(sums)[order].reshape(-1)[:n]


def spread(group: Group, x: Vector, groups: Sequence[Sequence[int]]) -> Vector:
    """Returns in each of disjoint groups of members the value of its first one.

    By binomial trees: in round k the first 2ᵏ of a group send to the next 2ᵏ, (p - 1) n
    numbers in a group of p. A member in no group keeps its own.
    """
    for pairs in _rounds(groups):
        receives = np.zeros(group.size, bool)
        receives[[target for _, target in pairs]] = True
        received = group.permute(x, pairs)
        x = group.xp.where(group.xp.asarray(receives)[group.rank], received, x)
    return x


def _rounds(groups: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
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
