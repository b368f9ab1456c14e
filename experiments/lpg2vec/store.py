"""A property graph into stores and back, with features, and predictions written."""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.data import PropertyGraphConfig

if TYPE_CHECKING:
    import pandas as pd

    from hpcjax import graphs
    from hpcjax.graphs import lpg

STORES = ("ladybug", "csv")
# The control: what ladybug gives after a property and a prediction have changed in it.
ALTERED = "altered"
SECONDS = ("load", "read", "encode", "write")
COUNTS = ("cells", "predictions")
_KEY = "predicted"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A property graph that is kept in stores.

    Attributes:
      dataset: the graph, its features, and the property that predictions are of.
      seed: of the predictions, which are the property's values in another order.
    """

    smoke: ClassVar[Mapping[str, str]] = {"dataset.buckets": "16"}
    figures: ClassVar[Mapping[str, str]] = {
        "load read encode write": "store: seconds",
        "cells": "kept: cells of tables that differ from those saved",
        "predictions": "kept: that differ from those written",
        "bytes": ": of features, over those of their dense matrix",
        "dense": ": bytes of the dense matrix",
        "features": ": of a vertex",
    }

    dataset: PropertyGraphConfig = PropertyGraphConfig(
        source="wordnet", target="lexicographer", buckets=2048
    )
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"store": STORES, "kept": (*STORES, ALTERED)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Saves the graph in each store, reads, encodes, and writes predictions back."""
    from hpcjax.graphs import lpg

    graph = cfg.dataset.read(ctx.data_root)
    values = graph.column(cfg.dataset.target).to_numpy()
    guesses = np.random.default_rng(cfg.seed).permutation(values)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        database = lpg.LadybugStore(path / "graph.lbdb")
        stores = database, lpg.CsvStore(path / "graph.csv")
        measured = [_measure(cfg, store, graph, guesses) for store in stores]
        found = dict(zip(STORES, (each for each, _ in measured), strict=True))
        _alter(database, graph, cfg.dataset.target)
        found[ALTERED] = _compare(database.read(), graph, guesses)
    features = measured[0][1]
    figures = {
        name: (dim, [found[label][name] for label in labels])
        for dim, labels, names in (
            ("store", STORES, SECONDS),
            ("kept", found, COUNTS),
        )
        for name in names
    }
    return runs.measured(
        {
            **figures,
            "bytes": _bytes(features) / (4 * np.prod(features.shape)),
            "dense": 1.0,
            "features": features.shape[1],
        },
        coords={"store": list(STORES), "kept": list(found)},
    )


def _measure(
    cfg: Config, store: "lpg.GraphStore", graph: "lpg.PropertyGraph", guesses: Any
) -> tuple[dict[str, float], "graphs.SparseRows"]:
    """Returns seconds of each step and what has changed, and the features."""
    found: dict[str, float] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = step()
        found[name] = time.perf_counter() - start
        return result

    timed("load", lambda: store.save(graph))
    read = timed("read", store.read)
    features = timed("encode", lambda: _encode(cfg, read))
    timed("write", lambda: _write(store, graph, guesses))
    return {**found, **_compare(store.read(), graph, guesses)}, features


def _encode(cfg: Config, graph: "lpg.PropertyGraph") -> "graphs.SparseRows":
    """Returns features of vertices, learnt of those of training."""
    from hpcjax.graphs import lpg

    train, *_ = cfg.dataset.split(graph, cfg.dataset.classify(graph))
    fitted = lpg.fit(cfg.dataset.specify(graph), graph, train)
    return fitted.transform(graph).features


def _bytes(features: "graphs.SparseRows") -> int:
    arrays = features.offsets, features.columns, features.values
    return sum(each.nbytes for each in arrays)


def _write(store: "lpg.GraphStore", graph: "lpg.PropertyGraph", guesses: Any) -> None:
    """Writes the prediction of every vertex, label by label."""
    ids = graph.vertices["_id"].to_numpy()
    for label in sorted({one for own in graph.vertices["_labels"] for one in own}):
        own = graph.with_label(label)
        store.write(label, _KEY, ids[own], guesses[own])


def _alter(store: "lpg.GraphStore", graph: "lpg.PropertyGraph", key: str) -> None:
    """Gives the first vertex another one's property, and that as its prediction."""
    first = graph.vertices.iloc[0]
    values = graph.column(key)
    other = values[values != first[key]].iloc[:1]
    for name in (key, _KEY):
        store.write(first["_labels"][0], name, [first["_id"]], other)


def _compare(
    read: "lpg.PropertyGraph", graph: "lpg.PropertyGraph", guesses: Any
) -> dict[str, float]:
    """Returns how many cells and predictions differ from those that were saved."""
    kept = read.vertices.set_index("_id")[_KEY].reindex(graph.vertices["_id"])
    pairs = (
        (read.vertices.drop(columns=_KEY), graph.vertices),
        (read.edges, graph.edges),
    )
    return {
        "cells": sum(count_differing(one, other) for one, other in pairs),
        "predictions": int((kept.to_numpy() != guesses).sum()),
    }


def count_differing(one: "pd.DataFrame", other: "pd.DataFrame") -> int:
    """Returns how many cells of two tables differ, rows and columns in any order.

    Tables of other rows or keys differ in all cells of the larger.
    """
    names, others = (sorted(map(str, each)) for each in (one, other))
    if names != others or len(one) != len(other):
        return max(one.size, other.size)
    first, second = (
        each[names].map(repr).sort_values(names, ignore_index=True).to_numpy()
        for each in (one, other)
    )
    return int((first != second).sum())
