"""Building blocks for the `reduce` functions and the claims of tables.

A table whose columns say what they are (`of_columns`, `figure`, `differs`) needs no
`reduce`. The rows of others are its runs (`by_run`), labels of one of their dimensions
(`stack`), or computed by a function (`from_cells`, `by_row`, `along`). A cell of
several measurements has an interval (`interval`, `extent`). Claims are numbers with a
bound: of cells, and how cells compare (`cell`, `over`, `above`), or of columns (`of`,
`least`, `most`); see `Number`.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax import perf
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.perf.intervals import bootstrap_median, median
from hpcjax.runs.claims import Claim

if TYPE_CHECKING:
    import xarray as xr

Rows = Mapping[str, "xr.Dataset"]
Cells = Mapping[str, "float | xr.DataArray"]  # a number for each column
Cell = Callable[..., Any]  # cell(run), or cell(run, rows)
Over = Callable[["xr.DataArray", str], Cells]  # a column's cells of all seeds
Reduce = Callable[[Rows], "xr.Dataset"]


def first(row: "xr.Dataset") -> "xr.Dataset":
    """Returns the run of a row's first seed."""
    return row.isel(seed=0, drop=True)


def single(rows: Rows) -> "xr.Dataset":
    """Returns the only run of a table.

    Raises:
      ValueError: there is not exactly one row.
    """
    if len(rows) != 1:
        raise ValueError(f"there must be one row: got {list(rows)}")
    return first(*rows.values())


def from_cells(found: Mapping[str, Cells]) -> "xr.Dataset":
    """Returns a table of `{row: {column: value}}`, NaN where a row lacks a column.

    Of a column of texts such a row has the empty one.

    Examples:
      >>> from_cells({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 3.0}})["y"].values.tolist()
      [2.0, nan]
    """
    import xarray as xr

    columns = dict.fromkeys(column for cells in found.values() for column in cells)
    held = {name: _fill(name, found.values()) for name in columns}
    return xr.Dataset(
        {name: ("row", cells) for name, cells in held.items()},
        coords={"row": list(found)},
    )


def _fill(column: str, rows: Iterable[Cells]) -> list[Any]:
    """Returns a column's cells; NaN where a row lacks it, or "" among texts."""
    cells = [np.asarray(row.get(column)).item() for row in rows]
    missing = "" if any(isinstance(cell, str) for cell in cells) else np.nan
    return [missing if cell is None else cell for cell in cells]


def by_row(cells: Callable[["xr.Dataset"], Cells]) -> Reduce:
    """Makes a `reduce` of a function, as its decorator: a row's cells of its run.

    The run keeps its dimension `seed`.
    """

    @functools.wraps(cells)
    def reduce(rows: Rows) -> "xr.Dataset":
        return from_cells({name: cells(row) for name, row in rows.items()})

    return reduce


def of_columns(
    cells: Mapping[str, Cell],
    dim: str = "",
    named: Callable[[str], str] = str,
    over: Over | None = None,
) -> Reduce:
    """Makes a `reduce` of a cell for each column, of the runs of the first seeds.

    A row lacks the cells that raise KeyError, as those of figures that its run has not.

    Args:
      cells: `{column: cell(run)}`, or `cell(run, rows)`, which looks at other rows too.
      dim: a dimension whose labels become rows, of the runs that have it: by
        themselves, or behind the run's name where there are several runs.
      named: makes the name that is printed of a row's.
      over: makes the column of its cells of all seeds, and maybe an interval, such as
        `extent` does; by default only the first seed is looked at.

    Returns:
      The function. It raises ConfigError for a column of which no row has a cell.
    """
    return functools.partial(_tabulate, dict(cells), dim, named, over)


def _tabulate(
    cells: Mapping[str, Cell],
    dim: str,
    named: Callable[[str], str],
    over: Over | None,
    rows: Rows,
) -> "xr.Dataset":
    """Returns the table of columns' cells; see `of_columns`."""
    seeds = range(max(row.sizes["seed"] for row in rows.values()) if over else 1)
    found, *others = (_of_seed(cells, dim, named, rows, seed) for seed in seeds)
    absent = set(cells).difference(*found.values())
    if absent:
        held = sorted({str(name) for run in rows.values() for name in run.data_vars})
        near = nearest(min(absent), held)
        raise ConfigError(f"no row has a cell of {sorted(absent)}{near}")
    if over:
        found = {
            name: _join([own, *(each.get(name, {}) for each in others)], over)
            for name, own in found.items()
        }
    return from_cells(found)


