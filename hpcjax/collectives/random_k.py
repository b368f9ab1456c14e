"""Random-k: averages entries at random places, the same for all members."""

import dataclasses
from typing import Any

import jax
import numpy as np

from hpcjax.collectives.amounts import entries_wanted
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Scalar, Vector
from hpcjax.collectives.random_k_config import RandomKConfig
from hpcjax.collectives.transfers import Transfer, all_reduce


@dataclasses.dataclass(frozen=True)
class RandomK(VectorMethod):
    """See `RandomKConfig`."""

    config: RandomKConfig

    def init(self, n: int) -> tuple[None, Scalar]:
        """Returns the states; the shared one counts averages."""
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
        words = self.words(n, group.size)
        stats = CommStats.of(
            group, selected=k, kept=k, sent_words=words, received_words=words
        )
        rest = group.clear(x, indices)
        return Outcome(mean, rest, own, shared + group.xp.int32(1), stats)

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns an all-reduce of k values; indices need not be sent."""
        return (all_reduce(entries_wanted(self.config.density, n), members),)
