"""TopkDSA: entries are added up by region, each by one member, and all sums gathered.

DSA stands for dynamic sparse all-reduce: if the sums have become dense, they are
gathered without indices.
"""

import dataclasses
import math
from typing import Any

from hpcjax.collectives import regions
from hpcjax.collectives.amounts import entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import (
    Group,
    Sent,
    Vector,
    count_passed_on,
    select_largest,
)
from hpcjax.collectives.topk_dsa_config import TopkDsaConfig
from hpcjax.collectives.transfers import Transfer, between


@dataclasses.dataclass(frozen=True)
class TopkDsa(VectorMethod):
    """See `TopkDsaConfig`."""

    config: TopkDsaConfig

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the k largest entries of every member."""
        xp, n = group.xp, x.size
        k = entries_wanted(self.config.density, n)
        entries = select_largest(group, x, group.magnitudes(x), k, k)
        starts = regions.even_starts(group, n)
        slots = min(k, math.ceil(self.config.capacity_factor * k / group.size))
        split = group.exchange(entries, starts, slots)
        counts = group.all_gather(split.received.count)
        nonzeros = xp.sum(counts, dtype="int32")

        def sparse() -> tuple[Vector, Any]:
            sums, _ = group.gather(split.received, split.received.indices.size)
            sent, arrived = count_passed_on(group, counts)
            words = _int32(xp, (2 * sent, 2 * arrived))
            return group.scatter(n, sums.indices, sums.values), words

        def dense() -> tuple[Vector, Any]:
            words = n - n // group.size, n - n // group.size
            return _gather_regions(group, split, starts, n), _int32(xp, words)

        # The condition of the released code, 2 · nonzeros ≥ 2 n / 3. Sums with indices
        # are two words each, dense ones n words in all.
        total, (sent, received) = group.cond(3 * nonzeros >= n, dense, sparse)
        taken = xp.where(split.taken, entries.indices, n)
        stats = CommStats.of(
            group,
            selected=entries.count,
            kept=nonzeros,
            sent_words=2 * split.sent + sent,
            received_words=2 * split.arrived + received,
            summed=split.arrived,
            overflow=entries.count - group.count(split.taken),
        )
        mean = total / xp.float32(group.size)
        return Outcome(mean, group.clear(x, taken), own, shared, stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns what a member sends if 1 / P of its entries is in each region.

        (P − 1) / P of its k entries go to the owners of regions. At least, all members
        have selected the same k places, and as many sums are gathered. At most, the
        sums fill a third of the vector, and n words without indices are gathered. They
        always do for k ≥ n / 3, and never for k P < n / 3, where the most is a bound
        that is not reached. P messages go to owners one by one, and the two gathers
        take 2 log2 P.
        """
        # Entries to owners: 2 k words times the share that goes to others.
        k = entries_wanted(self.config.density, n)
        share = (members - 1) / members
        most = share * (2 * k + n)
        least = most if 3 * k >= n else share * 4 * k
        messages = members + 2 * math.log2(members)
        return (Transfer(between(least, most, place), messages=messages),)


def _gather_regions(group: Group, split: Sent, starts: Vector, n: int) -> Vector:
    """Gathers the sums of regions as dense vectors, without indices."""
    xp, width = group.xp, -(-n // group.size)
    begin = regions.region_start(group, starts, group.rank)
    place = xp.where(split.received.indices < n, split.received.indices - begin, width)
    parts = group.all_gather(group.scatter(width, place, split.received.values))
    # Regions differ in length by one: parts are padded to `width`, and the padding gets
    # index n, at which `scatter` adds nothing.
    offset = xp.arange(width, dtype="int32")
    indices = starts[:-1, None] + offset
    real = indices < starts[1:, None]
    return group.scatter(n, xp.where(real, indices, n).reshape(-1), parts.reshape(-1))


def _int32(xp: Any, words: tuple[Any, Any]) -> tuple[Any, Any]:
    return xp.asarray(words[0], "int32"), xp.asarray(words[1], "int32")
