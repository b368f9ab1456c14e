"""Thresholds that are used again and corrected, as selecting k exactly costs more."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from hpcjax.collectives.group import (
    Entries,
    Group,
    Scalar,
    Vector,
    largest,
    packed,
    passed_on,
)


@dataclasses.dataclass(frozen=True)
class Correction:
    """How a threshold follows the number of entries that it lets through.

    Attributes:
      low: with fewer than `low · k` entries the threshold is divided by `down`.
      high: with more than `high · k` it is multiplied by `up`.
      down: from 1 on.
      up: from 1 on.
    """

    low: float
    high: float
    down: float
    up: float

    def apply(self, group: Group, threshold: Scalar, count: Scalar, k: int) -> Scalar:
        """Returns the threshold of the next step."""
        xp, f32 = group.xp, group.xp.float32
        lower, higher = threshold / f32(self.down), threshold * f32(self.up)
        made = xp.where(count > self.high * k, higher, threshold)
        return xp.where(count < self.low * k, lower, made)


class Selection(NamedTuple):
    """Entries above a threshold.

    Attributes:
      entries: what is selected.
      threshold: of the next step.
      overflow: how many more had reached it.
    """

    entries: Entries
    threshold: Scalar
    overflow: Scalar


class JointSelection(NamedTuple):
    """Entries of all members above a threshold.

    Attributes:
      entries: ours.
      counts: int32 [P], how many each member has.
      threshold: of the next step.
      overflow: how many more of all had reached it.
      sent: entries that went to others to find the threshold.
      arrived: that came from others for it.
    """

    entries: Entries
    counts: Vector
    threshold: Scalar
    overflow: Scalar
    sent: Scalar
    arrived: Scalar


class Found(NamedTuple):
    """The k-th of all members' magnitudes.

    Attributes:
      edge: int32, 0 if there are fewer.
      sent: entries that went to others for it.
      arrived: that came from others.
    """

    edge: Scalar
    sent: Scalar
    arrived: Scalar


Search = Callable[[Group, Entries, int], Found]


# Before selecting, a threshold that lets too much through is raised so often at most.
_TRIES, _MANY, _RAISE = 5, 4 / 3, 1.03


def usable(group: Group, threshold: Scalar) -> Scalar:
    """Says whether a threshold can be corrected: zero times anything stays zero."""
    return (group.magnitudes(threshold) > 0) & group.xp.isfinite(threshold)


def select_local(
    group: Group,
    x: Vector,
    k: int,
    threshold: Scalar,
    due: Scalar,
    *,
    least: int,
    limit: int,
    correction: Correction,
) -> Selection:
    """Selects about k entries of largest magnitude, exactly k when that is due.

    It is due, too, where the threshold would let through fewer than `least` entries or
    more than `limit`: corrections are too small to mend that soon.

    Args:
      group: whose arrays these are; nothing is communicated.
      x: numbers.
      k: how many are wanted.
      threshold: float32, of the last step.
      due: whether to find the k-th magnitude anew.
      least: entries at least.
      limit: entries at most, k or more.
      correction: of the threshold.
    """
    xp, order = group.xp, group.magnitudes(x)
    high = group.reaching(order, group.magnitudes(threshold))

    def raised(state: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        higher = state[0] * xp.float32(_RAISE)
        return higher, _reaching(group, high, higher)

    used, count = group.repeat(
        _TRIES,
        lambda state: state[1] > _MANY * k,
        raised,
        (threshold, _reaching(group, high, threshold)),
    )
    due = due | ~usable(group, threshold)
    off = ~due & ((count < least) | (count > limit))

    def anew() -> Selection:
        found = group.number_of(group.kth(order, k))
        over = xp.where(off, xp.maximum(count - k, 0), 0).astype("int32")
        return Selection(largest(group, x, order, k, limit), found, over)

    def again() -> Selection:
        entries = group.select(x, order, group.magnitudes(used), limit)
        corrected = correction.apply(group, used, count, k)
        return Selection(entries, corrected, xp.int32(0))

    return group.choose(due | off, anew, again)


def select_joint(
    group: Group,
    found: Entries,
    n: int,
    k: int,
    threshold: Scalar,
    due: Scalar,
    *,
    least: int,
    limit: int,
    correction: Correction,
    search: Search,
) -> JointSelection:
    """Selects about k of all members' entries, exactly k when that is due.

    It is due, too, where the threshold would let through fewer than `least` entries or
    more than `limit`. Among equal magnitudes those of lower ranks, and of lower
    indices, are taken.

    Args:
      group: its members decide together.
      found: ours.
      n: length of the vector.
      k: how many are wanted of all members together.
      threshold: float32, of the last step, the same for all members.
      due: whether to find the k-th magnitude anew, the same for all members.
      least: entries of all members at least.
      limit: entries of all members at most, k or more.
      correction: of the threshold.
      search: finds the k-th magnitude of all, one of `SEARCHES`.
    """
    order, size = group.magnitudes(found.values), found.indices.size
    xp, zero = group.xp, group.xp.int32(0)
    reaching = order >= xp.maximum(group.magnitudes(threshold), 1)
    counts = group.all_gather(group.count(reaching))
    count = xp.sum(counts, dtype="int32")
    due = due | ~usable(group, threshold)
    off = ~due & ((count < least) | (count > limit))

    def anew() -> JointSelection:
        kth = search(group, found, k)
        above, ties = order > kth.edge, (order == kth.edge) & (order > 0)
        own = xp.stack([group.count(above), group.count(ties)])
        aboves, tied = group.all_gather(own).T
        # Ties of lower ranks come first.
        before = xp.cumsum(tied, dtype="int32") - tied
        room = xp.clip(k - xp.sum(aboves, dtype="int32") - before, 0, tied)
        number = xp.cumsum(ties, dtype="int32")
        chosen = above | (ties & (number <= room[group.rank]))
        return JointSelection(
            packed(group, found, chosen, n, size),
            (aboves + room).astype("int32"),
            group.number_of(kth.edge),
            xp.where(off, xp.maximum(count - k, 0), 0).astype("int32"),
            kth.sent,
            kth.arrived,
        )

    def again() -> JointSelection:
        entries = packed(group, found, reaching, n, size)
        corrected = correction.apply(group, threshold, count, k)
        return JointSelection(entries, counts, corrected, zero, zero, zero)

    return group.cond(due | off, anew, again)


def _by_bisection(group: Group, found: Entries, k: int) -> Found:
    """31 counts, one after the other."""
    zero = group.xp.int32(0)
    return Found(group.kth_of_all(group.magnitudes(found.values), k), zero, zero)


def _by_histogram(group: Group, found: Entries, k: int) -> Found:
    """Four histograms, of 896 counts together: few round trips, more words."""
    xp, order = group.xp, group.magnitudes(found.values)
    edge, wanted = xp.int32(0), xp.int32(k)
    fewer = False
    for bits, shift in ((8, 23), (8, 15), (8, 7), (7, 0)):
        bins, higher = 1 << bits, shift + bits
        # The first digit has nothing before it: 31 bits, and the sign is not set.
        same = (order >> higher == edge >> higher) if higher < 31 else order >= 0
        digit = xp.where(same, (order >> shift) & (bins - 1), bins)
        counts = group.sum(group.scatter(bins, digit, xp.ones_like(digit)))
        reach = xp.cumsum(counts[::-1], dtype="int32")[::-1]
        fewer = fewer | (reach[0] < wanted)
        found_digit = xp.maximum(group.count(reach >= wanted) - 1, 0)
        wanted = wanted - (reach[found_digit] - counts[found_digit])
        edge = edge | found_digit << shift
    return Found(xp.where(fewer, xp.int32(0), edge), xp.int32(0), xp.int32(0))


def _by_gathering(group: Group, found: Entries, k: int) -> Found:
    """All sums go to all members, as in the released code: up to 2 k P words."""
    everything, counts = group.gather(found, found.indices.size)
    sent, arrived = passed_on(group, counts)
    return Found(group.kth(group.magnitudes(everything.values), k), sent, arrived)


SEARCHES: dict[str, Search] = {
    "bisect": _by_bisection,
    "histogram": _by_histogram,
    "gather": _by_gathering,
}


def _reaching(group: Group, order: Vector, threshold: Scalar) -> Scalar:
    return group.count(order >= group.xp.maximum(group.magnitudes(threshold), 1))
