"""Ok-Topk: a sparse all-reduce in which a member sends at most 6k words.

Entries are summed by region, each by one member (split and reduce); about k of all sums
are selected, balanced over members, and gathered.

References:
  Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
  2022.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import numpy as np

from hpcjax.collectives import regions
from hpcjax.collectives.amounts import entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import (
    Entries,
    Group,
    Scalar,
    Vector,
    count_passed_on,
    keep_entries,
)
from hpcjax.collectives.ok_topk_config import OkTopkConfig
from hpcjax.collectives.thresholds import (
    SEARCHES,
    Correction,
    is_usable,
    select_joint,
    select_local,
)
from hpcjax.collectives.transfers import Transfer, between


class OkTopkOwn(NamedTuple):
    """State that differs between members.

    Attributes:
      threshold: float32, for the next local selection; 0: none yet.
      start: int32, the boundary at which the region of this member begins.
    """

    threshold: Scalar
    start: Scalar


class OkTopkShared(NamedTuple):
    """State that is the same for all members.

    Attributes:
      threshold: float32, for the next joint selection; 0: none yet.
      step: int32, number of averages so far.
      crowded: bool, whether too many entries did not fit into the last step's buffers.
    """

    threshold: Scalar
    step: Scalar
    crowded: Scalar


class SparseSum(NamedTuple):
    """About k entries of the sum of the members' vectors.

    Attributes:
      entries: the same for all members; in ascending order within each member's share.
      reached: int32, indices of our entries that are part of the sum, padded with n.
        `x.at[reached].set(0, mode="drop")` is the rest of x. Our entry is not counted
        as part of a sum that becomes 0 in float32 when divided by P.
      state: for the next sum.
      stats: counts of this step.
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
    """Returns the largest entries of the sum of vectors: Ok-Topk's collective alone.

    For error feedback, a check for non-finite values, and trees, use `config.make()`.
    All members must call this, with vectors of one length.

    Args:
      group: the members.
      x: ours, float32 [n], finite.
      config: density, thresholds and regions; its options for trees, residuals and
        dense steps are ignored.
      state: as returned for the last vectors of this length; None for the first ones.
        Its first part differs between members.

    Raises:
      TypeError: x is not a float32 vector.

    Examples:
      >>> import jax.numpy as jnp
      >>> from hpcjax.collectives import MeshGroup, OkTopkConfig, sparse_all_reduce
      >>> x = jnp.array([0.0, 3.0, 1.0, -2.0])
      >>> total = sparse_all_reduce(MeshGroup(None), x, OkTopkConfig(density=0.5))
      >>> total.entries.indices[:2].tolist(), total.entries.values[:2].tolist()
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
        """Returns the states in front of the first average."""
        real, whole = np.zeros((), np.float32), np.zeros((), np.int32)
        return OkTopkOwn(real, whole), OkTopkShared(real, whole, np.zeros((), bool))

    def run(
        self, group: Group, x: Vector, own: OkTopkOwn, shared: OkTopkShared
    ) -> Outcome:
        """Averages the entries that are largest in the sum."""
        total, mean = self.sum(group, x, own, shared)
        return Outcome(mean, group.clear(x, total.reached), *total.state, total.stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns what a member sends if it selects k entries and k survive jointly.

        An entry is two words. Gathering the k survivors, a member sends (P − 1) / P of
        them. At best that is all: the entries of each member are in its own region. At
        worst, as many entries go to the owners of regions before, because regions split
        a member's entries evenly, and as many survivors are moved to balance them,
        because all are in one region. The exchanges with owners and for balance take P
        messages each, and the gathers 2 log2 P.
        """
        part = entries_wanted(self.config.density, n) * (members - 1) / members
        words = between(2 * part, 6 * part, place)
        return (Transfer(words, messages=2 * members + 2 * math.log2(members)),)

    def sum(
        self, group: Group, x: Vector, own: OkTopkOwn, shared: OkTopkShared
    ) -> tuple[SparseSum, Vector]:
        """Returns what `sparse_all_reduce` does, and the mean as a vector."""
        config, n = self.config, x.size
        k = entries_wanted(config.density, n)
        room = min(n, math.ceil(config.capacity_factor * k))
        limit = k if config.strict_volume else room
        least = math.floor(k / config.capacity_factor)
        # Every member knows where its own region begins; all of them need all.
        old = group.all_gather(own.start)
        # In the first step, and after a change of the number of members, `own` is zero.
        # Then there are no regions, and no threshold of sums over these members.
        fresh = old[-1] == 0 if group.size > 1 else ~is_usable(group, own.threshold)
        due = (shared.step % config.tau_prime == 0) | fresh

        # Split and reduce: about k of our largest entries go to the owners of their
        # regions, which add up entries with the same index.
        rule = Correction(*config.local_correction)
        local = select_local(
            group, x, k, own.threshold, due, least=least, limit=limit, correction=rule
        )
        new = (shared.step % config.tau == 0) | shared.crowded | fresh
        starts = self._choose_regions(group, local.entries, old, new, n)
        slots = min(limit, math.ceil(config.capacity_factor * k / group.size))
        split = group.exchange(local.entries, starts, slots)
        # About k of all sums survive. Each is in one member, the owner of its region.
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
        # The time of a gather is that of its largest contribution, hence the balance.
        shares = self._balance(group, joint.entries, joint.counts, n, room)
        everything, counts = group.gather(shares.entries, shares.entries.indices.size)
        passed, received = count_passed_on(group, counts)

        mean, reached = _find_reached(group, everything, local.entries, split.taken, n)
        missed = group.count(~split.taken & (local.entries.indices < n))
        crowded = shared.crowded
        if group.padded:
            # The next step chooses new regions if 5 % of all entries did not fit into
            # the buffers.
            # After the gather: nothing else of this step says which comes first.
            late = group.after((missed, local.entries.count), everything)
            all_missed, selected = group.sum(late)
            crowded = all_missed > selected // 20
        sent = split.sent + joint.sent + shares.sent + passed
        arrived = split.arrived + joint.arrived + shares.arrived + received
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
            OkTopkOwn(local.threshold, regions.region_start(group, starts, group.rank)),
            OkTopkShared(joint.threshold, shared.step + 1, crowded),
        )
        return SparseSum(everything, reached, state, stats), mean

    def _choose_regions(
        self, group: Group, entries: Entries, old: Vector, due: Scalar, n: int
    ) -> Vector:
        """Returns the regions of the last step, or new ones if `due`."""
        if group.size == 1:
            return regions.even_starts(group, n)
        make = regions.CUTS[self.config.repartition]
        ends = group.xp.asarray([n], "int32")
        return group.cond(
            due,
            lambda: make(group, entries, n),
            lambda: group.xp.concatenate([old, ends]),
        )

    def _balance(
        self, group: Group, entries: Entries, counts: Vector, n: int, room: int
    ) -> "_Shares":
        """Redistributes survivors if one member has far more of them than others.

        Padded buffers have `room` / P places, so that they need it once a member has
        more. Messages of any length are balanced only where it pays: if a member has
        more than four times the average.
        """
        xp, share = group.xp, -(-room // group.size)
        most, total = xp.max(counts), xp.sum(counts, dtype="int32")

        def keep_shares() -> _Shares:
            never = self.config.balance == "never"
            own_room = entries.indices.size if never else share
            own = keep_entries(group, entries, entries.indices < n, n, own_room)
            return _Shares(own, xp.int32(0), xp.int32(0))

        def redistribute() -> _Shares:
            balanced = group.balance(entries, counts, share, n)
            member = xp.arange(group.size, dtype="int32")
            sizes = total // group.size + (member < total % group.size)
            stays = _overlap(group, counts, sizes)
            return _Shares(balanced, entries.count - stays, balanced.count - stays)

        if group.size == 1 or self.config.balance == "never":
            return keep_shares()
        if self.config.balance == "always":
            return redistribute()
        uneven = most > share if group.padded else most * group.size > 4 * total
        return group.cond(uneven, redistribute, keep_shares)


class _Shares(NamedTuple):
    """Survivors as a member contributes them to the gather.

    Attributes:
      entries: ours.
      sent: number of entries that went to other members for balance.
      arrived: number of entries that came from other members for balance.
    """

    entries: Entries
    sent: Scalar
    arrived: Scalar


def _find_reached(
    group: Group, everything: Entries, own: Entries, taken: Vector, n: int
) -> tuple[Vector, Vector]:
    """Returns the mean, and the indices of our entries in it, padded with n."""
    shares = everything.values / group.xp.float32(group.size)
    mean = group.scatter(n, everything.indices, shares)
    reached = group.magnitudes(group.take(mean, own.indices)) > 0
    return mean, group.xp.where(taken & reached, own.indices, n)


def _overlap(group: Group, counts: Vector, sizes: Vector) -> Scalar:
    """Returns how many of our entries are in our own new share, and are not sent."""
    # The overlap of two intervals of entry numbers: ours before and after.
    xp, rank = group.xp, group.rank
    ends, new = xp.cumsum(counts, dtype="int32"), xp.cumsum(sizes, dtype="int32")
    first = xp.maximum(ends[rank] - counts[rank], new[rank] - sizes[rank])
    return xp.maximum(xp.minimum(ends[rank], new[rank]) - first, 0).astype("int32")
