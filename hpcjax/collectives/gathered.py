"""Every member selects some entries, and all gather those of all."""

import abc
import dataclasses
import math
import statistics
from typing import Any

import jax
import numpy as np

from hpcjax.collectives.amounts import entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.exchange_config import SparseConfig
from hpcjax.collectives.gathered_config import GaussianKConfig, MsTopKConfig, TopKConfig
from hpcjax.collectives.group import (
    Entries,
    Group,
    Scalar,
    Vector,
    count_passed_on,
    select_largest,
    select_masked,
)
from hpcjax.collectives.transfers import Transfer, all_gather


@dataclasses.dataclass(frozen=True)
class Gathered(VectorMethod):
    """Gathers the selected entries of all members, and adds them up in every member."""

    config: SparseConfig

    def init(self, n: int) -> tuple[None, Scalar]:
        """Returns the states; the shared one counts averages."""
        del n
        return None, np.zeros((), np.int32)

    def run(self, group: Group, x: Vector, own: Any, shared: Scalar) -> Outcome:
        """Averages the selected entries; the others are the residual."""
        entries = self.select(group, x, shared)
        everything, counts = group.gather(entries, entries.indices.size)
        total = group.scatter(x.size, everything.indices, everything.values)
        sent, arrived = count_passed_on(group, counts)
        stats = CommStats.of(
            group,
            selected=entries.count,
            kept=group.count(group.magnitudes(total) > 0),
            sent_words=2 * sent,
            received_words=2 * arrived,
        )
        mean = total / group.xp.float32(group.size)
        rest = group.clear(x, entries.indices)
        return Outcome(mean, rest, own, shared + group.xp.int32(1), stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns gathers of k indices and values, and of the counts of entries.

        Devices gather the counts by themselves; between processes, the lengths of
        messages are the counts.
        """
        k = entries_wanted(self.config.density, n)
        return all_gather(2 * k, members), all_gather(0, members)

    @abc.abstractmethod
    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns the entries that we send."""


@dataclasses.dataclass(frozen=True)
class TopK(Gathered):
    """See `TopKConfig`."""

    config: TopKConfig

    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns exactly the k largest entries."""
        k = entries_wanted(self.config.density, x.size)
        return select_largest(group, x, group.magnitudes(x), k, k)


@dataclasses.dataclass(frozen=True)
class GaussianK(Gathered):
    """See `GaussianKConfig`."""

    config: GaussianKConfig

    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns the entries above a corrected quantile."""
        xp, config = group.xp, self.config
        k = entries_wanted(config.density, x.size)
        room = min(x.size, math.ceil(config.capacity_factor * k))
        # Of a normal distribution, half of the largest magnitudes are in each tail.
        tail = min(config.density, 1 - 1e-9) / 2
        quantile = statistics.NormalDist().inv_cdf(1 - tail)
        order = group.magnitudes(x)
        fitted = xp.mean(x) + xp.std(x) * xp.float32(quantile)
        # The standard deviation of large values overflows: then the exact threshold.
        first = group.choose(
            xp.isfinite(fitted),
            lambda: fitted.astype("float32"),
            lambda: group.number_of(group.kth(order, k)),
        )

        def reaching(threshold: Scalar) -> Scalar:
            return group.count(order >= _least_magnitude(group, threshold))

        def off(threshold: Scalar) -> Scalar:
            count = reaching(threshold)
            return (count < 0.75 * k) | (count > 1.25 * k)

        def correct(threshold: Scalar) -> Scalar:
            few = reaching(threshold) < 0.75 * k
            step = xp.float32(config.correction)
            return xp.where(few, threshold / step, threshold * step)

        used = group.repeat(config.tries, off, correct, first)
        entries = group.select(x, order, _least_magnitude(group, used), room)
        # If the buffer is too small, it should hold the largest, not the first entries.
        return group.choose(
            entries.count > room,
            lambda: select_largest(group, x, order, room, room),
            lambda: entries,
        )


@dataclasses.dataclass(frozen=True)
class MsTopK(Gathered):
    """See `MsTopKConfig`."""

    config: MsTopKConfig

    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns exactly k entries, most of them the largest, without a sort."""
        xp, n = group.xp, x.size
        k = entries_wanted(self.config.density, n)
        size = xp.abs(x)
        mean, top = xp.mean(size), xp.max(size)
        low, high = xp.float32(0), xp.float32(1)
        # Thresholds with the numbers of entries that reach them: th1 with the most
        # entries k1 <= k, and th2 with the fewest k2 > k.
        under, over = (xp.int32(0), xp.float32(np.inf)), (xp.int32(n), xp.float32(0))
        state = (low, high, *under, *over)

        def sample(state: Any) -> Any:
            low, high, k1, th1, k2, th2 = state
            ratio = (low + high) / 2
            threshold = (mean + ratio * (top - mean)).astype("float32")
            count = group.count(size >= threshold)
            fits, better = count <= k, (count <= k) & (count > k1)
            closer = (count > k) & (count < k2)
            return (
                xp.where(fits, low, ratio),
                xp.where(fits, ratio, high),
                xp.where(better, count, k1),
                xp.where(better, threshold, th1),
                xp.where(closer, count, k2),
                xp.where(closer, threshold, th2),
            )

        state = group.repeat(self.config.samples, lambda _: True, sample, state)
        _, _, k1, th1, k2, th2 = state
        # All k1 entries from th1 on, and k - k1 of the k2 - k1 between th2 and th1: a
        # run of neighbours, whose first one is drawn. Members draw different ones.
        draw = step * group.size + group.rank

        def start(key: Any) -> Any:
            return jax.random.randint(key, (), 0, xp.maximum(k2 - k, 0) + 1)

        first = group.draw(self.config.seed, draw, "run", start)
        candidates = (size >= th2) & (size < th1)
        number = xp.cumsum(candidates, dtype="int32") - 1 - first
        run = candidates & (number >= 0) & (number < k - k1)
        return select_masked(group, x, (size >= th1) | run, k)


def _least_magnitude(group: Group, threshold: Scalar) -> Scalar:
    """Returns the least magnitude that a threshold selects; zeros are never selected.

    A negative threshold, which a negative mean can give, selects all but zeros.
    """
    xp = group.xp
    order = group.magnitudes(threshold)
    return xp.where(threshold > 0, xp.maximum(order, 1), xp.int32(1))
