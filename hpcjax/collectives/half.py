"""The average of all numbers at half precision."""

import dataclasses
from typing import Any

from hpcjax.collectives.config import dense_words
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Vector

_LARGEST = 65504.0  # of float16


@dataclasses.dataclass(frozen=True)
class Half(VectorMethod):
    """See `HalfConfig`."""

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the vector; shares are sent, so that sums do not overflow."""
        xp, size = group.xp, group.xp.float32(group.size)
        share = (xp.clip(x, -_LARGEST, _LARGEST) / size).astype("float16")
        # Shares that were rounded up can add up to more than the largest number.
        mean = xp.clip(group.sum(share).astype("float32"), -_LARGEST, _LARGEST)
        words = dense_words(x.size, group.size) / 2
        stats = CommStats.of(
            group, selected=x.size, kept=x.size, sent_words=words, received_words=words
        )
        rest = x - share.astype("float32") * size
        return Outcome(mean, rest, own, shared, stats)
