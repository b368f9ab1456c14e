"""Labelled property graphs as tables, and what stores of them offer."""

import dataclasses
from typing import Any, Protocol

import numpy as np
import pandas as pd

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest

# Names that Neo4j's exports have; keys of properties may be `id` or `type`.
VERTEX, EDGE = ("_id", "_labels"), ("_start", "_end", "_type")


@dataclasses.dataclass(frozen=True, eq=False)
class PropertyGraph:
    """Vertices and edges with labels and properties; a missing property is None or NaN.

    Properties are booleans, numbers, strings, lists of strings or numbers, `datetime`s,
    `timedelta`s, or points `{"latitude": ..., "longitude": ...}`.

    Attributes:
      vertices: a row each, with `_id`, `_labels` (a tuple of strings), and a column for
        each key.
      edges: a row each, with `_start` and `_end`, ids of vertices, `_type`, and a
        column for each key.

    Raises:
      ConfigError: a column that is missing, an id twice, missing, or a float that
        could be of several integers, or edges to vertices that are not there.
    """

    vertices: pd.DataFrame
    edges: pd.DataFrame

    def __post_init__(self) -> None:
        for table, wanted in ((self.vertices, VERTEX), (self.edges, EDGE)):
            missing = [name for name in wanted if name not in table.columns]
            rule = f"a property graph needs columns {wanted}"
            checks.require(not missing, rule, columns=list(table.columns))
        for ids in (self.vertices["_id"], self.edges["_start"], self.edges["_end"]):
            _check_ids(ids)
        twice = self.vertices["_id"][self.vertices["_id"].duplicated()]
        rule = "ids must be of one vertex each"
        checks.require(not len(twice), rule, twice=list(twice[:3]))
        self.ends()

    @property
    def keys(self) -> list[str]:
        """Keys of vertices, sorted."""
        return sorted(set(self.vertices.columns) - set(VERTEX))

    @property
    def edge_keys(self) -> list[str]:
        """Keys of edges, sorted."""
        return sorted(set(self.edges.columns) - set(EDGE))

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of the vertices that edges leave and reach, int32.

        Raises:
          ConfigError: edges to vertices that are not there, their number and first ids.
        """
        # As objects: beside floats pandas would take two large integers for one.
        index = pd.Index(self.vertices["_id"], dtype=object)
        found = [
            index.get_indexer(pd.Index(self.edges[end], dtype=object))
            for end in ("_start", "_end")
        ]
        lost = pd.concat(
            [
                self.edges[end][rows < 0]
                for end, rows in zip(("_start", "_end"), found, strict=True)
            ]
        )
        if len(lost):
            raise ConfigError(
                f"{len(lost)} ends of edges are no vertices: {list(lost.unique()[:3])}"
            )
        senders, receivers = (rows.astype(np.int32) for rows in found)
        return senders, receivers

    def column(self, key: str) -> pd.Series:
        """Returns the values of vertices for a key.

        Raises:
          ConfigError: an unknown key; names the nearest.
        """
        if key not in self.keys:
            raise ConfigError(f"no vertex has the key {key!r}{nearest(key, self.keys)}")
        return self.vertices[key]

    def with_label(self, label: str) -> np.ndarray:
        """Returns which vertices have a label, bool [vertices].

        Raises:
          ConfigError: an unknown label; names the nearest.
        """
        known = sorted({one for each in self.vertices["_labels"] for one in each})
        if label not in known:
            raise ConfigError(
                f"no vertex has the label {label!r}{nearest(label, known)}"
            )
        return np.array([label in each for each in self.vertices["_labels"]], bool)


def _check_ids(ids: pd.Series) -> None:
    """Raises ConfigError for ids that are missing, or floats that were integers."""
    rows = np.flatnonzero(ids.isna())[:3].tolist()
    checks.require(not rows, "no id may be missing", column=ids.name, rows=rows)
    whole = (each for each in ids.astype(object) if isinstance(each, float))
    lost = [each for each in whole if abs(each) >= 2**53][:3]
    rule = "ids of 2**53 and more cannot be floats, which several integers share"
    checks.require(not lost, rule, column=ids.name, ids=lost)


@dataclasses.dataclass(frozen=True)
class Schema:
    """What a store has.

    Attributes:
      labels: of vertices, with the keys that some vertex of each has.
      types: of edges, likewise.
    """

    labels: dict[str, tuple[str, ...]]
    types: dict[str, tuple[str, ...]]


def schema_of(graph: PropertyGraph) -> Schema:
    """Returns the schema of a graph in memory, names sorted."""
    groups = graph.vertices["_labels"].explode()
    labels = {
        str(label): _keys(graph.vertices.loc[rows.index], graph.keys)
        for label, rows in groups.groupby(groups)
    }
    types = {
        str(name): _keys(rows, graph.edge_keys)
        for name, rows in graph.edges.groupby("_type")
    }
    return Schema(labels, types)


def _keys(rows: pd.DataFrame, keys: list[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if rows[key].notna().any())


def check_write(key: str, ids: Any, values: Any) -> None:
    """Checks what is to be written.

    Raises:
      ConfigError: a key that stores use, an id twice, or another number of values.
    """
    checks.require(
        key not in (*VERTEX, *EDGE, ""), "this cannot be the key of a property", key=key
    )
    rule = "ids and values must be as many"
    checks.require(len(ids) == len(values), rule, ids=len(ids), values=len(values))
    ids = pd.Index(list(ids), dtype=object)
    twice = list(ids[ids.duplicated()][:3])
    checks.require(not twice, "a vertex gets one value", twice=twice)


class GraphStore(Protocol):
    """Where a property graph lies: a database, or a file."""

    def schema(self) -> Schema:
        """Returns labels, types of edges, and their keys."""
        ...

    def read(self) -> PropertyGraph:
        """Returns the whole graph."""
        ...

    def write(self, label: str, key: str, ids: Any, values: Any) -> None:
        """Sets a property of the vertices of a label, by id.

        Args:
          label: of the vertices.
          key: of the property, new or not.
          ids: of vertices.
          values: one for each.
        """
        ...

    def save(self, graph: PropertyGraph) -> None:
        """Writes a whole graph into a store that is empty."""
        ...


def copy(source: GraphStore, target: GraphStore) -> None:
    """Writes what one store has into another, which is empty."""
    target.save(source.read())
