"""Parts of a graph as examples, of which a batch has all."""

from typing import Any

import numpy as np

from hpcjax.core import checks
from hpcjax.data.pipeline import check_number, shard_rows
from hpcjax.data.source import Batch, check_indices


class PartSource:
    """Parts of a graph in their order, of which some vertices are scored.

    Every batch of training is all of them, so that a device has the same ones in each.

    Args:
      cut: a `graphs.PartitionedGraph`.
      features: of all vertices.
      labels: of all vertices.
      numbers: of the vertices that are scored.
    """

    def __init__(
        self, cut: Any, features: np.ndarray, labels: np.ndarray, numbers: np.ndarray
    ) -> None:
        scored = np.bincount(numbers, minlength=len(labels)).astype(np.float32)
        x = {"features": cut.take(np.asarray(features, np.float32))}
        self._all = {"x": x, "y": cut.take(labels), "scored": cut.take(scored)}

    def __len__(self) -> int:
        """Returns the number of parts."""
        return len(self._all["y"])

    def gather(self, indices: np.ndarray) -> Batch:
        """Returns parts by number.

        Returns:
          "x" with "features", float32 [batch, rows, features]; "y", classes, int32
          [batch, rows]; and "scored", float32 [batch, rows], 0 for what is not.
        """
        check_indices(indices, len(self))
        x = {"features": self._all["x"]["features"][indices]}
        rest = {name: self._all[name][indices] for name in ("y", "scored")}
        return {"x": x, **rest}

    def sample(
        self, number: int, batch_size: int, seed: int, shard: tuple[int, int]
    ) -> Batch:
        """Returns the shard's parts, the same in every batch.

        Raises:
          ConfigError: a batch that is not all parts.
        """
        del seed
        check_number(number)
        rule = f"a batch must be all {len(self)} parts of the graph"
        checks.require(batch_size == len(self), rule, batch_size=batch_size)
        return self.gather(np.arange(batch_size)[shard_rows(batch_size, shard)])
