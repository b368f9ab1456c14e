"""Selection of about k entries by thresholds that are reused and corrected.

Finding the k-th largest magnitude costs many counts. Most steps therefore reuse the
threshold of the step before, corrected by the number of entries that it selected.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from hpcjax.collectives.group import (
    Entries,
    Group,
    Scalar,
    Vector,
    count_passed_on,
    keep_entries,
    select_largest,
)


@dataclasses.dataclass(frozen=True)
class Correction:
    """How a threshold is corrected by the number of entries that it selected.

    Attributes:
      low: with fewer than `low · k` entries, the threshold is divided by `down`.
      high: with more than `high · k` entries, it is multiplied by `up`.
      down: at least 1.
      up: at least 1.
    """

    low: float
    high: float
    down: float
    up: float

    def apply(self, group: Group, threshold: Scalar, count: Scalar, k: int) -> Scalar:
        """Returns the threshold of the next step."""
        xp, f32 = group.xp, group.xp.float32
        lower, higher = threshold / f32(self.down), threshold * f32(self.up)
        raised = xp.where(count > self.high * k, higher, threshold)
        return xp.where(count < self.low * k, lower, raised)


class Selection(NamedTuple):
    """Entries above a threshold.

    Attributes:
      entries: the selected ones.
      threshold: of the next step.
      overflow: number of entries above the threshold that were not selected.
    """

    entries: Entries
    threshold: Scalar
    overflow: Scalar


class JointSelection(NamedTuple):
    """Entries of all members above a common threshold.

    Attributes:
      entries: our selected entries.
      counts: int32 [P], number of selected entries of each member.
      threshold: of the next step.
      overflow: number of entries of all above the threshold that were not selected.
      sent: number of entries that went to other members to find the threshold.
      arrived: number of entries that came from other members for it.
    """

    entries: Entries
    counts: Vector
    threshold: Scalar
    overflow: Scalar
    sent: Scalar
    arrived: Scalar


class KthMagnitude(NamedTuple):
    """The k-th largest magnitude of all members' entries.

    Attributes:
      edge: the magnitude, int32; 0 if there are fewer than k.
      sent: number of entries that went to other members to find it.
      arrived: number of entries that came from other members for it.
    """

    edge: Scalar
    sent: Scalar
    arrived: Scalar


Search = Callable[[Group, Entries, int], KthMagnitude]


# A threshold that selects more than _MANY times k is multiplied by _RAISE before it is
# used, at most _TRIES times.
_TRIES, _MANY, _RAISE = 5, 4 / 3, 1.03


def is_usable(group: Group, threshold: Scalar) -> Scalar:
    """Returns whether a threshold is finite and positive, so that factors change it."""
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
    """Selects about k entries of largest magnitude, exactly k if `due`.

    Exactly k are also selected if the threshold would select fewer than `least` or more
    than `limit` entries, which corrections would take many steps to repair.

    Args:
      group: the kind of arrays; nothing is communicated.
      x: values.
      k: number of entries that are wanted.
      threshold: float32, of the last step.
      due: whether to find the exact threshold.
      least: smallest number of entries to accept.
      limit: largest number of entries to accept, at least k.
      correction: of the threshold.
    """
    xp, order = group.xp, group.magnitudes(x)
    high = group.keep_reaching(order, group.magnitudes(threshold))

    def raise_threshold(state: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        higher = state[0] * xp.float32(_RAISE)
        return higher, _count_reaching(group, high, higher)

    used, count = group.repeat(
        _TRIES,
        lambda state: state[1] > _MANY * k,
        raise_threshold,
        (threshold, _count_reaching(group, high, threshold)),
    )
    due = due | ~is_usable(group, threshold)
    off = ~due & ((count < least) | (count > limit))

    def select_exactly() -> Selection:
        exact = group.number_of(group.kth(order, k))
        over = xp.where(off, xp.maximum(count - k, 0), 0).astype("int32")
        return Selection(select_largest(group, x, order, k, limit), exact, over)

    def reuse() -> Selection:
        entries = group.select(x, order, group.magnitudes(used), limit)
        corrected = correction.apply(group, used, count, k)
        return Selection(entries, corrected, xp.int32(0))

    return group.choose(due | off, select_exactly, reuse)


def select_joint(
    group: Group,
    entries: Entries,
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
    """Selects about k of all members' entries together, exactly k if `due`.

    Exactly k are also selected if the threshold would select fewer than `least` or more
    than `limit` entries. Among equal magnitudes, those of lower ranks and then of lower
    indices are selected.

    Args:
      group: its members decide together.
      entries: ours.
      n: length of the vector.
      k: number of entries that are wanted of all members together.
      threshold: float32, of the last step, the same for all members.
      due: whether to find the exact threshold, the same for all members.
      least: smallest number of entries of all members to accept.
      limit: largest number of entries of all members to accept, at least k.
      correction: of the threshold.
      search: finds the k-th magnitude of all, one of `SEARCHES`.
    """
    order, size = group.magnitudes(entries.values), entries.indices.size
    xp, zero = group.xp, group.xp.int32(0)
    reaching = order >= xp.maximum(group.magnitudes(threshold), 1)
    counts = group.all_gather(group.count(reaching))
    count = xp.sum(counts, dtype="int32")
    due = due | ~is_usable(group, threshold)
    off = ~due & ((count < least) | (count > limit))

    def select_exactly() -> JointSelection:
        kth = search(group, entries, k)
        above, ties = order > kth.edge, (order == kth.edge) & (order > 0)
        own = xp.stack([group.count(above), group.count(ties)])
        aboves, tied = group.all_gather(own).T
        # k minus all entries above the edge is left for ties. Members take them in the
        # order of ranks: each what those before it leave, at most its own ties.
        before = xp.cumsum(tied, dtype="int32") - tied
        room = xp.clip(k - xp.sum(aboves, dtype="int32") - before, 0, tied)
        number = xp.cumsum(ties, dtype="int32")
        chosen = above | (ties & (number <= room[group.rank]))
        return JointSelection(
            keep_entries(group, entries, chosen, n, size),
            (aboves + room).astype("int32"),
            group.number_of(kth.edge),
            xp.where(off, xp.maximum(count - k, 0), 0).astype("int32"),
            kth.sent,
            kth.arrived,
        )

    def reuse() -> JointSelection:
        kept = keep_entries(group, entries, reaching, n, size)
        corrected = correction.apply(group, threshold, count, k)
        return JointSelection(kept, counts, corrected, zero, zero, zero)

    return group.cond(due | off, select_exactly, reuse)


def _search_by_bisection(group: Group, entries: Entries, k: int) -> KthMagnitude:
    """Adds up 31 counts, one after the other."""
    zero, order = group.xp.int32(0), group.magnitudes(entries.values)
    return KthMagnitude(group.kth_of_all(order, k), zero, zero)


def _search_by_histogram(group: Group, entries: Entries, k: int) -> KthMagnitude:
    """Adds up four histograms of 896 counts together: fewer messages, more words."""
    xp, order = group.xp, group.magnitudes(entries.values)
    edge, wanted = xp.int32(0), xp.int32(k)
    fewer = False
    # The 31 bits of a magnitude as four digits, from the highest. Each histogram counts
    # the next digit of those magnitudes whose higher digits are those of the edge.
    for bits, shift in ((8, 23), (8, 15), (8, 7), (7, 0)):
        bins, higher = 1 << bits, shift + bits
        # The first digit has none before it. The sign bit is never set.
        same = (order >> higher == edge >> higher) if higher < 31 else order >= 0
        # Digit `bins` is out of bounds and not counted.
        digit = xp.where(same, (order >> shift) & (bins - 1), bins)
        counts = group.sum(group.scatter(bins, digit, xp.ones_like(digit)))
        # reach[d] magnitudes have a digit of at least d. The edge has the largest digit
        # that `wanted` of them reach; those above it need not be found any more.
        reach = xp.cumsum(counts[::-1], dtype="int32")[::-1]
        fewer = fewer | (reach[0] < wanted)
        edge_digit = xp.maximum(group.count(reach >= wanted) - 1, 0)
        wanted = wanted - (reach[edge_digit] - counts[edge_digit])
        edge = edge | edge_digit << shift
    return KthMagnitude(xp.where(fewer, xp.int32(0), edge), xp.int32(0), xp.int32(0))


def _search_by_gathering(group: Group, entries: Entries, k: int) -> KthMagnitude:
    """Gathers all sums in all members, as the released code does: up to 2 k P words."""
    everything, counts = group.gather(entries, entries.indices.size)
    sent, arrived = count_passed_on(group, counts)
    return KthMagnitude(
        group.kth(group.magnitudes(everything.values), k), sent, arrived
    )


SEARCHES: dict[str, Search] = {
    "bisect": _search_by_bisection,
    "histogram": _search_by_histogram,
    "gather": _search_by_gathering,
}


def _count_reaching(group: Group, order: Vector, threshold: Scalar) -> Scalar:
    return group.count(order >= group.xp.maximum(group.magnitudes(threshold), 1))
