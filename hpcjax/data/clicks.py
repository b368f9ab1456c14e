"""Clicks on advertisements: numbers and categories, drawn or read in Criteo's form."""

import dataclasses
import gzip
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32, UInt32

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Share, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.objectives import CLICKS
from hpcjax.data.source import Batch, Dataset, check_indices

DENSE, CATEGORIES = 13, 26
# What each column of a line may be, between tabs.
_COLUMNS = (
    ("the label 0 or 1", "[01]"),
    *(("an integer of at most 18 digits", "(?:-?[0-9]{1,18})?"),) * DENSE,
    *(("categories of at most 8 hexadecimal digits", "[0-9a-fA-F]{0,8}"),) * CATEGORIES,
)
_LINE = re.compile("\t".join(pattern for _, pattern in _COLUMNS))
_BLOCK = 2048  # examples that are Python's numbers at a time


class ClickSource:
    """Examples with numbers, and with rows of tables that are one after the other."""

    def __init__(
        self,
        dense: Float32[np.ndarray, "n dense"],
        ids: Int32[np.ndarray, "n tables"],
        labels: Int32[np.ndarray, " n"],
    ) -> None:
        self.dense, self.ids, self.labels = dense, ids, labels

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: np.ndarray) -> Batch:
        """Returns "x", "dense" [batch, dense] and "ids" [batch, tables], and "y"."""
        check_indices(indices, len(self))
        x = {"dense": self.dense[indices], "ids": self.ids[indices]}
        return {"x": x, "y": self.labels[indices]}


