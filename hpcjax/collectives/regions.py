"""Division of a vector into regions, one for each member, who adds up its entries.

P + 1 boundaries `starts`, from 0 to n, divide a vector of length n: the region of
member r is `starts[r]` to `starts[r + 1]`. Inner boundaries are called cuts.
"""

from collections.abc import Callable

from hpcjax.collectives.group import Entries, Group, Scalar, Vector


def even_cuts(group: Group, entries: Entries, n: int) -> Vector:
    """Returns regions of equal length, independent of the entries."""
    del entries
    return even_starts(group, n)


def even_starts(group: Group, n: int) -> Vector:
    """Returns the boundaries of regions of equal length, up to rounding, [P + 1]."""
    return group.xp.asarray(
        [n * member // group.size for member in range(group.size + 1)], "int32"
    )


def mean_cuts(group: Group, entries: Entries, n: int) -> Vector:
    """Returns regions whose cuts are the mean of those that members propose.

    A member proposes the cuts that divide its own entries into P equal counts, or those
    of equal lengths if it has no entries. This balances the regions if the large
    entries of all members are at similar places.

    Args:
      group: its members decide together; 2 (P − 1) words are added up.
      entries: ours.
      n: length of the vector.

    Returns:
      Boundaries, int32 [P + 1].
    """
    xp, size = group.xp, group.size
    place = xp.arange(1, size, dtype="int32")
    # ⌊j c / P⌋ for j = 1 … P - 1 without the product j c, which may overflow int32.
    number = place * (entries.count // size) + place * (entries.count % size) // size
    even = even_starts(group, n)[1:-1]
    own = xp.where(entries.count > 0, group.take(entries.indices, number), even)
    # The sum of P cuts may overflow, too: quotients and remainders are summed apart.
    quotients, rests = group.sum((own // size, own % size))
    return _add_ends(group, quotients + rests // size, n)


def pooled_cuts(group: Group, entries: Entries, n: int) -> Vector:
    """Returns regions that divide the entries of all members into P equal counts.

    All P − 1 cuts are found by bisection at once, in ⌈log2 (n + 1)⌉ rounds, each of
    which adds up P − 1 counts.
    """
    xp, size = group.xp, group.size
    total = group.sum(entries.count)
    place = xp.arange(1, size, dtype="int32")
    wanted = place * (total // size) + place * (total % size) // size
    low = xp.zeros(size - 1, "int32")
    high = xp.full(size - 1, n, "int32")
    for _ in range(n.bit_length()):
        middle = low + (high - low) // 2
        # Entries of all members in front of `middle`. The cut is the first place with
        # at least j / P of all entries in front of it.
        before = xp.searchsorted(entries.indices, middle).astype("int32")
        enough = group.sum(before) >= wanted
        low = xp.where(enough, low, xp.minimum(middle + 1, high))
        high = xp.where(enough, middle, high)
    return _add_ends(group, high, n)


CUTS: dict[str, Callable[[Group, Entries, int], Vector]] = {
    "even": even_cuts,
    "mean": mean_cuts,
    "pooled": pooled_cuts,
}


def region_start(group: Group, starts: Vector, number: Scalar) -> Scalar:
    """Returns the boundary at which a member's region begins."""
    return group.take(starts, group.xp.asarray(number, "int32")[None])[0]


def _add_ends(group: Group, cuts: Vector, n: int) -> Vector:
    """Returns the boundaries 0, the cuts, and n."""
    ends = group.xp.asarray([0, n], "int32")
    return group.xp.concatenate([ends[:1], cuts.astype("int32"), ends[1:]])
