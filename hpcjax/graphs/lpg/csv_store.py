"""Property graphs in one file, in the form of Neo4j's `apoc.export.csv`."""

import dataclasses
import datetime
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from hpcjax.core import checks, files
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.graphs.lpg.property_graph import (
    EDGE,
    VERTEX,
    PropertyGraph,
    Schema,
    check_write,
    schema_of,
)


@dataclasses.dataclass(frozen=True)
class CsvStore:
    """A file whose rows are vertices, `_id` and `_labels` ":A:B", and then edges.

    Types of properties are those that all values of a column have: integers, numbers,
    booleans, points and lists in JSON, times and durations in ISO 8601, else text. A
    duration's month has 30.4375 days, a twelfth of the 365.25 of a year: on average, as
    months alone do not say which they are. It is written in days and less.

    Attributes:
      path: of the file; gzipped if it ends in `.gz`.
    """

    path: pathlib.Path

    def schema(self) -> Schema:
        """Returns labels, types of edges, and their keys."""
        return schema_of(self.read())

    def read(self) -> PropertyGraph:
        """Returns the whole graph; ids are integers if all are.

        Raises:
          DataFormatError: a file of another form.
        """
        try:
            rows = pd.read_csv(self.path, dtype=str, keep_default_na=False)
        except _DAMAGE as error:
            raise DataFormatError(f"{self.path}: no table: {error}") from error
        missing = [name for name in (*VERTEX, *EDGE) if name not in rows.columns]
        if missing:
            raise DataFormatError(f"{self.path}: columns {missing} are missing")
        own = rows["_id"] != ""
        keys = [name for name in rows.columns if name not in (*VERTEX, *EDGE)]
        ids = pd.concat([rows["_id"][own], rows["_start"], rows["_end"]])
        ids = _parse(ids, (_integers,))
        count, edges = int(own.sum()), ~own.to_numpy()
        start, end = (
            ids.iloc[count + part * len(rows) :][: len(rows)][edges] for part in (0, 1)
        )
        vertices = {
            "_id": ids.iloc[:count].to_numpy(),
            "_labels": [
                tuple(sorted(filter(None, text.split(":"))))
                for text in rows["_labels"][own]
            ],
        }
        ends = {"_start": start.to_numpy(), "_end": end.to_numpy()}
        ends["_type"] = rows["_type"][edges].to_numpy()
        return PropertyGraph(
            _table(vertices, rows[own], keys), _table(ends, rows[edges], keys)
        )

    def write(self, label: str, key: str, ids: Any, values: Any) -> None:
        """Sets a property of vertices; the file is written anew, and then replaced.

        Raises:
          ConfigError: an unknown label, or ids of no vertices of that label.
        """
        check_write(key, ids, values)
        graph = self.read()
        vertices = graph.vertices.copy()
        rows = pd.Index(vertices["_id"]).get_indexer(pd.Index(list(ids), dtype=object))
        wrong = (rows < 0) | ~graph.with_label(label)[rows]
        if wrong.any():
            first = list(np.asarray(ids, object)[wrong][:3])
            raise ConfigError(f"{int(wrong.sum())} ids are no {label}: got {first}")
        column = vertices.get(key, pd.Series([None] * len(vertices), dtype=object))
        column = column.astype(object)
        column.iloc[rows] = pd.Series(list(values), dtype=object).to_numpy()
        vertices[key] = column
        self._replace(PropertyGraph(vertices, graph.edges))

    def save(self, graph: PropertyGraph) -> None:
        """Writes a whole graph.

        Raises:
          ConfigError: there is a file already, or a label has a colon.
        """
        if self.path.exists():
            raise ConfigError(f"{self.path} exists: a graph is saved in a new file")
        self._replace(graph)

    def _replace(self, graph: PropertyGraph) -> None:
        keys = sorted({*graph.keys, *graph.edge_keys})
        vertices = graph.vertices.copy()
        split = [one for each in vertices["_labels"] for one in each if ":" in one]
        checks.require(not split, "a label here cannot have a colon", labels=split[:3])
        vertices["_labels"] = [
            "".join(f":{label}" for label in labels) for labels in vertices["_labels"]
        ]
        # As objects: integers with nothing beside them would become floats.
        both = [table.astype(object) for table in (vertices, graph.edges)]
        rows = pd.concat(both, ignore_index=True).reindex(
            columns=[*VERTEX, *keys, *EDGE]
        )
        for name in rows.columns:
            rows[name] = [_print(value) for value in rows[name]]
        packed = "gzip" if self.path.suffix == ".gz" else None
        with files.replacing(self.path) as new:
            rows.to_csv(new, index=False, compression=packed)


