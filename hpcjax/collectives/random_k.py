"""Random entries, at the same places everywhere."""

import dataclasses
from typing import Any

import jax
import numpy as np

from hpcjax.collectives.config import RandomKConfig, dense_words, entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Scalar, Vector


@dataclasses.dataclass(frozen=True)
class RandomK(VectorMethod):
    """See `RandomKConfig`."""

    config: RandomKConfig

    def init(self, n: int) -> tuple[None, Scalar]:
        """Returns the states: only averages are counted."""
        del n
        return None, np.zeros((), np.int32)

    def run(self, group: Group, x: Vector, own: Any, shared: Scalar) -> Outcome:
        """Averages the drawn entries."""
        n, k = x.size, entries_wanted(self.config.density, x.size)

        def places(key: Any) -> Any:
            return jax.random.choice(key, n, (k,), replace=False).astype("int32")

        indices = group.draw(self.config.seed, shared, "places", places)
        total = group.sum(group.take(x, indices))
        mean = group.scatter(n, indices, total) / group.xp.float32(group.size)
        words = dense_words(k, group.size)
        stats = CommStats.of(
            group, selected=k, kept=k, sent_words=words, received_words=words
        )
        rest = group.clear(x, indices)
        return Outcome(mean, rest, own, shared + group.xp.int32(1), stats)
