"""How a snapshot of sampled neighbours is kept; this module imports no JAX."""

import dataclasses
from typing import Annotated, Literal

from hpcjax.core import checks
from hpcjax.core.config import AtLeast, Config, Fraction, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullBatch(Config):
    """Every batch reads all its neighbours from the store; there is no snapshot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullRefresh(Config):
    """Neighbours are drawn from rows of a snapshot, all drawn anew at times (FCR).

    Attributes:
      alpha: width of a row over the fan-out, α.
      period: batches between refreshes, T.
      lazy: whether a row is drawn when it is first asked for, and not with all others.
        Draws are the same, so batches of a graph that stands still are equal to the
        bit.
    """

    alpha: Annotated[float, AtLeast(1.0)] = 1.5
    period: Size = 50
    lazy: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnTheFly(Config):
    """A part of a row is drawn anew, and a part of a batch may come from the store.

    With partial refresh and partial fetch the entries that a batch reads are those that
    a row keeps, in every batch.

    Attributes:
      refresh: "full" renews all rows every `period` batches, "partial" those alone that
        the batch asks for, then.
      fetch: "full" takes all neighbours from rows, "partial" a part from the store.
      alpha: width of a row over the fan-out, α.
      period: batches between refreshes, T; not used where both are partial.
      refresh_rate: share of a row ("full") or of the fan-out ("partial") that is
        renewed, γ; at least one entry is.
      fetch_rate: share of the fan-out that rows give where the refresh is full and the
        fetch partial, φ.
      fetch_period: of so many batches one reads from the store, then.
    """

    refresh: Literal["full", "partial"] = "partial"
    fetch: Literal["full", "partial"] = "full"
    alpha: Annotated[float, AtLeast(1.0)] = 1.5
    period: Size = 50
    refresh_rate: Fraction = 0.3
    fetch_rate: Fraction | None = None
    fetch_period: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"fetch_rate": self.fetch_rate, "fetch_period": self.fetch_period}
        mixed = self.refresh == "full" and self.fetch == "partial"
        rule = (
            "fetch_rate and fetch_period go with refresh=full and fetch=partial, and "
            "only with these"
        )
        right = all((each is not None) == mixed for each in given.values())
        checks.require(right, rule, **given)


Policy = FullBatch | FullRefresh | OnTheFly