def _table(given: dict[str, Any], rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Returns columns, and those of keys that some row has."""
    parsed = {
        key: _parse(rows[key]).to_numpy() for key in keys if (rows[key] != "").any()
    }
    # Else pandas makes a type of its own, with NaN, of strings.
    return pd.DataFrame({**given, **parsed}, dtype=object)


def _parse(text: pd.Series, converts: "tuple[Convert, ...]" = ()) -> pd.Series:
    """Returns the values of a column of text, None where it is empty."""
    there = (text != "").to_numpy()
    present = text[there]
    for convert in converts or _CONVERTS:
        values = convert(present)
        if values is not None:
            break
    else:
        values = list(present)
    found = np.full(len(text), None, object)
    found[there] = pd.Series(values, dtype=object).to_numpy()
    return pd.Series(found, index=text.index, dtype=object)


Converted = list[Any] | None
Convert = Callable[[pd.Series], Converted]


def _attempt(convert: Callable[[str], Any], text: pd.Series) -> Converted:
    try:
        return [convert(each) for each in text]
    except ValueError:
        return None


def _integers(text: pd.Series) -> Converted:
    # "007" and "1_000" are no numbers to anybody but Python.
    plain = text.str.fullmatch(r"-?(0|[1-9]\d{0,18})").all()
    found = _attempt(int, text) if plain else None
    # Others have no integers of more than 64 bits.
    fits = found is None or all(-(2**63) <= each < 2**63 for each in found)
    return found if fits else None


def _numbers(text: pd.Series) -> Converted:
    plain = text.str.fullmatch(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|NaN|-?Infinity")
    leading = text.str.fullmatch(r"-?0\d+")
    return _attempt(float, text) if plain.all() and not leading.any() else None


def _booleans(text: pd.Series) -> Converted:
    return (
        [each == "true" for each in text]
        if text.isin(["true", "false"]).all()
        else None
    )


def _objects(text: pd.Series) -> Converted:
    return _attempt(json.loads, text) if text.str.match(r"[\[{]").all() else None


def _times(text: pd.Series) -> Converted:
    if not text.str.match(r"\d{4}-\d\d-\d\d").all():
        return None
    try:
        return list(pd.to_datetime(text, utc=True, format="ISO8601"))
    except ValueError:
        return None


def _durations(text: pd.Series) -> Converted:
    found = [_DURATION.fullmatch(each) for each in text]
    if not all(found):
        return None
    try:
        return [_duration(**each.groupdict("0")) for each in found if each]
    except OverflowError:
        return None


def _duration(*, years: str, months: str, days: str, **others: str) -> Any:
    whole = float(days) + _MONTH * (12 * float(years) + float(months))
    rest = {name: float(part) for name, part in others.items()}
    return datetime.timedelta(days=whole, **rest)


_DAMAGE = (
    pd.errors.ParserError,
    pd.errors.EmptyDataError,
    UnicodeDecodeError,
    EOFError,
    gzip.BadGzipFile,
    zlib.error,
)
_CONVERTS = (_integers, _numbers, _booleans, _objects, _times, _durations)
_MONTH = 365.25 / 12  # days
_DURATION = re.compile(
    r"P(?=.*\d)((?P<years>-?\d+)Y)?((?P<months>-?\d+)M)?((?P<weeks>-?\d+)W)?"
    r"((?P<days>-?\d+)D)?"
    r"(T((?P<hours>-?\d+)H)?((?P<minutes>-?\d+)M)?((?P<seconds>-?\d+(\.\d+)?)S)?)?"
)


def _print(value: Any) -> Any:
    """Returns the text of a value, which `_parse` reads as the same."""
    if isinstance(value, list | tuple | dict | np.ndarray):
        return json.dumps(value, default=lambda each: each.tolist())
    if pd.isna(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, float | np.floating) and np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime.timedelta | np.timedelta64):
        value = pd.Timedelta(value)
        return f"P{value.days}DT{value.seconds}.{value.microseconds:06d}S"
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
