"""gTopk: pairs of members merge their k entries and keep k, along a binary tree."""

import dataclasses
from typing import Any

from hpcjax.collectives.amounts import entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import (
    Entries,
    Group,
    Vector,
    keep_entries,
    mask_largest,
    select_largest,
)
from hpcjax.collectives.gtopk_config import GTopkConfig
from hpcjax.collectives.transfers import Transfer
from hpcjax.core import checks


@dataclasses.dataclass(frozen=True)
class GTopk(VectorMethod):
    """See `GTopkConfig`."""

    config: GTopkConfig

    def check_members(self, members: int) -> None:
        """Raises ConfigError unless the members are a power of two."""
        _levels(members)

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the entries that survive all merges."""
        xp, n, size = group.xp, x.size, group.size
        k = entries_wanted(self.config.density, n)
        entries = select_largest(group, x, group.magnitudes(x), k, k)
        merged, dropped = entries, []
        sent, received = xp.int32(0), xp.int32(0)
        for level in range(_levels(size)):
            step = 1 << level
            pairs = [(i, i - step) for i in range(step, size, 2 * step)]
            sends = xp.asarray([i in dict(pairs) for i in range(size)])[group.rank]
            receives = xp.asarray([i in {b for _, b in pairs} for i in range(size)])
            sent = sent + xp.where(sends, merged.count, 0)
            other = group.permute((merged.indices, merged.values), pairs)
            merged, rest, count = _merge(group, merged, *other, n=n, k=k)
            received = received + xp.where(receives[group.rank], count, 0)
            dropped.append(rest)
        # After log2 P merges, member 0 has the entries of all.
        indices, values = group.broadcast((merged.indices, merged.values))
        count = group.count(indices < n)
        rounds = xp.asarray(_broadcasts(size), "int32")[group.rank]
        total = group.scatter(n, indices, values)

        def survives(candidates: Entries) -> Vector:
            return group.magnitudes(group.take(total, candidates.indices)) > 0

        rest = group.clear(x, xp.where(survives(entries), entries.indices, n))
        lost = xp.int32(0)
        for entries_dropped in dropped:
            # A partial sum that this member dropped, at an index that survives by
            # another branch of the tree. Its summands are cleared from the residuals of
            # all members below, though they are not in the result: they are lost,
            # unless this member keeps them.
            surviving = survives(entries_dropped) & (entries_dropped.indices < n)
            if self.config.exact_residual:
                back = xp.where(surviving, entries_dropped.indices, n)
                rest = rest + group.scatter(n, back, entries_dropped.values)
            else:
                lost = lost + group.count(surviving)
        stats = CommStats.of(
            group,
            selected=entries.count,
            kept=count,
            sent_words=2 * (sent + rounds * count),
            received_words=2 * (received + xp.where(group.rank > 0, count, 0)),
            lost=lost,
        )
        return Outcome(total / xp.float32(size), rest, own, shared, stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns log2 P merges and as many rounds of the broadcast, k entries each.

        They follow one another: member 0 receives in all merges and sends in all rounds
        of the broadcast. No member sends more than it, log2 P times k entries.
        """
        rounds = 2 * _levels(members)
        k = entries_wanted(self.config.density, n)
        return (Transfer(2 * k * rounds, messages=rounds),)


def _levels(members: int) -> int:
    """Returns log2 P."""
    power = members & (members - 1) == 0
    checks.require(power, "gTopk needs 2^m members", members=members)
    return members.bit_length() - 1


def _merge(
    group: Group, own: Entries, indices: Vector, values: Vector, *, n: int, k: int
) -> tuple[Entries, Entries, Any]:
    """Merges our entries with those of another member.

    Returns:
      The k largest sums, all other sums, and the number of the other's entries.
    """
    xp = group.xp
    # A member that is no target received zeros, which are not entries.
    real = group.magnitudes(values) > 0
    indices = xp.where(real, indices, n)
    union = group.merge(
        xp.concatenate([own.indices, indices]), xp.concatenate([own.values, values]), n
    )
    chosen = mask_largest(group, group.magnitudes(union.values), k)
    kept = keep_entries(group, union, chosen, n, k)
    # A sum of zero is never chosen; it does not survive, and stays in the residuals.
    rest = keep_entries(
        group, union, ~chosen & (union.indices < n), n, union.indices.size
    )
    return kept, rest, group.count(real)


def _broadcasts(size: int) -> list[int]:
    """Returns how often each member sends in a broadcast along a binomial tree."""
    have = [1 << level for level in range(_levels(size))]
    return [sum(rank < h for h in have) for rank in range(size)]
