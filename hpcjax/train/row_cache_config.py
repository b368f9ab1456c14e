"""The config of tables in the host's memory; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, NotNegative, Positive, Size

if TYPE_CHECKING:
    from hpcjax.core.method import Method, Optimization, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowCacheConfig(Config):
    """Bagpipe: a table on the host, of which the devices have a cache.

    Attributes:
      policy: "lookahead" fetches rows before their batch comes, and keeps those that a
        later one in sight uses. Its peers: "static_hot" keeps the rows that the run
        uses most, which no real one knows, "lru" those that were used last, "none" no
        row. "partitions" moves whole ones in the order of the data set (MariusGNN).
      lookahead: batches that are looked ahead.
      prefetch: batches that are trained on while "static_hot" and "lru" fetch the rows
        of a later one; with 0 each batch waits for its own. Of "partitions" how many of
        the next state come while one is trained on.
      capacity: rows of the cache, at least the ids of a batch; None for room for the
        ids of as many batches as are looked ahead, or for the resident partitions.
      piece: rows that are moved at once; those of a partition, of "partitions".
      store: where the rows are: in "memory", or on "disk", in files in the folder
        "rows" beside the checkpoints, which are made, read and written by `piece` rows.
        A checkpoint then has the number of their state, and only the newest one can be
        gone on from. Held-out links are ranked a piece at a time.
      rate: bytes per second of the link to the table, in each direction; None for what
        the machine does. A slower one is for experiments; what validation reads does
        not go over it.
      latency: seconds of each request to it.
    """

    claims: ClassVar[tuple[str, ...]] = ("mean", "parameters")
    figures: ClassVar[Mapping[str, str]] = {
        "cache_rows": "",
        "row_bytes": "",
        "rows_fetched": "step",
        "rows_evicted": "step",
        "wait_seconds": "step",
        "plan_seconds": "step",
    }

    policy: Literal["lookahead", "static_hot", "lru", "none", "partitions"] = (
        "lookahead"
    )
    lookahead: Size = 16
    prefetch: Count = 0
    capacity: Size | None = None
    piece: Size = 1024
    store: Literal["memory", "disk"] = "memory"
    rate: Positive | None = None
    latency: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "latency is of a link, which has a rate"
        good = self.rate is not None or not self.latency
        checks.require(good, rule, rate=self.rate, latency=self.latency)
        rule = "prefetch is of static_hot, lru and partitions, which look no further"
        good = not self.prefetch or self.policy not in ("lookahead", "none")
        checks.require(good, rule, prefetch=self.prefetch, policy=self.policy)

    def build(
        self, optimizer: "Optimization", mean: Any, setup: "RunShape"
    ) -> "Method":
        """Returns the training method of a run.

        Args:
          optimizer: which leaves rows without a gradient as they are.
          mean: `mean(axes)` returns the transform that averages gradients.
          setup: the run, of a model with a parameter "table" and batches with "ids".

        Raises:
          ConfigError: another optimizer or model, a capacity below the ids of a batch
            or the resident partitions, examples in no order of partitions, on disk a
            model without `rows`, or several processes.
        """
        from hpcjax.train.cached_table import train_cached

        return train_cached(self, optimizer, mean, setup)
