"""Base configs of exchanges; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Size, Within

if TYPE_CHECKING:
    from hpcjax.collectives.exchange import Exchange, TreeExchange


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeConfig(Config):
    """Options of every method of averaging gradients; the factory takes the config.

    Attributes:
      error_feedback: adds what was not sent to the next gradient.
      dense_steps: number of first averages that are exact.
    """

    claims: ClassVar[tuple[str, ...]] = ("mean",)
    figures: ClassVar[Mapping[str, str]] = {
        "selected_entries": "step",
        "kept_entries": "step",
        "sent_words": "step",
    }

    error_feedback: bool = True
    dense_steps: Count = 0

    def make(self) -> "Exchange":
        """Returns the exchange."""
        from hpcjax.collectives.exchange import Exchange

        return Exchange(self.method(), self.error_feedback, self.dense_steps)

    def method(self) -> "TreeExchange":
        """Returns the method."""
        return self.find_factory()(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorConfig(ExchangeConfig):
    """Options of methods that average vectors.

    Attributes:
      by_leaf: averages each array of the gradients by itself, not all as one vector.
      min_size: with `by_leaf`, arrays of fewer values are averaged exactly.
    """

    by_leaf: bool = False
    min_size: Count = 0

    def method(self) -> "TreeExchange":
        """Returns the method for vectors, wrapped as one for trees."""
        from hpcjax.collectives.exchange import Flat

        return Flat(self.find_factory()(self), self.by_leaf, self.min_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig(VectorConfig):
    """Options of methods that send a share of the entries.

    Attributes:
      density: the share; k = max(1, ⌊density · n⌋) of n entries are sent.
    """

    density: Annotated[float, Within("(0, 1]")] = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(VectorConfig):
    """The exact mean, by an all-reduce.

    Attributes:
      bucket_bytes: sends the gradients in buckets of at most so many bytes, an
        all-reduce for each, so that no copy of all of them is made. None sends one
        vector. As in every exchange a check that all are finite comes first;
        `optim.all_reduce_mean` has the same option, and sends while the backward pass
        goes on.
    """

    error_feedback: bool = False
    bucket_bytes: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_bytes is not None:
            rule = "bucket_bytes sends arrays together, and by_leaf each by itself"
            checks.require(not self.by_leaf, rule, by_leaf=self.by_leaf)

    def method(self) -> "TreeExchange":
        """Returns the method, for trees where there are buckets."""
        from hpcjax.collectives.exchange import Dense, DenseBuckets, Flat

        if self.bucket_bytes is None:
            return Flat(Dense(), self.by_leaf, self.min_size)
        return DenseBuckets(self.bucket_bytes)
