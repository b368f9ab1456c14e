"""Property graphs in a database of the embedded graph engine ladybug."""

import contextlib
import dataclasses
import importlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, DataMissing, nearest
from hpcjax.graphs.lpg.property_graph import (
    EDGE,
    VERTEX,
    PropertyGraph,
    Schema,
    check_write,
    schema_of,
)

# ladybug keeps the name `_id` to itself.
KEY = "_key"
_SCALARS = (
    (("is_null", "is_string", "is_large_string"), "string", "STRING"),
    (("is_boolean",), "bool_", "BOOL"),
    (("is_integer",), "int64", "INT64"),
    (("is_floating", "is_decimal"), "float64", "DOUBLE"),
    (("is_duration",), "duration", "INTERVAL"),
    (("is_date", "is_timestamp"), "timestamp", "TIMESTAMP_TZ"),
)
_TYPE = "type of edges: "
_ENDS = {"from": "_start", "to": "_end"}
_NONE: Any = None


@dataclasses.dataclass(frozen=True)
class LadybugStore:
    """A database with a table for each type of edge, and tables of vertices.

    A vertex lies in the table of its first label, with the column `_labels` for all.
    Databases that others made are read too: the label of a vertex is its table, and its
    id the primary key, as "table:key" if tables share keys.

    Values of a key have one type in each table, integers beside other numbers becoming
    floats; times are in UTC and have microseconds. Of points in one table, each has all
    fields that some have, None where it had none.

    Attributes:
      path: of the database.
      memory: that the engine may use, in bytes; 0 for most of the machine's.
    """

    path: pathlib.Path
    memory: int = 0

    def schema(self) -> Schema:
        """Returns labels, types of edges, and their keys.

        Raises:
          DataMissing: there is no database.
          ConfigError: it cannot be opened, or ladybug is not installed.
        """
        return schema_of(self.read())

    def read(self) -> PropertyGraph:
        """Returns the whole graph.

        Raises:
          DataMissing: there is no database.
          ConfigError: it cannot be opened, or ladybug is not installed.
        """
        if not self.path.exists():
            raise DataMissing(f"{self.path}: there is no such database")
        with self._session(read_only=True) as link:
            tables = {table.name: table for table in _tables(link)}
            parts = {
                name: _vertices(link, table)
                for name, table in tables.items()
                if table.key
            }
            _name(parts)
            edges = [
                _edges(link, table, parts, tables[source], tables[target])
                for table in tables.values()
                if not table.key
                for source, target in _pairs(link, table)
            ]
        vertices = [part.drop(columns=KEY) for part in parts.values()]
        return PropertyGraph(_joined(vertices, VERTEX), _joined(edges, EDGE))

    def write(self, label: str, key: str, ids: Any, values: Any) -> None:
        """Sets a property of the vertices of a label, by id: all of them, or none.

        Args:
          label: of the vertices.
          key: of the property, new or not.
          ids: of vertices.
          values: one for each.

        Raises:
          DataMissing: there is no database.
          ConfigError: an unknown label, ids of no vertices of that label, or values of
            another type than the key has.
        """
        if not self.path.exists():
            raise DataMissing(f"{self.path}: there is no such database")
        check_write(key, ids, values)
        column = _column(key, values)
        with self._session() as link:
            tables = {table.name: table for table in _tables(link) if table.key}
            parts = {
                name: _vertices(link, table, properties=False)
                for name, table in tables.items()
            }
            _name(parts)
            targets = _targets(parts, label, ids)
            for name, rows in _groups(targets["table"]).items():
                keys = _column(KEY, targets[KEY].to_numpy()[rows])
                _set(link, tables[name], key, keys, column.take(rows))

    def save(self, graph: PropertyGraph) -> None:
        """Writes a whole graph.

        Raises:
          ConfigError: the database is not empty, or has no type for ids or values.
        """
        checks.require(
            KEY not in graph.keys, "the database keeps this key to itself", key=KEY
        )
        steps = list(_steps(graph))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._session() as link:
            there = [table.name for table in _tables(link)]
            rule = f"{self.path}: a graph is saved in an empty database"
            checks.require(not there, rule, tables=there)
            for query, given in steps:
                link.execute(query, given)

    @contextlib.contextmanager
    def _session(self, *, read_only: bool = False) -> Iterator[Any]:
        """Yields a connection with a transaction, which an error undoes."""
        engine = _package("ladybug")
        try:
            with (
                engine.Database(
                    self.path, read_only=read_only, buffer_pool_size=self.memory
                ) as database,
                engine.Connection(database) as link,
            ):
                link.execute("BEGIN TRANSACTION")
                yield link
                link.execute("COMMIT")
        except RuntimeError as error:
            raise ConfigError(f"{self.path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Table:
    """A table of vertices, which has a primary key, or of edges.

    Attributes:
      name: of the table.
      comment: on it.
      key: the column that is the primary key; empty for edges.
      kinds: types of columns, by name.
    """

    name: str
    comment: str
    key: str
    kinds: Mapping[str, str]

    @property
    def keys(self) -> list[str]:
        """Columns that are properties."""
        return [name for name in self.kinds if name not in (*VERTEX, *EDGE, KEY)]

    @property
    def own(self) -> bool:
        """Whether `LadybugStore` made it."""
        return self.key == KEY and self.kinds.get("_labels") == "STRING[]"

    @property
    def type(self) -> str:
        """Type of its edges."""
        marked = self.comment.startswith(_TYPE)
        return self.comment.removeprefix(_TYPE) if marked else self.name


def _package(name: str) -> Any:
    """Returns a package of the extra `graphdb`.

    Raises:
      ConfigError: it is not installed; the message has the command.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{name} is needed: pip install 'hpcjax[graphdb]' ({error})"
        ) from error


def _ask(link: Any, query: str, given: dict[str, Any] | None = None) -> Any:
    """Returns the answer as an Arrow table."""
    return link.execute(query, given).get_as_arrow(1_000_000)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _tables(link: Any) -> list[_Table]:
    """Returns tables of vertices and edges, by name."""
    found = []
    shown = _ask(link, "CALL show_tables() RETURN name, type, comment").to_pylist()
    for row in shown:
        if row["type"] not in ("NODE", "REL"):
            continue
        query = f"CALL table_info({_literal(row['name'])}) RETURN *"
        columns = _ask(link, query).to_pylist()
        key = [each["name"] for each in columns if each.get("primary key")]
        kinds = {each["name"]: each["type"] for each in columns}
        found.append(_Table(row["name"], row["comment"], "".join(key), kinds))
    return sorted(found, key=lambda table: table.name)


def _pairs(link: Any, table: _Table) -> list[tuple[str, str]]:
    """Returns the tables of vertices that edges of a table join."""
    query = f"CALL show_connection({_literal(table.name)}) RETURN *"
    return [
        (row["source table name"], row["destination table name"])
        for row in _ask(link, query).to_pylist()
    ]


def _rows(link: Any, pattern: str, wanted: Mapping[str, str]) -> pd.DataFrame:
    """Returns a column for each name and expression."""
    # Names of columns of the answer could be the same but for case.
    what = ", ".join(f"{each} AS c{at}" for at, each in enumerate(wanted.values()))
    found = _ask(link, f"MATCH {pattern} RETURN {what}")
    columns = {name: _values(found.column(at)) for at, name in enumerate(wanted)}
    return pd.DataFrame(columns, dtype=object)


def _values(column: Any) -> pd.Series:
    """Returns a column of Arrow as Python's objects, times in UTC."""
    arrow = _package("pyarrow")
    kinds = arrow.types
    if kinds.is_date(column.type) or kinds.is_timestamp(column.type):
        column = column.cast(arrow.timestamp("us"), safe=False)
        column = column.cast(arrow.timestamp("us", "UTC"))
    elif kinds.is_decimal(column.type):
        column = column.cast(arrow.float64())
    return pd.Series(column.to_pylist(), dtype=object)


def _vertices(link: Any, table: _Table, *, properties: bool = True) -> pd.DataFrame:
    """Returns vertices of a table; their ids are the primary key as yet."""
    wanted = {name: f"a.{_quoted(name)}" for name in table.keys if properties}
    given = {"_id": f"a.{_quoted(table.key)}"}
    if table.own:
        given["_labels"] = "a.`_labels`"
    rows = _rows(link, f"(a:{_quoted(table.name)})", given | wanted)
    labels = (
        [tuple(sorted(each)) for each in rows["_labels"]]
        if table.own
        else [(table.name,)] * len(rows)
    )
    rows["_labels"] = pd.Series(labels, index=rows.index, dtype=object)
    rows[KEY] = rows["_id"]
    return rows


def _name(parts: dict[str, pd.DataFrame]) -> None:
    """Sets ids: keys if no tables share one, else "table:key"."""
    keys = [key for part in parts.values() for key in part[KEY]]
    if len(set(keys)) == len(keys):
        return
    for name, part in parts.items():
        part["_id"] = pd.Series([f"{name}:{key}" for key in part[KEY]], dtype=object)


def _edges(
    link: Any,
    table: _Table,
    parts: dict[str, pd.DataFrame],
    source: _Table,
    target: _Table,
) -> pd.DataFrame:
    """Returns the edges of a table between two tables of vertices."""
    ends = {
        "_start": f"a.{_quoted(source.key)}",
        "_end": f"b.{_quoted(target.key)}",
    }
    wanted = {name: f"r.{_quoted(name)}" for name in table.keys}
    one, edge, other = (_quoted(each.name) for each in (source, table, target))
    rows = _rows(link, f"(a:{one})-[r:{edge}]->(b:{other})", {**ends, **wanted})
    for end, home in (("_start", source), ("_end", target)):
        part = parts[home.name]
        at = pd.Index(part[KEY], dtype=object).get_indexer(pd.Index(rows[end]))
        rows[end] = part["_id"].to_numpy()[at]
    rows["_type"] = table.type
    return rows


def _joined(parts: list[pd.DataFrame], first: tuple[str, ...]) -> pd.DataFrame:
    """Returns all rows, with the columns that some row has, sorted after the first."""
    table = pd.concat([pd.DataFrame(columns=first, dtype=object), *parts])
    table = table.astype(object).reset_index(drop=True)
    table = table.mask(table.isna(), other=_NONE)
    keys = [name for name in table.columns if table[name].notna().any()]
    return table[[*first, *sorted(set(keys) - set(first))]]


def _targets(parts: dict[str, pd.DataFrame], label: str, ids: Any) -> pd.DataFrame:
    """Returns the tables and primary keys of vertices of a label, by id."""
    everything = _joined(
        [part.assign(table=name) for name, part in parts.items()],
        (*VERTEX, KEY, "table"),
    )
    known = sorted({one for each in everything["_labels"] for one in each})
    if label not in known:
        raise ConfigError(f"no vertex has the label {label!r}{nearest(label, known)}")
    there = everything[[label in each for each in everything["_labels"]]]
    wanted = pd.Index(list(ids), dtype=object)
    rows = pd.Index(there["_id"], dtype=object).get_indexer(wanted)
    if (rows < 0).any():
        first = list(wanted[rows < 0][:3])
        raise ConfigError(f"{int((rows < 0).sum())} ids are no {label}: got {first}")
    return there.iloc[rows]


def _set(link: Any, table: _Table, key: str, keys: Any, column: Any) -> None:
    """Sets a property of rows of a table, by primary key."""
    arrow = _package("pyarrow")
    kind, known = _types(column.type)[1], table.kinds.get(key)
    missing = column.null_count == len(column)
    if known is None and missing:
        return
    if known is None:
        link.execute(f"ALTER TABLE {_quoted(table.name)} ADD {_quoted(key)} {kind}")
    elif (kind, known) == ("INT64", "DOUBLE"):
        column = column.cast(arrow.float64())
    elif kind != known and not missing:
        raise ConfigError(f"{key!r} of {table.name} is {known}: got values of {kind}")
    # Tables of Arrow lose the time zone here; all times are in UTC.
    value = "NULL" if missing else f"CAST(value_ AS {known or kind})"
    link.execute(
        f"LOAD FROM $rows MATCH (a:{_quoted(table.name)}) "
        f"WHERE a.{_quoted(table.key)} = key_ SET a.{_quoted(key)} = {value}",
        {"rows": arrow.table({"key_": keys, "value_": column})},
    )


def _types(found: Any) -> tuple[Any, str]:
    """Returns the type of Arrow and of ladybug for values of an Arrow type.

    Raises:
      ConfigError: there is none.
    """
    arrow = _package("pyarrow")
    if arrow.types.is_list(found):
        kind, text = _types(found.value_type)
        return arrow.list_(kind), f"{text}[]"
    if arrow.types.is_struct(found):
        fields = [(field.name, *_types(field.type)) for field in found]
        text = ", ".join(f"{name} {text}" for name, _, text in fields)
        return arrow.struct([field[:2] for field in fields]), f"STRUCT({text})"
    for fits, kind, text in _SCALARS:
        if any(getattr(arrow.types, each)(found) for each in fits):
            given = {"duration": ("us",), "timestamp": ("us", "UTC")}.get(kind, ())
            return getattr(arrow, kind)(*given), text
    raise ConfigError(f"a property cannot have the type {found}")


def _column(key: str, values: Any) -> Any:
    """Returns values as Arrow.

    Raises:
      ConfigError: values of several types, or of one that has no column.
    """
    arrow = _package("pyarrow")
    try:
        found = arrow.array(list(values), from_pandas=True)
        return found.cast(_types(found.type)[0], safe=not _is_time(found.type))
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
        raise ConfigError(f"{key!r} cannot be a column: {error}") from error


def _is_time(kind: Any) -> bool:
    types = _package("pyarrow").types
    return types.is_timestamp(kind) or types.is_duration(kind)


Step = tuple[str, dict[str, Any] | None]


def _steps(graph: PropertyGraph) -> Iterator[Step]:
    """Yields the statements that save a graph, with the tables that they name."""
    vertices, edges = graph.vertices, graph.edges
    firsts = np.array([min(each, default="") for each in vertices["_labels"]], object)
    taken: set[str] = set()
    names = _free(sorted(set(firsts)), taken)
    types = _free(sorted(set(edges["_type"])), taken)
    for label, name in names.items():
        rows = vertices[firsts == label]
        yield from _vertex_steps(name, rows, graph.keys)
    homes = np.array([names[label] for label in firsts], object)
    senders, receivers = graph.ends()
    for kind, name in types.items():
        at = np.flatnonzero(edges["_type"] == kind)
        pairs = pd.MultiIndex.from_arrays([homes[senders[at]], homes[receivers[at]]])
        yield from _edge_steps(name, kind, edges.iloc[at], pairs, graph.edge_keys)


def _free(names: list[str], taken: set[str]) -> dict[str, str]:
    """Returns names of tables, which ladybug tells apart without case."""
    found = {}
    for name in names:
        new = name or "_"
        while new.lower() in taken:
            new += "_"
        taken.add(new.lower())
        found[name] = new
    return found


def _groups(names: Any) -> dict[Any, np.ndarray]:
    """Returns the places of each name."""
    codes, found = pd.factorize(names)
    return {name: np.flatnonzero(codes == at) for at, name in enumerate(found)}


def _columns(rows: pd.DataFrame, keys: list[str]) -> dict[str, Any]:
    """Returns the columns that some row has."""
    return {key: _column(key, rows[key]) for key in keys if rows[key].notna().any()}


def _declared(columns: Mapping[str, Any]) -> list[str]:
    return [
        f"{_quoted(name)} {_types(column.type)[1]}" for name, column in columns.items()
    ]


def _vertex_steps(name: str, rows: pd.DataFrame, keys: list[str]) -> Iterator[Step]:
    arrow = _package("pyarrow")
    ids = _column("_id", rows["_id"])
    kind = _types(ids.type)[1]
    rule = "ids of vertices with the same first label must be integers, or all strings"
    checks.require(kind in ("INT64", "STRING"), rule, type=kind)
    labels = arrow.array(list(rows["_labels"]), arrow.list_(arrow.string()))
    columns = {"_labels": labels, **_columns(rows, keys)}
    parts = [f"{KEY} {kind} PRIMARY KEY", *_declared(columns)]
    yield f"CREATE NODE TABLE {_quoted(name)}({', '.join(parts)})", None
    table = arrow.table({KEY: ids, **columns})
    yield f"COPY {_quoted(name)} FROM $rows", {"rows": table}


def _edge_steps(
    name: str, kind: str, rows: pd.DataFrame, ends: pd.MultiIndex, keys: list[str]
) -> Iterator[Step]:
    arrow = _package("pyarrow")
    columns = _columns(rows, keys)
    # COPY would fill these with the ends of edges: they get their names after it.
    later = {key: f"{key}_{len(columns)}" for key in columns if key.lower() in _ENDS}
    columns = {later.get(key, key): column for key, column in columns.items()}
    groups = _groups(ends)
    table = _quoted(name)
    parts = [
        *(f"FROM {_quoted(one)} TO {_quoted(other)}" for one, other in groups),
        *_declared(columns),
    ]
    yield f"CREATE REL TABLE {table}({', '.join(parts)})", None
    if name != kind:
        yield f"COMMENT ON TABLE {table} IS {_literal(_TYPE + kind)}", None
    for (one, other), at in groups.items():
        given = {
            **{
                side: _column(end, rows[end].to_numpy()[at])
                for side, end in _ENDS.items()
            },
            **{key: column.take(at) for key, column in columns.items()},
        }
        where = f"(from={_literal(one)}, to={_literal(other)})"
        yield f"COPY {table} FROM $rows {where}", {"rows": arrow.table(given)}
    for key, old in later.items():
        yield f"ALTER TABLE {table} RENAME {_quoted(old)} TO {_quoted(key)}", None
