"""gTopk: members merge their k entries pair by pair, and keep k each time."""

import dataclasses
from typing import Any

from hpcjax.collectives.config import GTopkConfig, entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import (
    Entries,
    Group,
    Vector,
    is_largest,
    largest,
    packed,
)
from hpcjax.core import checks


@dataclasses.dataclass(frozen=True)
class GTopk(VectorMethod):
    """See `GTopkConfig`."""

    config: GTopkConfig

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the entries that survive all merges."""
        xp, n, size = group.xp, x.size, group.size
        power = size & (size - 1) == 0
        checks.require(power, "gTopk needs 2^m members", members=size)
        k = entries_wanted(self.config.density, n)
        entries = largest(group, x, group.magnitudes(x), k, k)
        merged, dropped = entries, []
        sent, received = xp.int32(0), xp.int32(0)
        for level in range(size.bit_length() - 1):
            step = 1 << level
            pairs = [(i, i - step) for i in range(step, size, 2 * step)]
            sends = xp.asarray([i in dict(pairs) for i in range(size)])[group.rank]
            takes = xp.asarray([i in {b for _, b in pairs} for i in range(size)])
            sent = sent + xp.where(sends, merged.count, 0)
            came = group.permute((merged.indices, merged.values), pairs)
            merged, rest, count = _merge(group, merged, *came, n=n, k=k)
            received = received + xp.where(takes[group.rank], count, 0)
            dropped.append(rest)
        indices, values = group.broadcast((merged.indices, merged.values))
        count = group.count(indices < n)
        rounds = xp.asarray(_broadcasts(size), "int32")[group.rank]
        total = group.scatter(n, indices, values)

        def survives(found: Entries) -> Vector:
            return group.magnitudes(group.take(total, found.indices)) > 0

        rest = group.clear(x, xp.where(survives(entries), entries.indices, n))
        lost = xp.int32(0)
        for found in dropped:
            # The others' entries at this index are taken from their residuals too.
            again = survives(found) & (found.indices < n)
            if self.config.exact_residual:
                back = xp.where(again, found.indices, n)
                rest = rest + group.scatter(n, back, found.values)
            else:
                lost = lost + group.count(again)
        stats = CommStats.of(
            group,
            selected=entries.count,
            kept=count,
            sent_words=2 * (sent + rounds * count),
            received_words=2 * (received + xp.where(group.rank > 0, count, 0)),
            lost=lost,
        )
        return Outcome(total / xp.float32(size), rest, own, shared, stats)


def _merge(
    group: Group, own: Entries, indices: Vector, values: Vector, *, n: int, k: int
) -> tuple[Entries, Entries, Any]:
    """Returns the k largest of the union, the rest of it, and how many came.

    A member that nobody sends to gets zeros, which are no entries.
    """
    xp = group.xp
    real = group.magnitudes(values) > 0
    indices = xp.where(real, indices, n)
    union = group.merge(
        xp.concatenate([own.indices, indices]), xp.concatenate([own.values, values]), n
    )
    chosen = is_largest(group, group.magnitudes(union.values), k)
    kept = packed(group, union, chosen, n, k)
    # A sum of zero is not chosen: who gave it keeps it.
    rest = packed(group, union, ~chosen & (union.indices < n), n, union.indices.size)
    return kept, rest, group.count(real)


def _broadcasts(size: int) -> list[int]:
    """Returns how often each member sends in a binomial tree."""
    have = [1 << level for level in range(size.bit_length() - 1)]
    return [sum(rank < h for h in have) for rank in range(size)]
