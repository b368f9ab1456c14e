"""Features of labels and properties, as entries that are not zero.

Each kind of key has three functions in `KINDS`: what it learns of the values of
training rows, the names of its columns, and the entries of values. Entries are (rows,
columns, numbers); what is missing, unknown or zero has none.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import sparse

from hpcjax.core.errors import ConfigError
from hpcjax.graphs.features import SparseRows
from hpcjax.graphs.lpg import words
from hpcjax.graphs.lpg.property_graph import PropertyGraph
from hpcjax.graphs.lpg.spec import EncoderSpec, KeySpec, present, type_of
from hpcjax.graphs.lpg.values import take_values, tell_key

Stats = dict[str, Any]
Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
_CYCLES = ("month", "weekday", "hour")


class Encoder(NamedTuple):
    """The functions of a kind.

    Attributes:
      fit: `(values, spec) -> stats` of training rows; a dict that JSON holds.
      names: `(stats, spec) -> names` of columns, behind that of the key.
      encode: `(values, stats, spec) -> entries`, rows counted in the values.
    """

    fit: Callable[[pd.Series, KeySpec], Stats]
    names: Callable[[Stats, KeySpec], list[str]]
    encode: Callable[[pd.Series, Stats, KeySpec], Entries]


def _nothing(values: pd.Series, spec: KeySpec) -> Stats:
    del values, spec
    return {}


def _alone(stats: Stats, spec: KeySpec) -> list[str]:
    del stats, spec
    return [""]


def _column(numbers: np.ndarray, column: int = 0) -> Entries:
    rows = np.arange(len(numbers))
    return rows, np.full(len(numbers), column), np.asarray(numbers, float)


def _join(parts: Iterable[Entries]) -> Entries:
    rows, columns, numbers = zip(*parts, strict=True)
    return (
        np.concatenate(rows, dtype=np.int32),
        np.concatenate(columns, dtype=np.int32),
        np.concatenate(numbers, dtype=np.float32),
    )


def _encode_boolean(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    del stats, spec
    return _column(values.astype(float).to_numpy())


def _as_numbers(values: pd.Series) -> np.ndarray:
    """Returns numbers, of durations their seconds."""
    if len(values) and type_of(values.iloc[0]) == "duration":
        return pd.to_timedelta(values).dt.total_seconds().to_numpy(float)
    return values.astype(float).to_numpy()


def _fit_range(values: pd.Series, spec: KeySpec) -> Stats:
    del spec
    numbers = _as_numbers(values)
    return _range_of(numbers)


def _range_of(numbers: np.ndarray) -> Stats:
    low, high = (numbers.min(), numbers.max()) if len(numbers) else (0.0, 0.0)
    return {"low": float(low), "high": float(high)}


def _scale(numbers: np.ndarray, stats: Stats) -> np.ndarray:
    """Returns (x - low) / (high - low) within [0, 1]; 0 where all were equal."""
    width = stats["high"] - stats["low"]
    if width == 0:
        return np.zeros(len(numbers))
    return np.clip((numbers - stats["low"]) / width, 0, 1)


def _encode_numeric(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    del spec
    return _column(_scale(_as_numbers(values), stats))


def _fit_vectors(values: pd.Series, spec: KeySpec) -> Stats:
    del spec
    columns = zip(*values, strict=True)
    return {"ranges": [_range_of(np.array(column, float)) for column in columns]}


def _name_vectors(stats: Stats, spec: KeySpec) -> list[str]:
    del spec
    return [f"[{at}]" for at in range(len(stats["ranges"]))]


def _encode_vectors(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    del spec
    # Without values in training, or here, there are no columns.
    pairs = zip(zip(*values, strict=True), stats["ranges"], strict=False)
    scaled = [_scale(np.array(column, float), own) for column, own in pairs]
    return _join([_empty(), *(_column(each, at) for at, each in enumerate(scaled))])


def _fit_bins(values: pd.Series, spec: KeySpec) -> Stats:
    """Returns the inner edges of bins with equally many values, right-closed.

    Edges that are equal become one. Of fewer than four different values each is a bin.
    """
    numbers = _as_numbers(values)
    different = np.unique(numbers)
    if len(different) < 4:
        return {"values": different.tolist()}
    count = min(spec.bins, len(different) // 2)
    inner = np.quantile(numbers, np.arange(1, count) / count)
    # An edge at the largest value would leave the last bin empty.
    return {"edges": np.unique(inner[inner < different[-1]]).tolist()}


def _name_bins(stats: Stats, spec: KeySpec) -> list[str]:
    del spec
    if "values" in stats:
        return [f"={value:g}" for value in stats["values"]]
    ends = ["", *(f"{edge:g}" for edge in stats["edges"]), ""]
    return [f":({low},{high}]" for low, high in itertools.pairwise(ends)]


def _encode_bins(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    del spec
    numbers = _as_numbers(values)
    if "values" in stats:
        known = pd.Index(stats["values"]).get_indexer(pd.Index(numbers))
        return _one_hot(np.arange(len(numbers)), known)
    bins = np.searchsorted(stats["edges"], numbers, side="left")
    return _one_hot(np.arange(len(numbers)), bins)


def _one_hot(rows: np.ndarray, columns: np.ndarray) -> Entries:
    """Returns ones; a column below 0 is of a value that nobody knows."""
    known = columns >= 0
    return rows[known], columns[known], np.ones(int(known.sum()))


def _items(values: pd.Series) -> tuple[np.ndarray, pd.Index]:
    """Returns the row of each item, and the items as text, each once in a row."""
    lists = [
        sorted({str(one) for one in value})
        if isinstance(value, words.LISTS)
        else [str(value)]
        for value in values
    ]
    rows = np.repeat(np.arange(len(lists)), [len(each) for each in lists])
    return rows, pd.Index([one for each in lists for one in each], dtype=object)


def _fit_categories(values: pd.Series, spec: KeySpec) -> Stats:
    found = sorted(set(_items(values)[1]))
    if len(found) > spec.categories:
        raise ConfigError(
            f"{spec.key} is categorical with at most {spec.categories} values: got "
            f"{len(found)}"
        )
    return {"values": found}


def _encode_categories(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    del spec
    rows, items = _items(values)
    known = pd.Index(stats["values"], dtype=object)
    return _one_hot(rows, known.get_indexer(items))


def count_unseen(values: pd.Series, stats: Stats) -> int:
    """Returns how many items of a categorical key no training row had."""
    known = pd.Index(stats["values"], dtype=object)
    return int((known.get_indexer(_items(values)[1]) < 0).sum())


def _encode_text(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    """Returns counts of hashed words and trigrams, each row of length 1."""
    del stats
    found = words.count_tokens(values, spec.buckets).tocoo()
    rows, columns = found.coords
    sizes = np.sqrt(np.bincount(rows, found.data**2, len(values)))
    found.data /= sizes[rows]
    return rows, columns, found.data


def _empty() -> Entries:
    return np.zeros(0, int), np.zeros(0, int), np.zeros(0)


def _as_times(values: pd.Series) -> pd.DatetimeIndex:
    return pd.DatetimeIndex(pd.to_datetime(values, utc=True, format="ISO8601"))


def _seconds(times: pd.DatetimeIndex) -> np.ndarray:
    epoch = pd.Timestamp(0, tz="UTC")
    return np.asarray((times - epoch).total_seconds(), float)


def _fit_times(values: pd.Series, spec: KeySpec) -> Stats:
    del spec
    return _range_of(_seconds(_as_times(values)))


def _name_times(stats: Stats, spec: KeySpec) -> list[str]:
    del stats, spec
    return ["", *(f":{cycle}:{f}" for cycle in _CYCLES for f in ("sin", "cos"))]


def _encode_times(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    del spec
    times = _as_times(values)
    phases = (times.month - 1) / 12, times.day_of_week / 7, times.hour / 24
    angles = [2 * np.pi * np.asarray(phase, float) for phase in phases]
    found = [_scale(_seconds(times), stats)]
    found += [f(angle) for angle in angles for f in (np.sin, np.cos)]
    return _join(_column(numbers, at) for at, numbers in enumerate(found))


def _name_point(stats: Stats, spec: KeySpec) -> list[str]:
    del stats, spec
    return [":x", ":y", ":z"]


def _encode_points(values: pd.Series, stats: Stats, spec: KeySpec) -> Entries:
    """Returns places on the unit sphere, where -180 and 180 degrees meet."""
    del stats, spec
    given = [(each["latitude"], each["longitude"]) for each in values]
    latitude, longitude = np.array(given, float).reshape(-1, 2).T
    phi, theta = np.radians(longitude), np.radians(latitude)
    axes = (np.cos(theta) * np.cos(phi), np.cos(theta) * np.sin(phi), np.sin(theta))
    return _join(_column(numbers, at) for at, numbers in enumerate(axes))


KINDS: dict[str, Encoder] = {
    "boolean": Encoder(_nothing, _alone, _encode_boolean),
    "numeric": Encoder(_fit_range, _alone, _encode_numeric),
    "vector": Encoder(_fit_vectors, _name_vectors, _encode_vectors),
    "binned": Encoder(_fit_bins, _name_bins, _encode_bins),
    "categorical": Encoder(
        _fit_categories,
        lambda stats, _: [f"={value}" for value in stats["values"]],
        _encode_categories,
    ),
    "text": Encoder(
        _nothing, lambda _, spec: [f"#{at}" for at in range(spec.buckets)], _encode_text
    ),
    "temporal": Encoder(_fit_times, _name_times, _encode_times),
    "point": Encoder(_nothing, _name_point, _encode_points),
}


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedGraph:
    """Features of a graph.

    Attributes:
      features: of vertices.
      edge_features: float32 [edges, columns], the type first.
      names: of the vertices' columns.
      edge_names: of the edges'.
      slices: the columns of labels, `""`, and of each key of vertices.
      unseen: values of each categorical key that no training row had, how many.
    """

    features: SparseRows
    edge_features: np.ndarray
    names: tuple[str, ...]
    edge_names: tuple[str, ...]
    slices: dict[str, slice]
    unseen: dict[str, int]


@dataclasses.dataclass(frozen=True)
class FittedEncoder:
    """A layout, and what its kinds have learnt of training rows.

    Attributes:
      spec: the layout.
      stats: by key of vertices.
      edge_stats: by key of edges.
      transductive: whether they are of all rows.
    """

    spec: EncoderSpec
    stats: dict[str, Stats]
    edge_stats: dict[str, Stats]
    transductive: bool = False

    def to_json(self) -> str:
        """Returns what `from_json` reads."""
        own = {name: getattr(self, name) for name in ("stats", "edge_stats")}
        spec = json.loads(self.spec.to_json())
        return json.dumps({"spec": spec, **own, "transductive": self.transductive})

    @classmethod
    def from_json(cls, text: str) -> "FittedEncoder":
        """Returns an encoder of its text.

        Raises:
          ConfigError: of another version.
        """
        given = json.loads(text)
        spec = EncoderSpec.from_json(json.dumps(given.pop("spec")))
        return cls(spec=spec, **given)

    def transform(self, graph: PropertyGraph) -> EncodedGraph:
        """Returns the features of a graph, which may be another one.

        Raises:
          ConfigError: a key that it has not, or values that its kind cannot take.
        """
        labels = [_one_of(self.spec.labels, own) for own in graph.vertices["_labels"]]
        rows = np.repeat(np.arange(len(labels)), [len(each) for each in labels])
        known = np.array([one for each in labels for one in each], int)
        parts = [("", [f"label:{x}" for x in self.spec.labels], _one_hot(rows, known))]
        parts += _encode_all(graph.vertices, self.spec.keys, self.stats)
        names, slices, entries = _lay_out(parts)
        known_types = pd.Index(self.spec.types, dtype=object)
        types = known_types.get_indexer(pd.Index(graph.edges["_type"]))
        own = [("", [f"type:{x}" for x in self.spec.types], _typed(types))]
        own += _encode_all(graph.edges, self.spec.edge_keys, self.edge_stats)
        edge_names, _, of_edges = _lay_out(own)
        dense = np.zeros((len(graph.edges), len(edge_names)), np.float32)
        dense[of_edges[0], of_edges[1]] = of_edges[2]
        return EncodedGraph(
            features=_as_rows(entries, len(graph.vertices), len(names)),
            edge_features=dense,
            names=tuple(names),
            edge_names=tuple(edge_names),
            slices=slices,
            unseen={
                each.key: count_unseen(
                    present(graph.vertices, each.key), self.stats[each.key]
                )
                for each in self.spec.keys
                if each.kind == "categorical"
            },
        )


def _one_of(known: tuple[str, ...], own: Iterable[str]) -> list[int]:
    return [known.index(label) for label in own if label in known]


def _typed(types: np.ndarray) -> Entries:
    return _one_hot(np.arange(len(types)), types)


def _encode_all(
    table: pd.DataFrame, keys: Iterable[KeySpec], stats: dict[str, Stats]
) -> list[tuple[str, list[str], Entries]]:
    """Returns each key with the names of its columns, and its entries."""
    table, found = table.reset_index(drop=True), []
    for spec in keys:
        kind, own = KINDS[spec.kind], stats[spec.key]
        values = take_values(table, spec, len(own.get("ranges", ())))
        at = values.index.to_numpy()
        with tell_key(spec):
            rows, columns, numbers = kind.encode(values, own, spec)
        names = [spec.key + name for name in kind.names(own, spec)]
        parts = [(at[rows], columns, numbers)]
        if spec.missing:
            parts.append((at, np.full(len(at), len(names)), np.ones(len(at))))
            names.append(f"{spec.key}?")
        found.append((spec.key, names, _join(parts)))
    return found


def _lay_out(
    parts: list[tuple[str, list[str], Entries]],
) -> tuple[list[str], dict[str, slice], Entries]:
    """Puts the columns of parts beside each other."""
    names: list[str] = []
    slices, entries = {}, [_empty()]
    for key, own, (rows, columns, numbers) in parts:
        slices[key] = slice(len(names), len(names) + len(own))
        entries.append((rows, columns + len(names), numbers))
        names += own
    return names, slices, _join(entries)


def _as_rows(entries: Entries, count: int, width: int) -> SparseRows:
    rows, columns, numbers = entries
    found = sparse.csr_array((numbers, (rows, columns)), shape=(count, width))
    found.eliminate_zeros()
    found.sort_indices()
    return SparseRows(
        offsets=found.indptr.astype(np.int32, copy=False),
        columns=found.indices.astype(np.int32, copy=False),
        values=found.data,
        width=width,
    )


def fit(
    spec: EncoderSpec,
    graph: PropertyGraph,
    rows: np.ndarray,
    *,
    transductive: bool = False,
) -> FittedEncoder:
    """Learns ranges, bins and categories of the training rows.

    Args:
      spec: the layout.
      graph: any that has its keys.
      rows: numbers of the vertices of training; edges between these are, too.
      transductive: whether all rows are looked at instead.

    Raises:
      ConfigError: a key that the graph has not, more values than a categorical key may
        have, or values that a kind cannot take.
    """
    vertices, edges = graph.vertices, graph.edges
    if not transductive:
        own = np.zeros(len(vertices), bool)
        own[rows] = True
        senders, receivers = graph.ends()
        vertices, edges = vertices[own], edges[own[senders] & own[receivers]]

    def learn(table: pd.DataFrame, keys: Iterable[KeySpec]) -> dict[str, Stats]:
        found = {}
        for each in keys:
            values = take_values(table, each)
            with tell_key(each):
                found[each.key] = KINDS[each.kind].fit(values, each)
        return found

    stats = learn(vertices, spec.keys), learn(edges, spec.edge_keys)
    return FittedEncoder(spec, *stats, transductive)
