"""TopkDSA: entries are added up by regions, and all that comes of it is gathered."""

import dataclasses
import math
from typing import Any

from hpcjax.collectives import regions
from hpcjax.collectives.config import TopkDsaConfig, entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Sent, Vector, largest, passed_on


@dataclasses.dataclass(frozen=True)
class TopkDsa(VectorMethod):
    """See `TopkDsaConfig`."""

    config: TopkDsaConfig

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the k largest entries of every member."""
        xp, n = group.xp, x.size
        k = entries_wanted(self.config.density, n)
        entries = largest(group, x, group.magnitudes(x), k, k)
        starts = regions.even_starts(group, n)
        slots = min(k, math.ceil(self.config.capacity_factor * k / group.size))
        split = group.exchange(entries, starts, slots)
        counts = group.all_gather(split.received.count)
        nonzeros = xp.sum(counts, dtype="int32")

        def sparse() -> tuple[Vector, Any]:
            found, _ = group.gather(split.received, split.received.indices.size)
            sent, arrived = passed_on(group, counts)
            words = _int32(xp, (2 * sent, 2 * arrived))
            return group.scatter(n, found.indices, found.values), words

        def dense() -> tuple[Vector, Any]:
            words = n - n // group.size, n - n // group.size
            return _gather_regions(group, split, starts, n), _int32(xp, words)

        # 2 words an entry against n in all: from a third on dense is as good.
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


def _gather_regions(group: Group, split: Sent, starts: Vector, n: int) -> Vector:
    """Gathers the sums as dense parts: no indices travel."""
    xp, width = group.xp, -(-n // group.size)
    begin = regions.owned(group, starts, group.rank)
    place = xp.where(split.received.indices < n, split.received.indices - begin, width)
    parts = group.all_gather(group.scatter(width, place, split.received.values))
    offset = xp.arange(width, dtype="int32")
    indices = starts[:-1, None] + offset
    real = indices < starts[1:, None]
    return group.scatter(n, xp.where(real, indices, n).reshape(-1), parts.reshape(-1))


def _int32(xp: Any, words: tuple[Any, Any]) -> tuple[Any, Any]:
    return xp.asarray(words[0], "int32"), xp.asarray(words[1], "int32")