def _of_seed(
    cells: Mapping[str, Cell],
    dim: str,
    named: Callable[[str], str],
    rows: Rows,
    seed: int,
) -> dict[str, dict[str, Any]]:
    """Returns the cells of the runs of a seed, by its number among a row's."""
    every = {
        name: row.isel(seed=seed, drop=True)
        for name, row in rows.items()
        if seed < row.sizes["seed"]
    }
    runs = dict(_split(every, dim))
    return {
        named(name): {
            column: value
            for column, cell in cells.items()
            if (value := _compute(cell, run, runs)) is not None
        }
        for name, run in runs.items()
    }


def _join(seeds: list[dict[str, Any]], over: Over) -> Cells:
    """Returns a row's cells of those of each seed."""
    import xarray as xr

    joined: dict[str, Any] = {}
    for column in seeds[0]:
        values = [float(own[column]) for own in seeds if column in own]
        joined |= over(xr.DataArray(values), column)
    return joined


def _split(runs: Rows, dim: str) -> Iterator[tuple[str, "xr.Dataset"]]:
    """Yields runs, and of those with this dimension a part for each label."""
    for name, run in runs.items():
        if dim not in run.dims:
            yield name, run
            continue
        for label in run[dim].values.tolist():
            part = run.sel({dim: label})
            yield (f"{name}, {label}" if len(runs) > 1 else label), part


def _compute(cell: Cell, run: "xr.Dataset", rows: Rows) -> Any:
    """Returns what a cell is; None if there is none."""
    try:
        return cell(*(run, rows)[: len(inspect.signature(cell).parameters)])
    except KeyError:
        return None


def figure(name: str) -> Cell:
    """Makes a cell: the figure of that name."""
    return functools.partial(_read, name)


def _read(name: str, run: "xr.Dataset") -> "xr.DataArray":
    return run[name]


def differs(name: str, row: str) -> Cell:
    """Makes a cell: 1 where a figure is not that of another row, else 0."""
    return functools.partial(_differ, name, row)


def _differ(name: str, row: str, run: "xr.Dataset", rows: Rows) -> float:
    return float(run[name] != rows[row][name])


def along(dim: str) -> Callable[[Callable[["xr.Dataset", Any], Cells]], Reduce]:
    """Makes a `reduce` with a row for each run and each label of its dimension `dim`.

    A decorator of what makes a row's cells of a run, which keeps its dimension `seed`,
    and a label.

    Args:
      dim: a dimension of the runs, such as the algorithms that each of them measures.
    """

    def decorate(cells: Callable[["xr.Dataset", Any], Cells]) -> Reduce:
        @functools.wraps(cells)
        def reduce(rows: Rows) -> "xr.Dataset":
            return from_cells(
                {
                    f"{name}, {label}": cells(row, label)
                    for name, row in rows.items()
                    for label in row[dim].values.tolist()
                }
            )

        return reduce

    return decorate


def by_run(rows: Rows) -> "xr.Dataset":
    """Returns the variables of the runs of the first seeds, with a row for each run."""
    import xarray as xr

    runs = [first(row) for row in rows.values()]
    return xr.concat(runs, dim="row").assign_coords(row=list(rows))


def stack(
    parts: Mapping[str, "xr.Dataset"], dim: str = "row", between: str = ", "
) -> "xr.Dataset":
    """Puts tables, or runs of one seed, below one another.

    Args:
      parts: tables by the first part of the names of their rows.
      dim: the dimension whose labels become rows. Variables keep their other
        dimensions, and a scalar of a part is repeated in each of its rows.
      between: separates the name of a part from a label.
    """
    import xarray as xr

    named = [
        part.rename({dim: "row"}).assign_coords(
            row=[f"{name}{between}{label}" for label in part[dim].values]
        )
        for name, part in parts.items()
    ]
    return xr.concat(named, dim="row", data_vars="all")


def interval(values: "xr.DataArray", column: str) -> dict[str, float]:
    """Returns the median as a column of that name, and its 95 % bootstrap interval.

    All are NaN if a value is, such as that of a seed under which a run diverged.
    """
    sample = values.values
    low, high = bootstrap_median(sample)
    return {
        column: float(median(sample[None])[0]),
        f"{column}_low": low,
        f"{column}_high": high,
    }


def extent(values: "xr.DataArray", column: str) -> dict[str, float]:
    """Returns the mean as a column of that name, with least and largest as interval.

    All are NaN if a value is, as of `interval`.
    """
    return {
        column: float(values.mean(skipna=False)),
        f"{column}_low": float(values.min(skipna=False)),
        f"{column}_high": float(values.max(skipna=False)),
    }


