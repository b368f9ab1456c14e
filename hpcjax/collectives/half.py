"""The average of all values in float16."""

import dataclasses
from typing import Any

from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Vector
from hpcjax.collectives.half_config import HalfConfig
from hpcjax.collectives.transfers import Transfer, all_reduce

_LARGEST = 65504.0  # of float16


@dataclasses.dataclass(frozen=True)
class Half(VectorMethod):
    """See `HalfConfig`."""

    config: HalfConfig = HalfConfig()

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the vector."""
        xp, size = group.xp, group.xp.float32(group.size)
        # x / P is summed, since a sum of x could overflow float16.
        share = (xp.clip(x, -_LARGEST, _LARGEST) / size).astype("float16")
        # P shares that were rounded up may still add up to more than the largest value.
        mean = xp.clip(group.sum(share).astype("float32"), -_LARGEST, _LARGEST)
        words = self.words(x.size, group.size)
        stats = CommStats.of(
            group, selected=x.size, kept=x.size, sent_words=words, received_words=words
        )
        rest = x - share.astype("float32") * size
        return Outcome(mean, rest, own, shared, stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        return (all_reduce(n / 2, members),)  # two halves in a word
