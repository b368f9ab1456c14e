"""A paper's tables: their runs, how these are reduced, and what they must show.

A `Table` is registered by being a module-level object of an experiment's `tables.py`.
Its claims are numbers with bounds, computed from the assembled dataset; a claim whose
number is missing or NaN has failed.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.runs import pictures, reduce
from hpcjax.runs.claims import Claim, Control, Trivial

if TYPE_CHECKING:
    import xarray as xr

TierName = Literal["cpu", "gpu", "model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs of one row: a config, its seeds, and a grid for tuning it first.

    Attributes:
      config: name and variant, such as `"jorge/digits:sgd"`.
      seeds: seeds whose results are reported.
      overrides: further `key: text` overrides of the config.
      tune: axes of a grid, `key: values as text`. Of its cells the one with the least
        `by`, the median over `tune_seeds` of the best validation, is run with `seeds`.
      tune_seeds: seeds of the tuning runs, which are not reported.
      by: validation metric that is minimised, and
      smooth: of how many validations the mean is taken first.
      like: name of another row, whose tuned values this row uses without tuning.
      takes: the keys of these values.
      after: name of another row, from whose run of the same seed this row's is forked:
        it starts with what that has learnt, and counts its steps.
    """

    config: str
    seeds: tuple[int, ...] = (0,)
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tune: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    tune_seeds: tuple[int, ...] = (1000,)
    by: str = "val_loss"
    smooth: int = 1
    like: str | None = None
    takes: tuple[str, ...] = ()
    after: str = ""

    def __post_init__(self) -> None:
        if self.smooth < 1:
            raise ConfigError(f"smooth must be at least 1: got {self.smooth}")
        if set(self.seeds) & set(self.tune_seeds) and self.tune:
            raise ConfigError(
                f"tuning seeds must differ from reported seeds: both hold "
                f"{sorted(set(self.seeds) & set(self.tune_seeds))}"
            )
        if self.after and self.tune:
            raise ConfigError(
                f"a row that starts from another's runs is not tuned: got "
                f"after={self.after!r}, tune={sorted(self.tune)}"
            )

    def trials(self) -> list[dict[str, str]]:
        """Returns the overrides of every cell of the grid; one empty dict without."""
        axes = self.tune
        return [
            dict(zip(axes, cell, strict=True))
            for cell in itertools.product(*axes.values())
        ]

    def at_edge(self, chosen: Mapping[str, str]) -> dict[str, str]:
        """Returns what of a trial is the least or largest number of its axis.

        Beyond it there might be something better. Axes of words, and of one value, have
        no edge.

        Args:
          chosen: a trial, `{key: text}`.

        Examples:
          >>> runs = Runs(config="a", tune={"lr": ("1", "0.1", "10"), "wd": ("0", "1")})
          >>> runs.at_edge({"lr": "1", "wd": "0"})
          {'wd': '0'}
        """
        found = {}
        for key, texts in self.tune.items():
            try:
                numbers = sorted({float(text) for text in texts})
            except ValueError:
                continue
            if len(numbers) > 1 and float(chosen[key]) in (numbers[0], numbers[-1]):
                found[key] = chosen[key]
        return found


def grid(
    config: str,
    *axes: Mapping[str, Mapping[str, str]] | Sequence[str],
    seeds: tuple[int, ...] = (0,),
    between: str = ", ",
) -> dict[str, Runs]:
    """Returns rows of runs for all combinations of labels, one of each axis.

    Args:
      config: of all rows; `{0}` in it is replaced by the label of the first axis.
      *axes: overrides by label, or labels alone; a row has those of all its labels.
      seeds: of every row.
      between: separates the labels in a row's name.

    Examples:
      >>> sizes = {f"P={p}": {"processes": str(p)} for p in (8, 64)}
      >>> runs = grid("paper/steps:{0}", ("fast", "slow"), sizes)
      >>> list(runs)
      ['fast, P=8', 'fast, P=64', 'slow, P=8', 'slow, P=64']
      >>> runs["slow, P=8"].config, runs["slow, P=8"].overrides
      ('paper/steps:slow', {'processes': '8'})
    """
    return {
        between.join(labels): Runs(
            config=config.format(*labels),
            overrides={
                key: text
                for axis, label in zip(axes, labels, strict=True)
                if isinstance(axis, Mapping)
                for key, text in axis[label].items()
            },
            seeds=seeds,
        )
        for labels in itertools.product(*axes)
    }