def ratios(seconds: "xr.DataArray", baseline: str) -> "xr.Dataset":
    """Returns times and their ratios to a baseline's of the same round.

    Args:
      seconds: `[candidate, repetition]`, the first dimension of any name.
      baseline: one of the candidates.

    Returns:
      The result of `perf.ratio_table`, with a row for each candidate.
    """
    (dim,) = set(seconds.dims) - {"repetition"}
    timed = seconds.rename({dim: "candidate"}).to_dataset(name="seconds")
    return perf.ratio_table(timed.assign_attrs(baseline=baseline))


@dataclasses.dataclass(frozen=True)
class Number:
    """What is read off a table: columns, cells, and what is computed of them.

    Also makes one of a function of the table, as its decorator. A number is a claim
    once it has a bound.

    Attributes:
      read: returns the number, or a whole column of them.

    Examples:
      >>> table = from_cells({"a": {"x": 1.0}, "b": {"x": 4.0}})
      >>> claim = (cell("x", "b") / cell("x", "a")).at_most(5.0, "b's over a's")
      >>> claim.ours(table), claim.bound, abs(of("x") - 2).largest()(table)
      (4.0, '≤ 5', 2.0)
    """

    read: Callable[["xr.Dataset"], Any]

    def __call__(self, table: "xr.Dataset") -> float:
        """Returns the number of a table."""
        return float(self.read(table))

    def at_most(self, bound: float, relation: str) -> Claim:
        """Returns the claim that it is at most so large; see `Claim`."""
        return Claim(relation=relation, ours=self, at_most=bound)

    def at_least(self, bound: float, relation: str) -> Claim:
        """Returns the claim that it is at least so large; see `Claim`."""
        return Claim(relation=relation, ours=self, at_least=bound)

    def then(self, function: Callable[[Any], Any]) -> "Number":
        """Returns what a function makes of it."""
        return Number(lambda table: function(self.read(table)))

    def largest(self) -> "Number":
        """Returns the largest of a column; NaN if one is."""
        return self.then(np.max)

    def least(self) -> "Number":
        """Returns the least of a column; NaN if one is."""
        return self.then(np.min)

    def sum(self) -> "Number":
        """Returns the sum of a column."""
        return self.then(np.sum)

    def median(self) -> "Number":
        """Returns the median of a column."""
        return self.then(np.median)

    def __abs__(self) -> "Number":
        return self.then(np.abs)

    def __truediv__(self, other: "Number | float | np.ndarray") -> "Number":
        return self._and(other, operator.truediv)

    def __sub__(self, other: "Number | float | np.ndarray") -> "Number":
        return self._and(other, operator.sub)

    def __mul__(self, other: "Number | float | np.ndarray") -> "Number":
        return self._and(other, operator.mul)

    def _and(
        self, other: "Number | float | np.ndarray", operation: Callable[[Any, Any], Any]
    ) -> "Number":
        def read(table: "xr.Dataset") -> Any:
            right = other.read(table) if isinstance(other, Number) else other
            return operation(self.read(table), right)

        return Number(read)


def of(column: str, *among: str) -> Number:
    """Makes what reads a column, as an array; only of some rows, see `rows_of`."""
    return Number(lambda table: rows_of(table, *among)[column].values)


def cell(column: str, row: str) -> Number:
    """Makes what reads a cell."""
    return Number(lambda table: table[column].sel(row=row).values)


def over(column: str, row: str, base: str) -> Number:
    """Makes what reads a row's cell over another row's."""
    return cell(column, row) / cell(column, base)


def above(column: str, row: str, base: str) -> Number:
    """Makes what reads by how much a row's cell is above another row's."""
    return cell(column, row) - cell(column, base)


def least(column: str, *among: str) -> Number:
    """Makes what reads the least cell of a column; NaN if one is; see `rows_of`."""
    return of(column, *among).least()


def most(column: str, *among: str) -> Number:
    """Makes what reads the largest cell of a column; NaN if one is; see `rows_of`."""
    return of(column, *among).largest()


def rows_of(table: "xr.Dataset", *among: str) -> "xr.Dataset":
    """Returns the rows that texts mean, in the table's order; all rows without texts.

    A text that is a row's name means that row alone, and others all rows whose names
    contain it.

    Raises:
      KeyError: a text is in no row's name.
    """
    names = [str(name) for name in table["row"].values.tolist()]
    chosen = set[str]() if among else {*names}
    for text in among:
        found = {text} & {*names} or {name for name in names if text in name}
        if not found:
            raise KeyError(f"no row's name holds {text!r}: {names}")
        chosen |= found
    return table.isel(row=[name in chosen for name in names])
