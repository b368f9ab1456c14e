"""Ok-Topk: a sparse all-reduce of at most 6k words for each member, k entries each."""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from hpcjax.collectives import regions
from hpcjax.collectives.config import OkTopkConfig, entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Entries, Group, Scalar, Vector, packed, passed_on
from hpcjax.collectives.thresholds import (
    SEARCHES,
    Correction,
    select_joint,
    select_local,
    usable,
)


class OkTopkOwn(NamedTuple):
    """What differs between members.

    Attributes:
      threshold: float32, of the next selection; 0: none yet.
      start: int32, where the region of this member begins.
    """

    threshold: Scalar
    start: Scalar


class OkTopkShared(NamedTuple):
    """What is the same for all members.

    Attributes:
      threshold: float32, of the next joint selection; 0: none yet.
      step: int32, averages made.
      crowded: bool, whether too much did not fit into the last step's buffers.
    """

    threshold: Scalar
    step: Scalar
    crowded: Scalar


class SparseSum(NamedTuple):
    """About k entries of the sum of the members' vectors.

    Attributes:
      entries: by ascending index within each member's share; the same for all.
      reached: int32, the indices of our entries that are part of it; n where a place
        holds none. `x.at[reached].set(0, mode="drop")` is what is left of x. A sum of
        which the P-th part is 0 in float32 counts as one that ours is not part of.
      state: for the next sum.
      stats: what was done.
    """

    entries: Entries
    reached: Vector
    state: tuple[OkTopkOwn, OkTopkShared]
    stats: CommStats


def sparse_all_reduce(
    group: Group,
    x: Vector,
    config: OkTopkConfig,
    state: tuple[OkTopkOwn, OkTopkShared] | None = None,
) -> SparseSum:
    """Adds up the entries that are largest in the sum: Ok-Topk's collective alone.

    Nothing is remembered of x: `config.make()` adds error feedback, the check of what
    is not finite, and trees. All members call this with vectors of one length.

    Args:
      group: the members.
      x: ours, float32 [n]; finite.
      config: density, thresholds, regions; what it says of trees, residuals and dense
        steps does not matter here.
      state: what the last sum of vectors of this length returned; None for the first
        one. Its first part differs between members.

    Raises:
      TypeError: x is not a float32 vector.

    Examples:
      >>> import jax.numpy as jnp
      >>> from hpcjax.collectives import MeshGroup, OkTopkConfig, sparse_all_reduce
      >>> x = jnp.array([0.0, 3.0, 1.0, -2.0])
      >>> made = sparse_all_reduce(MeshGroup(None), x, OkTopkConfig(density=0.5))
      >>> made.entries.indices[:2].tolist(), made.entries.values[:2].tolist()
      ([1, 3], [3.0, -2.0])
    """
    if x.ndim != 1 or x.dtype != "float32":
        raise TypeError(f"x must be float32 [n]: got {x.dtype}{list(x.shape)}")
    method = OkTopk(config)
    own, shared = state or jax.tree.map(group.xp.asarray, method.init(x.size))
    return method.sum(group, x, own, shared)[0]