def variants(
    config: str, *, seeds: tuple[int, ...] = (0,), **rows: str
) -> dict[str, Runs]:
    """Returns rows of runs of a config's variants, `variant="row"`.

    Examples:
      >>> runs = variants("paper/steps", base="ours", slow="theirs")
      >>> {row: each.config for row, each in runs.items()}
      {'ours': 'paper/steps', 'theirs': 'paper/steps:slow'}
    """
    names = {row: "" if name == "base" else f":{name}" for name, row in rows.items()}
    return {row: Runs(config=config + end, seeds=seeds) for row, end in names.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tier:
    """The runs and claims of a table on one kind of machine.

    Attributes:
      runs: rows by name.
      claims: claims by name.
      minutes: approximate duration, for `hpcjax list`.
      devices: number of devices of every run; simulated ones on a CPU.
      trivial: which rows are without the idea.
    """

    runs: Mapping[str, Runs]
    claims: Mapping[str, Claim]
    minutes: float
    devices: int = 1
    trivial: Trivial | None = None

    def __post_init__(self) -> None:
        for name, runs in self.runs.items():
            self._check_after(name, runs)
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

    def _check_after(self, name: str, runs: Runs) -> None:
        """Raises ConfigError unless a row starts from one that has its seeds."""
        begun = [name]
        while runs.after:
            if runs.after not in self.runs or runs.after in begun:
                near = nearest(runs.after, self.runs)
                raise ConfigError(
                    f"row {begun[-1]!r} must be after another row, that is not after "
                    f"it: got {runs.after!r}{near}"
                )
            before = self.runs[runs.after]
            if lacking := sorted({*runs.seeds} - {*before.seeds}):
                raise ConfigError(
                    f"row {begun[-1]!r} is after {runs.after!r}, which has no seeds "
                    f"{lacking}"
                )
            begun, runs = [*begun, runs.after], before


def on_cpu(**options: Any) -> dict[TierName, Tier]:
    """Returns the one tier of a table that is made on a CPU; see `Tier`."""
    return {"cpu": Tier(**options)}


def on_gpu(**options: Any) -> dict[TierName, Tier]:
    """Returns the one tier of a table that is made on a GPU; see `Tier`."""
    return {"gpu": Tier(**options)}


def by_model(**options: Any) -> dict[TierName, Tier]:
    """Returns the one tier of a table that is computed, not measured; see `Tier`."""
    return {"model": Tier(**options)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """One table of a paper.

    Attributes:
      id: `<paper>/<name>`; the folder's name comes first.
      title: one line.
      paper: where it is in the paper, and what is known of its figures.
      recalled: figures of the paper that somebody remembers, by row: no source says
        them.
      tiers: by name.
      columns: those shown, in order, `{name: heading}`, or `{name: (heading, cell)}`,
        where `cell(run)` or `cell(run, rows)` computes it; by default it is the figure
        of that name. One with the heading "" is for claims alone.
      along: a dimension whose labels become rows, of the runs that have it.
      named: makes a row's name of a run's, or of a label.
      over: makes a column of its cells of all seeds, such as `reduce.extent`; without,
        columns are of the first seed.
      reduce: what columns cannot say, `{row: dataset with dimension seed} -> table`,
        variables are its columns and `row` one of its dimensions; `<column>_low`,
        `<column>_high` are intervals. By default `reduce.of_columns`.
      benchmark: the runs measure time, so `hpcjax bench` repeats them.
      caption: what readers must know about stand-in data and units.
      picture: how its picture is drawn, see `pictures`; or a function of the assembled
        dataset that draws it.
      shows: for a stranger to it: a sentence on what was done, and one on what to look
        at.
    """

    id: str
    title: str
    paper: str
    tiers: Mapping[TierName, Tier]
    columns: Mapping[str, Any]
    recalled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    along: str = ""
    named: Callable[[str], str] = str
    over: reduce.Over | None = None
    reduce: Callable[[Mapping[str, "xr.Dataset"]], "xr.Dataset"] = None  # type: ignore
    benchmark: bool = False
    caption: str = ""
    picture: pictures.Drawn | None = None
    shows: str = ""

    def __post_init__(self) -> None:
        both = {
            name: said if isinstance(said, tuple) else (said, reduce.figure(name))
            for name, said in self.columns.items()
        }
        claims = {name for tier in self.tiers.values() for name in tier.claims}
        known = both if self.reduce is None else None
        pictures.check_names(self.picture, known, claims)
        if self.reduce is None:
            cells = {name: cell for name, (_, cell) in both.items()}
            made = reduce.of_columns(cells, self.along, self.named, self.over)
            object.__setattr__(self, "reduce", made)
        shown = {name: heading for name, (heading, _) in both.items() if heading}
        object.__setattr__(self, "columns", shown)

    def tier(self, name: str) -> Tier:
        """Returns one tier; ConfigError names those the table has."""
        if name not in self.tiers:
            raise ConfigError(
                f"table {self.id} has no tier {name!r}; allowed: {list(self.tiers)}"
            )
        return self.tiers[name]  # pyrefly: ignore[bad-index]

    def choose_tier(self, name: str | None = None) -> str:
        """Returns the tier of that name; without one the only tier, or `cpu`.

        Raises:
          ConfigError: there is no such tier, or there are several and none is `cpu`.
        """
        if name is None:
            (name, *more) = self.tiers
            name = "cpu" if more else name
        self.tier(name)
        return name

    @property
    def times(self) -> tuple[str, ...]:
        """The columns whose headings say ms, µs or seconds."""
        units = re.compile(r"\b(ms|[µμ]s|(milli|micro)?seconds)\b")
        return tuple(
            name for name, heading in self.columns.items() if units.search(heading)
        )

    def commands(self) -> Sequence[str]:
        """Returns the command that makes each tier."""
        several = len(self.tiers) > 1
        return [
            f"hpcjax table {self.id}{several * f' --tier {name}'}"
            for name in self.tiers
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim beside our number.

    Attributes:
      name: the claim's.
      relation: the paper's statement in words.
      ours: our number; NaN if a cell of it is missing.
      bound: in print.
      holds: whether our number satisfies it, that of no negative control does, and all
        peers that it is about have learned.
      controls: the negative controls, and
      broken: their numbers.
      unlearned: those of these peers that have not, see `Trivial`.
    """

    name: str
    relation: str
    ours: float
    bound: str
    holds: bool
    controls: tuple[Control, ...] = ()
    broken: tuple[float, ...] = ()
    unlearned: tuple[str, ...] = ()


def judge(tier: Tier, dataset: "xr.Dataset") -> tuple[Verdict, ...]:
    """Computes all claims and their negative controls.

    A number that lacks a cell is NaN. A claim does not hold if one of its controls
    passes, or has no number; nor if its number is not the same without a peer that has
    not learned.
    """
    behind = tier.trivial.find_unlearned(dataset) if tier.trivial else ()
    without = {peer: dataset.drop_sel(row=peer, errors="ignore") for peer in behind}
    verdicts = []
    for name, claim in tier.claims.items():
        ours = _compute(claim, dataset)
        broken = tuple(_compute(claim, dataset, each) for each in claim.controls)
        about = tuple(
            peer for peer, rest in without.items() if _compute(claim, rest) != ours
        )
        passed = any(math.isnan(each) or claim.holds(each) for each in broken)
        verdicts.append(
            Verdict(
                name=name,
                relation=claim.relation,
                ours=ours,
                bound=claim.bound,
                holds=claim.holds(ours) and not passed and not about,
                controls=claim.controls,
                broken=broken,
                unlearned=about,
            )
        )
    return tuple(verdicts)


def find_claimed(tier: Tier, dataset: "xr.Dataset") -> set[str]:
    """Returns the columns without which a claim has another number, or loses it.

    A bound of an interval stands for its column.
    """
    numbers = [(claim, _compute(claim, dataset)) for claim in tier.claims.values()]
    return {
        re.sub("_(low|high)$", "", name)
        for name in map(str, dataset.data_vars)
        for without in [dataset.drop_vars(name)]
        if any(
            _number(claim, without) != ours
            for claim, ours in numbers
            if not math.isnan(ours)
        )
    }


def _number(claim: Claim, table: "xr.Dataset") -> float:
    """Returns a claim's number of the cells as they are; NaN if it has none."""
    try:
        return float(claim.ours(table))
    except Exception:  # of any kind, as a cell is missing
        return math.nan


def _compute(
    claim: Claim, table: "xr.Dataset", control: Control | None = None
) -> float:
    """Returns a claim's number; NaN if it is another one with other missing cells."""
    import pandas as pd

    try:
        table = control.apply(table) if control else table
        found = _number(claim, table)
        names = [name for name, each in table.items() if pd.isna(each.values).any()]
        others = _find_others(table[names]) if names and not math.isnan(found) else ()
        filled = (table.assign(table[names].fillna(each)) for each in others)
        same = all(_number(claim, each) == found for each in filled)
    except Exception:  # as above
        return math.nan
    return found if same else math.nan


def _find_others(lacking: "xr.Dataset") -> "list[xr.Dataset]":
    """Returns what may be in missing cells: bounds, and beyond these no two alike."""
    order = itertools.count(1)
    ranks = lacking.map(
        lambda each: each.copy(
            data=np.reshape([next(order) for _ in range(each.size)], each.shape)
        )
    )
    beyond = [1e30 * ranks, -1e30 * ranks, 1e30 / ranks, -1e30 / ranks]
    return [lacking.min(), lacking.max(), *beyond]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableResult:
    """A table that has been made.

    Attributes:
      table: its definition.
      tier: its tier.
      dataset: the assembled values.
      verdicts: one for each claim.
      runs: a record for each of its runs: row, overrides, id, digests of config and
        code, commit, whether it was used again, and whether it diverged.
      tuned: by row, the overrides that tuning chose.
      at_edge: by row, what of these lies at an edge of its grid, see `Runs.at_edge`.
      rows: by row, the results of the reported runs, joined along `seed`.
      drifts: by row, how far times moved within a measurement, of those that were
        unstable, see `perf.compare`.
      differences: from the committed result; None if it was not compared.
      recorded: what code the committed result is of, see `code.Age`; None likewise.
    """

    table: Table
    tier: str
    dataset: "xr.Dataset"
    verdicts: tuple[Verdict, ...]
    runs: tuple[Mapping[str, Any], ...]
    tuned: Mapping[str, Mapping[str, str]]
    at_edge: Mapping[str, Mapping[str, str]]
    rows: Mapping[str, "xr.Dataset"]
    drifts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    differences: tuple[str, ...] | None = None
    recorded: str | None = None

    @property
    def sources(self) -> dict[str, str]:
        """The source of each row's figures, see `results.SOURCES`."""
        return {
            name: row.attrs.get("source", "unknown") for name, row in self.rows.items()
        }

    @property
    def source(self) -> str:
        """The source of the table's figures; several if its rows differ.

        A `reduce` that computes figures of another source than the runs sets the
        attribute `source` of its result.
        """
        ways = ", ".join(dict.fromkeys(self.sources.values()))
        return ways if "," in ways else self.dataset.attrs.get("source", ways)

    @property
    def passed(self) -> bool:
        """True when every claim holds and nothing differs from the committed result."""
        return all(v.holds for v in self.verdicts) and not self.differences
