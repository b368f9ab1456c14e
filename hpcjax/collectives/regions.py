"""Which member adds up which part of a vector."""

from collections.abc import Callable

from hpcjax.collectives.group import Entries, Group, Scalar, Vector


def even_cuts(group: Group, found: Entries, n: int) -> Vector:
    """Returns regions as equal as can be, wherever entries are."""
    del found
    return even_starts(group, n)


def even_starts(group: Group, n: int) -> Vector:
    """Returns int32 [P + 1]: regions as equal as can be, from 0 to n."""
    return group.xp.asarray(
        [n * member // group.size for member in range(group.size + 1)], "int32"
    )


def mean_cuts(group: Group, found: Entries, n: int) -> Vector:
    """Returns regions from the average of what members propose.

    Each proposes the cuts that split its own entries into P equal counts, or even ones
    if it has none. That balances if the members' large entries are in like places.

    Returns:
      int32 [P + 1], ascending from 0 to n. P - 1 words are added up twice, quotients
      and remainders: the sum of P cuts may be beyond int32.
    """
    xp, size = group.xp, group.size
    place = xp.arange(1, size, dtype="int32")
    # j c / P without the product, which may be beyond int32.
    number = place * (found.count // size) + place * (found.count % size) // size
    even = even_starts(group, n)[1:-1]
    own = xp.where(found.count > 0, group.take(found.indices, number), even)
    quotients, rests = group.sum((own // size, own % size))
    return _between(group, quotients + rests // size, n)


def pooled_cuts(group: Group, found: Entries, n: int) -> Vector:
    """Returns regions that split the entries of all members into P equal counts.

    By bisection: ceil(log2 (n + 1)) rounds, in each of which P - 1 counts are added up.
    """
    xp, size = group.xp, group.size
    total = group.sum(found.count)
    place = xp.arange(1, size, dtype="int32")
    wanted = place * (total // size) + place * (total % size) // size
    low = xp.zeros(size - 1, "int32")
    high = xp.full(size - 1, n, "int32")
    for _ in range(n.bit_length()):
        middle = low + (high - low) // 2
        before = xp.searchsorted(found.indices, middle).astype("int32")
        enough = group.sum(before) >= wanted
        low = xp.where(enough, low, xp.minimum(middle + 1, high))
        high = xp.where(enough, middle, high)
    return _between(group, high, n)


CUTS: dict[str, Callable[[Group, Entries, int], Vector]] = {
    "even": even_cuts,
    "mean": mean_cuts,
    "pooled": pooled_cuts,
}


def owned(group: Group, starts: Vector, number: Scalar) -> Scalar:
    """Returns where a member's region begins."""
    return group.take(starts, group.xp.asarray(number, "int32")[None])[0]


def _between(group: Group, cuts: Vector, n: int) -> Vector:
    ends = group.xp.asarray([0, n], "int32")
    return group.xp.concatenate([ends[:1], cuts.astype("int32"), ends[1:]])