@dataclasses.dataclass(frozen=True)
class OkTopk(VectorMethod):
    """See `OkTopkConfig`."""

    config: OkTopkConfig

    def init(self, n: int) -> tuple[OkTopkOwn, OkTopkShared]:
        """Returns the states before the first average."""
        real, whole = np.zeros((), np.float32), np.zeros((), np.int32)
        return OkTopkOwn(real, whole), OkTopkShared(real, whole, np.zeros((), bool))

    def run(
        self, group: Group, x: Vector, own: OkTopkOwn, shared: OkTopkShared
    ) -> Outcome:
        """Averages the entries that are largest in the sum."""
        made, mean = self.sum(group, x, own, shared)
        return Outcome(mean, group.clear(x, made.reached), *made.state, made.stats)

    def sum(
        self, group: Group, x: Vector, own: OkTopkOwn, shared: OkTopkShared
    ) -> tuple[SparseSum, Vector]:
        """Returns what `sparse_all_reduce` does, and the mean as a vector."""
        config, n = self.config, x.size
        k = entries_wanted(config.density, n)
        room = min(n, math.ceil(config.capacity_factor * k))
        limit = k if config.strict_volume else room
        least = math.floor(k / config.capacity_factor)
        old = group.all_gather(own.start)
        # After a change of the number of members nobody has a region, nor a threshold,
        # and that of sums over other members means nothing.
        fresh = old[-1] == 0 if group.size > 1 else ~usable(group, own.threshold)
        due = (shared.step % config.tau_prime == 0) | fresh

        rule = Correction(*config.local_correction)
        local = select_local(
            group, x, k, own.threshold, due, least=least, limit=limit, correction=rule
        )
        new = (shared.step % config.tau == 0) | shared.crowded | fresh
        starts = self._starts(group, local.entries, old, new, n)
        slots = min(limit, math.ceil(config.capacity_factor * k / group.size))
        split = group.exchange(local.entries, starts, slots)
        joint = select_joint(
            group,
            split.received,
            n,
            k,
            shared.threshold,
            due,
            least=least,
            limit=limit,
            correction=Correction(*config.joint_correction),
            search=SEARCHES[config.global_threshold],
        )
        shares = self._balanced(group, joint.entries, joint.counts, n, room)
        everything, counts = group.gather(shares.entries, shares.entries.indices.size)
        passed, came = passed_on(group, counts)

        mean, reached = _reached(group, everything, local.entries, split.taken, n)
        missed = group.count(~split.taken & (local.entries.indices < n))
        crowded = shared.crowded
        if group.padded:
            full, found = group.sum((missed, local.entries.count))
            crowded = full > found // 20
        sent = split.sent + joint.sent + shares.sent + passed
        arrived = split.arrived + joint.arrived + shares.arrived + came
        stats = CommStats.of(
            group,
            selected=local.entries.count,
            kept=everything.count,
            sent_words=2 * sent,
            received_words=2 * arrived,
            summed=split.arrived,
            overflow=local.overflow + joint.overflow + missed,
        )
        state = (
            OkTopkOwn(local.threshold, regions.owned(group, starts, group.rank)),
            OkTopkShared(joint.threshold, shared.step + 1, crowded),
        )
        return SparseSum(everything, reached, state, stats), mean

    def _starts(
        self, group: Group, found: Entries, old: Vector, due: Scalar, n: int
    ) -> Vector:
        """Returns the regions: those of the last step, or new ones when due."""
        if group.size == 1:
            return regions.even_starts(group, n)
        make = regions.CUTS[self.config.repartition]
        ends = group.xp.asarray([n], "int32")
        return group.cond(
            due,
            lambda: make(group, found, n),
            lambda: group.xp.concatenate([old, ends]),
        )

    def _balanced(
        self, group: Group, found: Entries, counts: Vector, n: int, room: int
    ) -> "_Shares":
        """Spreads survivors over members where one has far more than others.

        Padded buffers need it as soon as one member has more than its share of the
        room, messages only where it pays: from four times the average on.
        """
        xp, share = group.xp, -(-room // group.size)
        most, total = xp.max(counts), xp.sum(counts, dtype="int32")

        def kept() -> _Shares:
            room_here = found.indices.size if self.config.balance == "never" else share
            own = packed(group, found, found.indices < n, n, room_here)
            return _Shares(own, xp.int32(0), xp.int32(0))

        def spread() -> _Shares:
            entries = group.balance(found, counts, share, n)
            member = xp.arange(group.size, dtype="int32")
            sizes = total // group.size + (member < total % group.size)
            stays = _overlap(group, counts, sizes)
            return _Shares(entries, found.count - stays, entries.count - stays)

        if group.size == 1 or self.config.balance == "never":
            return kept()
        if self.config.balance == "always":
            return spread()
        far = most > share if group.padded else most * group.size > 4 * total
        return group.cond(far, spread, kept)


class _Shares(NamedTuple):
    """Survivors as they are gathered.

    Attributes:
      entries: ours.
      sent: entries that went to others for it.
      arrived: entries that came.
    """

    entries: Entries
    sent: Scalar
    arrived: Scalar


def _reached(
    group: Group, everything: Entries, own: Entries, taken: Vector, n: int
) -> tuple[Vector, Vector]:
    """Returns the mean, and the indices of what of ours is in it; else n."""
    shares = everything.values / group.xp.float32(group.size)
    mean = group.scatter(n, everything.indices, shares)
    reached = group.magnitudes(group.take(mean, own.indices)) > 0
    return mean, group.xp.where(taken & reached, own.indices, n)


def _overlap(group: Group, counts: Vector, sizes: Vector) -> Scalar:
    """Returns how many of our entries are in our share before anything is sent."""
    xp, rank = group.xp, group.rank
    ends, new = xp.cumsum(counts, dtype="int32"), xp.cumsum(sizes, dtype="int32")
    first = xp.maximum(ends[rank] - counts[rank], new[rank] - sizes[rank])
    return xp.maximum(xp.minimum(ends[rank], new[rank]) - first, 0).astype("int32")
