"""A paper's tables: which runs make one, how it is read off them, what it must show.

A `Table` is registered by being a module-level object of an experiment's `tables.py`.
Its claims are numbers with bounds, computed from the assembled dataset; a claim whose
number is missing or NaN has failed.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import xarray as xr

from hpcjax.core.errors import ConfigError, nearest

TierName = Literal["cpu", "gpu", "model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One relation of the paper, as a number of ours and its bound.

    Attributes:
      relation: the paper's statement in words.
      ours: reads our number off the assembled table.
      at_most: the claim holds when the number is at most this; or
      at_least: when it is at least this.
    """

    relation: str
    ours: Callable[[xr.Dataset], float]
    at_most: float | None = None
    at_least: float | None = None

    def __post_init__(self) -> None:
        if (self.at_most is None) == (self.at_least is None):
            raise ConfigError(
                f"claim {self.relation!r} needs exactly one of at_most and at_least"
            )

    @property
    def bound(self) -> str:
        """The bound in print, such as `≤ 0.85`."""
        return (
            f"≤ {self.at_most:g}"
            if self.at_most is not None
            else f"≥ {self.at_least:g}"
        )

    def holds(self, value: float) -> bool:
        """Says whether `value` satisfies the bound; NaN never does."""
        if math.isnan(value):
            return False
        if self.at_most is not None:
            return value <= self.at_most
        return self.at_least is not None and value >= self.at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs behind one row: a config, its seeds, and what is tuned first.

    Attributes:
      config: name and variant, such as `"jorge/digits:sgd"`.
      seeds: seeds whose results are reported.
      overrides: further `key: text` overrides of the config.
      tune: axes of a grid, `key: values as text`; the cell with the least `by` (median
        over `tune_seeds` of the best validation) is what is run under `seeds`.
      tune_seeds: seeds of the tuning runs; none of them is reported.
      by: validation metric that is minimised.
      like: name of another row, from whose tuning this row takes values untuned.
      takes: the keys it takes over.
    """

    config: str
    seeds: tuple[int, ...] = (0,)
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tune: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tune_seeds: tuple[int, ...] = (1000,)
    by: str = "val_loss"
    like: str | None = None
    takes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if set(self.seeds) & set(self.tune_seeds) and self.tune:
            raise ConfigError(
                f"tuning seeds must differ from reported seeds: both hold "
                f"{sorted(set(self.seeds) & set(self.tune_seeds))}"
            )

    def trials(self) -> list[dict[str, str]]:
        """Returns the overrides of every cell of the grid; one empty dict without."""
        axes = self.tune
        return [
            dict(zip(axes, cell, strict=True))
            for cell in itertools.product(*axes.values())
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """How a table is made on one kind of machine, and what it must show there.

    Attributes:
      runs: rows by name.
      claims: claims by name.
      minutes: about how long it takes, for `hpcjax list`.
      devices: of every run; simulated ones on a CPU.
    """

    runs: Mapping[str, Runs]
    claims: Mapping[str, Claim]
    minutes: float
    devices: int = 1

    def __post_init__(self) -> None:
        for name, runs in self.runs.items():
            if runs.like is None:
                continue
            if runs.like not in self.runs:
                near = nearest(runs.like, self.runs)
                raise ConfigError(f"row {name!r} is like no row: {runs.like!r}{near}")
            unknown = sorted(set(runs.takes) - set(self.runs[runs.like].tune))
            if unknown:
                raise ConfigError(
                    f"row {name!r} takes what {runs.like!r} does not tune: {unknown}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a paper.

    Attributes:
      id: `<paper>/<name>`; the folder's name comes first.
      title: one line.
      paper: where it stands in the paper, and what is known of its figures.
      tiers: by name.
      reduce: `{row: dataset with dimension seed} -> table`, variables are its columns
        and `row` one of its dimensions; `<column>_low`, `<column>_high` are intervals.
      columns: variables shown, in order, with their headings.
      benchmark: the runs measure time, so `hpcjax bench` repeats them.
      caption: what a reader must know about stand-in data and units.
    """

    id: str
    title: str
    paper: str
    tiers: Mapping[TierName, Tier]
    reduce: Callable[[Mapping[str, xr.Dataset]], xr.Dataset]
    columns: Mapping[str, str]
    benchmark: bool = False
    caption: str = ""

    def tier(self, name: str) -> Tier:
        """Returns one tier; ConfigError names those the table has."""
        if name not in self.tiers:
            raise ConfigError(
                f"table {self.id} has no tier {name!r}; allowed: {list(self.tiers)}"
            )
        return self.tiers[name]  # pyrefly: ignore[bad-index]

    @property
    def times(self) -> tuple[str, ...]:
        """The columns whose headings say ms, µs or seconds."""
        units = re.compile(r"\b(ms|[µμ]s|(milli|micro)?seconds)\b")
        return tuple(
            name for name, heading in self.columns.items() if units.search(heading)
        )

    def commands(self) -> Sequence[str]:
        """Returns the command that makes each tier."""
        return [f"hpcjax table {self.id} --tier {name}" for name in self.tiers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim beside our number."""

    name: str
    relation: str
    ours: float
    bound: str
    holds: bool


def judge(tier: Tier, dataset: xr.Dataset) -> tuple[Verdict, ...]:
    """Computes every claim; one that cannot be computed for want of a cell is NaN."""
    verdicts = []
    for name, claim in tier.claims.items():
        try:
            ours = float(claim.ours(dataset))
        except (KeyError, ArithmeticError, ValueError):
            ours = math.nan
        verdicts.append(
            Verdict(
                name=name,
                relation=claim.relation,
                ours=ours,
                bound=claim.bound,
                holds=claim.holds(ours),
            )
        )
    return tuple(verdicts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableResult:
    """A table as it came out.

    Attributes:
      table: what was made.
      tier: on which tier.
      dataset: the assembled values.
      verdicts: one for each claim.
      runs: one record per run behind it: row, overrides, id, config digest, commit,
        and whether it diverged.
      tuned: by row, the overrides that tuning chose.
      rows: what the reported runs returned, by row, joined along `seed`.
      differences: against the committed result; None when it was not compared.
    """

    table: Table
    tier: str
    dataset: xr.Dataset
    verdicts: tuple[Verdict, ...]
    runs: tuple[Mapping[str, Any], ...]
    tuned: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, xr.Dataset]
    differences: tuple[str, ...] | None = None

    @property
    def sources(self) -> dict[str, str]:
        """How the figures of each row came about; see `results.SOURCES`."""
        return {
            name: row.attrs.get("source", "measured") for name, row in self.rows.items()
        }

    @property
    def source(self) -> str:
        """How the table's figures came about; several ways where its rows differ.

        A `reduce` whose figures are not those of the runs says so in the attribute
        `source` of what it returns.
        """
        ways = ", ".join(dict.fromkeys(self.sources.values())) or "measured"
        return ways if "," in ways else self.dataset.attrs.get("source", ways)

    @property
    def passed(self) -> bool:
        """True when every claim holds and nothing differs from the committed result."""
        return all(v.holds for v in self.verdicts) and not self.differences