def clicks_dataset(
    dense: np.ndarray,
    ids: np.ndarray,
    labels: np.ndarray,
    tables: tuple[int, ...],
    validation: float,
) -> Dataset:
    """Returns the last share of examples for validation, as time goes on.

    Args:
      dense: [n, dense].
      ids: of each table from 0, int32 [n, tables]; they become rows of all tables.
      labels: 0 or 1, [n].
      tables: rows of each.
      validation: share.

    Raises:
      ConfigError: all tables together have 2**31 rows or more.
    """
    checks.require_count(1, rows=sum(tables))
    ids += np.cumsum([0, *tables[:-1]], dtype=np.int32)
    cut = len(labels) - min(max(round(validation * len(labels)), 1), len(labels) - 1)
    train, held_out = (
        ClickSource(dense[part], ids[part], labels[part].astype(np.int32, copy=False))
        for part in (slice(cut), slice(cut, None))
    )
    shapes: Any = {"dense": dense.shape[1:], "ids": ids.shape[1:]}
    return Dataset(train, held_out, shapes, 1, CLICKS, tables=tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClicksConfig(Config):
    """Drawn clicks, whose look-ups are as uneven as those of advertisements.

    A random share of each table's rows has most look-ups. Clicks are drawn by the
    probability of a logistic model with a weight for each row and each number.

    Attributes:
      examples: number of all.
      tables: how many tables of categories.
      rows: of each table.
      dense: numbers of an example, standard normal.
      hot: share of each table's rows that are hot, at least one.
      hot_lookups: share of look-ups that go to these.
      validation: share of the examples, the last ones.
      draw_seed: of everything; it is not the seed of the run.
    """

    objective: ClassVar[Objective] = CLICKS
    smoke: ClassVar[Mapping[str, str]] = {"examples": "64", "tables": "3", "rows": "20"}

    examples: Size = 20_000
    tables: Size = 8
    rows: Size = 1000
    dense: Size = DENSE
    hot: Share = 0.01
    hot_lookups: Share = 0.92
    validation: Share = 0.1
    draw_seed: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "there must be two examples, one of them for validation"
        checks.require(self.examples > 1, rule, examples=self.examples)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the examples; `root` is not used.

        Examples:
          >>> clicks = ClicksConfig(examples=100, tables=3, rows=50).load()
          >>> len(clicks.train), len(clicks.validation), clicks.inputs, clicks.tables
          (90, 10, {'dense': (13,), 'ids': (3,)}, (50, 50, 50))
        """
        del root
        rng = np.random.Generator(np.random.Philox(self.draw_seed))
        shape = (self.examples, self.tables)
        order = np.argsort(rng.random((self.tables, self.rows)), axis=1)
        count = max(1, round(self.hot * self.rows))
        hot = rng.random(shape) < self.hot_lookups
        ranks = np.where(
            hot, rng.integers(count, size=shape), rng.integers(self.rows, size=shape)
        )
        ids = order[np.arange(self.tables), ranks]
        dense = rng.normal(size=(self.examples, self.dense)).astype(np.float32)
        weights = rng.normal(size=(self.tables, self.rows)) / np.sqrt(self.tables)
        logits = weights[np.arange(self.tables), ids].sum(1)
        logits += dense @ rng.normal(size=self.dense) / np.sqrt(self.dense)
        labels = rng.random(self.examples) < 1 / (1 + np.exp(-logits))
        tables = (self.rows,) * self.tables
        rows = ids.astype(np.int32)
        return clicks_dataset(dense, rows, labels, tables, self.validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoConfig(Config):
    """Criteo's display advertisements: 13 integers and 26 categories, or your own file.

    An integer x becomes log(max(x, 0) + 1), and 0 where it is missing. Of each column's
    categories row 0 stands for those that the training examples do not have. All are
    kept in memory, 160 bytes an example, and while they are read 200.

    Attributes:
      buckets: rows of each table, into which categories are hashed; None for one row
        each category.
      limit: the first examples of the file; None for all.
      validation: share of them, the last ones.
    """

    objective: ClassVar[Objective] = CLICKS

    buckets: Size | None = None
    limit: Size | None = None
    validation: Share = 0.1

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads "train.txt", or its ".gz".

        Raises:
          DataMissing: it is not below `root`.
          DataFormatError: a line is of another form; the message says which.
        """
        path = catalog.locate("criteo", root)["train.txt"]
        labels, dense, categories, missing = read_criteo(path, self.limit)
        if len(labels) < 2:
            raise DataFormatError(f"{path}: expected two examples, found {len(labels)}")
        cut = len(labels) - min(
            max(round(self.validation * len(labels)), 1), len(labels) - 1
        )
        if self.buckets:
            tables = hash_categories(categories, missing, self.buckets)
        else:
            tables = number_categories(categories, missing, cut)
        # Rows of tables take the place of categories: there is no second array.
        ids = categories.view(np.int32)
        return clicks_dataset(dense, ids, labels, tables, self.validation)


def hash_categories(
    categories: UInt32[np.ndarray, "n columns"],
    missing: UInt32[np.ndarray, " n"],
    buckets: int,
) -> tuple[int, ...]:
    """Puts (x + 1) mod `buckets` in place of categories x, and 0 of missing ones.

    Returns:
      The rows of each table, `buckets`.
    """
    bits = np.arange(categories.shape[1], dtype=np.uint32)
    for start in range(0, len(categories), _BLOCK):
        part = slice(start, start + _BLOCK)
        hashed = (categories[part].astype(np.int64) + 1) % buckets
        absent = missing[part, None] >> bits & 1
        categories[part] = np.where(absent, 0, hashed)
    return (buckets,) * categories.shape[1]


def number_categories(
    categories: UInt32[np.ndarray, "n columns"],
    missing: UInt32[np.ndarray, " n"],
    known: int,
) -> tuple[int, ...]:
    """Puts numbers from 1 in place of each column's categories.

    Args:
      categories: any numbers; they are written over.
      missing: of an example, in bit c whether the category of column c is missing,
        which is a category of its own, the first.
      known: the first so many examples say which categories there are; 0 is for others.

    Returns:
      The rows of each table, one more than it has categories.

    Examples:
      >>> column = np.array([[7], [3], [7], [9]], np.uint32)
      >>> number_categories(column, np.zeros(4, np.uint32), known=3)
      (3,)
      >>> column.ravel().tolist()
      [2, 1, 2, 0]
    """
    tables = []
    for bit, column in enumerate(categories.T):
        absent = (missing >> np.uint32(bit) & 1).astype(bool)
        seen = _find_unique(column[:known][~absent[:known]])
        padded = np.append(seen, np.uint32(0))
        first = 1 + int(absent[:known].any())
        for start in range(0, len(column), _BLOCK):
            part = slice(start, start + _BLOCK)
            place = np.searchsorted(seen, column[part])
            found = (padded[place] == column[part]) & (place < len(seen))
            numbers = np.where(found, place + first, 0)
            column[part] = np.where(absent[part], first - 1, numbers)
        tables.append(len(seen) + first)
    return tuple(tables)


def _find_unique(numbers: np.ndarray) -> np.ndarray:
    """Sorts numbers, returns each once, and takes less memory than `np.unique`."""
    numbers.sort()
    return numbers[
        np.concatenate([[True], numbers[1:] != numbers[:-1]])[: len(numbers)]
    ]


def read_criteo(
    path: pathlib.Path, limit: int | None = None
) -> tuple[
    Int32[np.ndarray, " n"],
    Float32[np.ndarray, "n dense"],
    UInt32[np.ndarray, "n columns"],
    UInt32[np.ndarray, " n"],
]:
    """Reads labels, integers as logarithms, and categories; 164 bytes an example.

    Args:
      path: of lines with a label, 13 integers and 26 hexadecimal categories, between
        tabs, each of which may be missing but the label; gzipped if it ends in ".gz".
        It is read twice, the first time for its number of lines.
      limit: the first lines; None for all.

    Returns:
      Labels, 0 or 1; log(max(x, 0) + 1) of integers x, 0 for those that are missing;
      categories as numbers; and in bit c of a number whether the example's category c
      is missing.

    Raises:
      DataFormatError: a line of another form; the message has its number.
    """
    count = sum(1 for _ in itertools.islice(_lines(path), limit))
    labels, dense = np.empty(count, np.int32), np.empty((count, DENSE), np.float32)
    categories = np.empty((count, CATEGORIES), np.uint32)
    missing = np.empty(count, np.uint32)
    lines = enumerate(itertools.islice(_lines(path), limit), start=1)
    for start in range(0, count, _BLOCK):
        part = slice(start, start + _BLOCK)
        rows = [_parse(path, *line) for line in itertools.islice(lines, _BLOCK)]
        found = np.array(rows, np.int64)
        labels[part] = found[:, 0]
        dense[part] = np.log1p(np.maximum(found[:, 1 : 1 + DENSE], 0))
        names = found[:, 1 + DENSE :]
        missing[part] = (names < 0) @ (1 << np.arange(CATEGORIES))
        categories[part] = np.maximum(names, 0)
    return labels, dense, categories, missing


def _lines(path: pathlib.Path) -> Iterator[str]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="ascii", newline="\n") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path}: expected lines of text: {error}") from error


def _parse(path: pathlib.Path, number: int, line: str) -> list[int]:
    """Returns a line's label, integers, and categories, −1 for missing ones."""
    line = line.rstrip("\r\n")
    fields = line.split("\t")
    if not _LINE.fullmatch(line):
        raise DataFormatError(f"{path}: line {number}: expected {_explain(fields)}")
    numbers = [int(field or 0) for field in fields[: 1 + DENSE]]
    return numbers + [int(field or "-1", 16) for field in fields[1 + DENSE :]]


def _explain(fields: list[str]) -> str:
    """Returns what a line should have, and what it has."""
    if len(fields) != len(_COLUMNS):
        return f"{len(_COLUMNS)} columns, found {len(fields)}"
    return next(
        f"{rule}, found {field!r:.40}"
        for (rule, pattern), field in zip(_COLUMNS, fields, strict=True)
        if not re.fullmatch(pattern, field)
    )
