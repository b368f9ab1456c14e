"""Which features a property graph has: the kind of every key, and its form as JSON."""

import dataclasses
import datetime
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.graphs.lpg.property_graph import PropertyGraph

Kind = Literal[
    "boolean",
    "numeric",
    "vector",
    "binned",
    "categorical",
    "text",
    "temporal",
    "point",
]
VERSION = 1
# Strings with more values are text, where nobody says otherwise.
_FEW = 100


@dataclasses.dataclass(frozen=True)
class KeySpec:
    """How the values of a key become features.

    Attributes:
      key: its name.
      kind: "boolean" 0 or 1; "numeric" from 0 to 1 over the training rows; "vector" as
        many of these as all lists have numbers; "binned" one of equally frequent bins;
        "categorical" one of known values, or several of a list; "text" hashed words and
        trigrams; "temporal" seconds, and the angles of month, weekday and hour; "point"
        on the unit sphere.
      bins: at most, of "binned".
      buckets: of "text", that words are hashed to.
      categories: at most, of "categorical".
      missing: whether a further feature is 1 where there is a value.
    """

    key: str
    kind: Kind
    bins: int = 10
    buckets: int = 128
    categories: int = 1000
    missing: bool = False

    def __post_init__(self) -> None:
        checks.require_choice("kind", self.kind, get_args(Kind))
        checks.require_count(
            1, bins=self.bins, buckets=self.buckets, categories=self.categories
        )


@dataclasses.dataclass(frozen=True)
class EncoderSpec:
    """The layout of features: labels, then keys, each sorted by name.

    Attributes:
      labels: of vertices.
      keys: of vertices.
      types: of edges.
      edge_keys: of edges.
      left_out: keys that `infer` has left out, since each vertex has its own value.
    """

    labels: tuple[str, ...]
    keys: tuple[KeySpec, ...]
    types: tuple[str, ...] = ()
    edge_keys: tuple[KeySpec, ...] = ()
    left_out: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns what `from_json` reads."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "EncoderSpec":
        """Returns a specification of its text.

        Raises:
          ConfigError: of another version.
        """
        given = json.loads(text)
        found = given.pop("version", None)
        rule = f"an encoder's text must be of version {VERSION}"
        checks.require(found == VERSION, rule, version=found)
        for name in ("keys", "edge_keys"):
            given[name] = tuple(KeySpec(**each) for each in given[name])
        for name in ("labels", "types", "left_out"):
            given[name] = tuple(given[name])
        return cls(**given)

    def check_target(self, target: str, leaks: Iterable[str] = ()) -> None:
        """Raises ConfigError if what is predicted, or tells it, is among the keys."""
        found = {each.key for each in self.keys} & {target, *leaks}
        rule = f"what tells the target {target!r} cannot be a feature"
        checks.require(not found, rule, keys=sorted(found))


def infer(
    graph: PropertyGraph,
    *,
    keys: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    kinds: Mapping[str, Kind] | None = None,
) -> EncoderSpec:
    """Returns the layout of a graph's features, kinds by the values of keys.

    Numbers are "numeric" and strings "categorical", or "text" if they are many. Lists
    are "vector" if there are fractions in them, else "categorical". Strings
    without spaces and integers of which each vertex has its own name things and
    are left out.

    Args:
      graph: any.
      keys: of vertices; None for all.
      exclude: keys that are no features, such as the target.
      kinds: of keys, by name, where they should be others.

    Raises:
      ConfigError: unknown keys, or values of several types in one key.
    """
    kinds, exclude = dict(kinds or {}), set(exclude)
    chosen = graph.keys if keys is None else sorted(keys)
    for key in (*chosen, *kinds, *exclude):
        if key not in {*graph.keys, *graph.edge_keys}:
            raise ConfigError(f"there is no key {key!r}{nearest(key, graph.keys)}")
    left_out: list[str] = []

    def specify(table: pd.DataFrame, names: Iterable[str]) -> tuple[KeySpec, ...]:
        found = []
        for key in names:
            values = present(table, key)
            kind = kinds.get(key) or _guess(values)
            if kind is None:
                left_out.append(key)
            elif key not in exclude:
                found.append(KeySpec(key, kind))
        return tuple(found)

    return EncoderSpec(
        labels=tuple(sorted({one for own in graph.vertices["_labels"] for one in own})),
        keys=specify(graph.vertices, chosen),
        types=tuple(sorted(graph.edges["_type"].unique())),
        edge_keys=specify(graph.edges, graph.edge_keys),
        left_out=tuple(left_out),
    )


def present(table: pd.DataFrame, key: str) -> pd.Series:
    """Returns the values of a key that are there, checked: of one type, and finite.

    Args:
      table: of vertices or edges.
      key: a column.

    Raises:
      ConfigError: values of several types, with an id of each, or infinite ones.
    """
    values = table[key].astype(object)
    values = values[[not _is_missing(value) for value in values]]
    types = np.array([type_of(value) for value in values], dtype=object)
    names, first = np.unique(types.astype(str), return_index=True)
    ids = table["_id"] if "_id" in table else table.index.to_series()
    if len(names) > 1:
        examples = ", ".join(
            f"{name} (of {ids.loc[values.index[at]]})"
            for name, at in zip(names, first, strict=True)
        )
        raise ConfigError(f"{key} has values of several types: {examples}")
    wrong = values[np.isinf(values.astype(float))] if "number" in names else values[:0]
    if len(wrong):
        raise ConfigError(
            f"{key} must be finite: there is an infinite number (of "
            f"{ids.loc[wrong.index[0]]}); correct it, or leave the key out"
        )
    return values


def _is_missing(value: Any) -> bool:
    # A list is there, also an empty one; of NaN and NaT pandas knows.
    return not isinstance(value, list | tuple | dict | np.ndarray) and pd.isna(value)


def type_of(value: Any) -> str:
    """Returns what all values of a key must be alike: "number", "string" and so on."""
    known = (
        (bool | np.bool_, "boolean"),
        (datetime.timedelta | np.timedelta64, "duration"),
        (int | float | np.integer | np.floating, "number"),
        (str, "string"),
        (list | tuple | np.ndarray, "list"),
        (datetime.date | np.datetime64, "time"),
        (dict, "point"),
    )
    for kind, name in known:
        if isinstance(value, kind):
            return name
    raise ConfigError(f"a property cannot be {value!r}")


def _guess(values: pd.Series) -> Kind | None:
    """Returns a kind; None for values that only name what has them."""
    if not len(values):
        return "categorical"
    kinds: dict[str, Kind] = {
        "boolean": "boolean",
        "duration": "numeric",
        "time": "temporal",
        "point": "point",
    }
    first = type_of(values.iloc[0])
    if first in kinds:
        return kinds[first]
    if first == "list":
        items = (one for value in values for one in value)
        fractions = any(isinstance(one, float | np.floating) for one in items)
        return "vector" if fractions else "categorical"
    own = values.nunique() == len(values) > 1
    if first == "number":
        whole = all(isinstance(value, int | np.integer) for value in values)
        return None if own and whole else "numeric"
    if own and not values.str.contains(" ").any():
        return None
    return "categorical" if values.nunique() <= _FEW else "text"
