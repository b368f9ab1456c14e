"""Every member selects some entries, and all gather those of all."""

import abc
import dataclasses
import math
import statistics
from typing import Any

import jax
import numpy as np

from hpcjax.collectives.config import (
    GaussianKConfig,
    MsTopKConfig,
    TopKConfig,
    entries_wanted,
)
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import (
    Entries,
    Group,
    Scalar,
    Vector,
    entries_at,
    largest,
    passed_on,
)


class Gathered(VectorMethod):
    """Adds up, everywhere, what the members have selected; the rest is the residual."""

    def init(self, n: int) -> tuple[None, Scalar]:
        """Returns the states: only averages are counted."""
        del n
        return None, np.zeros((), np.int32)

    def run(self, group: Group, x: Vector, own: Any, shared: Scalar) -> Outcome:
        """Averages what is selected."""
        entries = self.select(group, x, shared)
        everything, counts = group.gather(entries, entries.indices.size)
        total = group.scatter(x.size, everything.indices, everything.values)
        sent, arrived = passed_on(group, counts)
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

    @abc.abstractmethod
    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns our entries to send."""


@dataclasses.dataclass(frozen=True)
class TopK(Gathered):
    """See `TopKConfig`."""

    config: TopKConfig

    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns exactly the k largest."""
        k = entries_wanted(self.config.density, x.size)
        return largest(group, x, group.magnitudes(x), k, k)


@dataclasses.dataclass(frozen=True)
class GaussianK(Gathered):
    """See `GaussianKConfig`."""

    config: GaussianKConfig

    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns what is above the corrected quantile."""
        xp, config = group.xp, self.config
        k = entries_wanted(config.density, x.size)
        room = min(x.size, math.ceil(config.capacity_factor * k))
        tail = min(config.density, 1 - 1e-9) / 2
        quantile = statistics.NormalDist().inv_cdf(1 - tail)
        order = group.magnitudes(x)
        fitted = xp.mean(x) + xp.std(x) * xp.float32(quantile)
        # The squares of large numbers overflow.
        first = group.choose(
            xp.isfinite(fitted),
            lambda: fitted.astype("float32"),
            lambda: group.number_of(group.kth(order, k)),
        )

        def reaching(threshold: Scalar) -> Scalar:
            return group.count(order >= _positive(group, threshold))

        def off(threshold: Scalar) -> Scalar:
            count = reaching(threshold)
            return (count < 0.75 * k) | (count > 1.25 * k)

        def corrected(threshold: Scalar) -> Scalar:
            few = reaching(threshold) < 0.75 * k
            step = xp.float32(config.correction)
            return xp.where(few, threshold / step, threshold * step)

        used = group.repeat(config.tries, off, corrected, first)
        found = group.select(x, order, _positive(group, used), room)
        # A buffer that is too small takes the largest, not the first ones.
        return group.choose(
            found.count > room,
            lambda: largest(group, x, order, room, room),
            lambda: found,
        )


@dataclasses.dataclass(frozen=True)
class MsTopK(Gathered):
    """See `MsTopKConfig`."""

    config: MsTopKConfig

    def select(self, group: Group, x: Vector, step: Scalar) -> Entries:
        """Returns exactly k, most of them the largest, without sorting."""
        xp, n = group.xp, x.size
        k = entries_wanted(self.config.density, n)
        size = xp.abs(x)
        mean, top = xp.mean(size), xp.max(size)
        low, high = xp.float32(0), xp.float32(1)
        # (entries, threshold) of most that are not above k and fewest that are.
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
        draw = step * group.size + group.rank

        def start(key: Any) -> Any:
            return jax.random.randint(key, (), 0, xp.maximum(k2 - k, 0) + 1)

        first = group.draw(self.config.seed, draw, "run", start)
        between = (size >= th2) & (size < th1)
        number = xp.cumsum(between, dtype="int32") - 1 - first
        run = between & (number >= 0) & (number < k - k1)
        return entries_at(group, x, (size >= th1) | run, k)


def _positive(group: Group, threshold: Scalar) -> Scalar:
    """Returns the magnitude to reach; zeros do not reach the least one, 1.

    A threshold below zero, as a mean can make it, lets everything through.
    """
    xp = group.xp
    order = group.magnitudes(threshold)
    return xp.where(threshold > 0, xp.maximum(order, 1), xp.int32(1))
