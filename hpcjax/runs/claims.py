"""What a table must show: bounds on its numbers, what must break them, and a floor."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import xarray as xr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
    """A negative control: the table that a broken variant would have made.

    Attributes:
      rows: `{row: other row}`, whose cells are put in its place.
      columns: `{column: other column}`, likewise.
      only: the columns whose cells other rows give; all if empty.
    """

    rows: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Returns whose cells are put in the place of others."""
        return ", ".join(
            map(str, dict.fromkeys([*self.rows.values(), *self.columns.values()]))
        )

    def apply(self, table: "xr.Dataset") -> "xr.Dataset":
        """Returns the table with the cells of others; KeyError if it lacks them."""
        table = table.assign({to: table[name] for to, name in self.columns.items()})
        if not self.rows:
            return table
        table["row"].sel(row=list(self.rows))
        names = [self.rows.get(row, row) for row in table["row"].values.tolist()]
        other = table.sel(row=names).assign_coords(row=table["row"])
        return table.assign({name: other[name] for name in self.only or other})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the paper, as a bound on a number of ours.

    Attributes:
      relation: the paper's statement in words.
      ours: computes our number from the assembled table.
      at_most: the claim holds when the number is at most this; or
      at_least: when it is at least this.
      controls: on none of whose tables the bound may hold, or it would say nothing.
    """

    relation: str
    ours: Callable[["xr.Dataset"], float]
    at_most: float | None = None
    at_least: float | None = None
    controls: tuple[Control, ...] = ()

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ConfigError(
                f"claim {self.relation!r} needs exactly one of at_most and at_least"
            )

    def fails(
        self,
        *rows: Mapping[Any, Any],
        columns: Mapping[str, str] | None = None,
        only: tuple[str, ...] = (),
    ) -> "Claim":
        """Returns the claim with further negative controls, one of each `rows`.

        Examples:
          `claim.fails({"jorge": "sgd"}, {"jorge": "constant"})` must not hold if Jorge
          does what SGD does, nor if it does what no optimizer does; see `Control`.
        """
        more = [
            Control(rows=each, columns=columns or {}, only=only)
            for each in rows or [{}]
        ]
        return dataclasses.replace(self, controls=(*self.controls, *more))

    @property
    def bound(self) -> str:
        """The bound in print, such as `≤ 0.85`."""
        return (
            f"≤ {self.at_most:g}"
            if self.at_most is not None
            else f"≥ {self.at_least:g}"
        )

    def holds(self, value: float) -> bool:
        """Returns whether `value` satisfies the bound; NaN never does."""
        if math.isnan(value):
            return False
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is not None and value >= self.at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trivial:
    """Rows of methods without the idea; a peer that is worse has not learned.

    Attributes:
      rows: their names.
      by: the column that tells how good a row is: the less the better.
      largest: the more the better.
      peers: rows of others' methods, whose claims fail where they have not learned.
    """

    rows: tuple[str, ...]
    by: str
    largest: bool = False
    peers: tuple[str, ...] = ()

    def find_strongest(self, table: "xr.Dataset") -> str | None:
        """Returns the best of the trivial rows; None if the table lacks one's cell."""
        cells = self._lower_is_better(table, self.rows)
        return None if np.isnan(cells).any() else self.rows[int(np.argmin(cells))]

    def find_unlearned(self, table: "xr.Dataset") -> tuple[str, ...]:
        """Returns the peers that are not known to be as good as any trivial row."""
        least = np.min(self._lower_is_better(table, self.rows))
        cells = self._lower_is_better(table, self.peers)
        return tuple(
            peer
            for peer, cell in zip(self.peers, cells, strict=True)
            if not cell <= least
        )

    def _lower_is_better(
        self, table: "xr.Dataset", rows: tuple[str, ...]
    ) -> np.ndarray:
        if self.by not in table:  # as in a record of older code
            return np.full(len(rows), np.nan)
        cells = table[self.by].reindex(row=list(rows)).values.astype(float)
        return -cells if self.largest else cells
