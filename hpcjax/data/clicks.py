"""Clicks on advertisements: numbers and categories, drawn or read in Criteo's form."""

import dataclasses
import gzip
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32, Int64

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, Share, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.objectives import CLICKS
from hpcjax.data.source import Batch, Dataset, check_indices

DENSE, CATEGORIES = 13, 26
EMPTY = -1


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
      ids: of each table from 0, [n, tables].
      labels: 0 or 1, [n].
      tables: rows of each.
      validation: share.
    """
    first = np.cumsum([0, *tables[:-1]])
    rows = (ids + first).astype(np.int32)
    cut = len(labels) - min(max(round(validation * len(labels)), 1), len(labels) - 1)
    train, held_out = (
        ClickSource(
            dense[part].astype(np.float32), rows[part], labels[part].astype(np.int32)
        )
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
        return clicks_dataset(dense, ids, labels, tables, self.validation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoConfig(Config):
    """Criteo's display advertisements: 13 integers and 26 categories, or your own file.

    An integer x becomes log(max(x, 0) + 1), and 0 where it is missing. Of each column's
    categories row 0 stands for those that the training examples do not have. All are
    kept in memory, 160 bytes an example.

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
        labels, dense, categories = read_criteo(path, self.limit)
        if len(labels) < 2:
            raise DataFormatError(f"{path}: expected two examples, found {len(labels)}")
        cut = len(labels) - min(
            max(round(self.validation * len(labels)), 1), len(labels) - 1
        )
        if self.buckets:
            # What is missing is a category of its own, before it is hashed.
            ids = (categories + 1) % self.buckets
            tables = (self.buckets,) * categories.shape[1]
        else:
            ids, tables = number_categories(categories, cut)
        return clicks_dataset(dense, ids, labels, tables, self.validation)


def number_categories(
    categories: Int64[np.ndarray, "n columns"], known: int
) -> tuple[Int64[np.ndarray, "n columns"], tuple[int, ...]]:
    """Returns numbers from 1 of each column's categories, and rows for them.

    Args:
      categories: any numbers.
      known: the first so many examples say which categories there are; 0 is for others.

    Examples:
      >>> number_categories(np.array([[7], [3], [7], [9]]), known=3)[0].ravel().tolist()
      [2, 1, 2, 0]
    """
    columns, tables = [], []
    for column in categories.T:
        seen = np.unique(column[:known])
        place = np.searchsorted(seen, column).clip(max=len(seen) - 1)
        columns.append(np.where(seen[place] == column, place + 1, 0))
        tables.append(len(seen) + 1)
    return np.stack(columns, axis=1), tuple(tables)


def read_criteo(
    path: pathlib.Path, limit: int | None = None
) -> tuple[
    Int64[np.ndarray, " n"],
    Float32[np.ndarray, "n dense"],
    Int64[np.ndarray, "n columns"],
]:
    """Reads labels, integers as logarithms, and categories.

    Args:
      path: of lines with a label, 13 integers and 26 hexadecimal categories, between
        tabs, each of which may be missing but the label; gzipped if it ends in ".gz".
      limit: the first lines; None for all.

    Returns:
      Labels, 0 or 1; log(max(x, 0) + 1) of integers x, 0 for those that are missing;
      and categories as numbers, −1 for those that are missing.

    Raises:
      DataFormatError: a line of another form; the message has its number.
    """
    labels, dense, categories = [], [], []
    for number, line in enumerate(itertools.islice(_lines(path), limit), start=1):
        try:
            label, numbers, names = _parse(line)
        except ValueError as error:
            raise DataFormatError(f"{path}: line {number}: {error}") from error
        labels.append(label)
        dense.append(numbers)
        categories.append(names)
    values = np.array(dense, np.float64).reshape(-1, DENSE)
    return (
        np.array(labels, np.int64),
        np.log1p(np.maximum(values, 0)).astype(np.float32),
        np.array(categories, np.int64).reshape(-1, CATEGORIES),
    )


def _lines(path: pathlib.Path) -> Iterator[str]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="ascii", newline="\n") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise DataFormatError(f"{path}: expected lines of text: {error}") from error


def _parse(line: str) -> tuple[int, list[int], list[int]]:
    """Returns a line's label, integers and categories."""
    fields = line.rstrip("\r\n").split("\t")
    expected = 1 + DENSE + CATEGORIES
    if len(fields) != expected:
        raise ValueError(f"expected {expected} columns, found {len(fields)}")
    if fields[0] not in ("0", "1"):
        raise ValueError(f"expected the label 0 or 1, found {fields[0]!r}")
    numbers = [int(field) if field else 0 for field in fields[1 : 1 + DENSE]]
    names = [int(field, 16) if field else EMPTY for field in fields[1 + DENSE :]]
    if max(names) >= 2**63 or min(names) < EMPTY:
        raise ValueError("expected categories of at most 16 hexadecimal digits")
    return int(fields[0]), numbers, names
