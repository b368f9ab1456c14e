"""Cora without a network: label propagation, and logistic regression of S²X."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.data import CoraConfig

if TYPE_CHECKING:
    from hpcjax import data


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """What classifies the vertices of a graph.

    Attributes:
      method: "propagation", labels that vertices pass on to their neighbours, 100 times
        Y ← α S Y + (1 − α) Y₀; or "regression", scikit-learn's, of S²X, as SGC's
        authors describe it.
      share: α.
      inverse_penalty: C of the regression.
      dataset: the graph.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"inverse_penalty": "0.1"}
    figures: ClassVar[Mapping[str, str]] = {
        "val_error": ": share of held-out vertices with another class",
    }

    method: Literal["propagation", "regression"] = "regression"
    share: config.Share = 0.95
    inverse_penalty: config.Positive = 100.0
    dataset: CoraConfig = CoraConfig()
    seed: config.Seed = 0


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Returns `val_error`, the share of held-out vertices with another class."""
    del ctx
    dataset = cfg.dataset.load()
    classify = {"propagation": _propagate, "regression": _regress}[cfg.method]
    given, held_out = (
        source.gather(np.arange(len(source)))
        for source in (dataset.train, dataset.validation)
    )
    found = classify(dataset, given, cfg)[held_out["x"]]
    return runs.measured({"val_error": np.mean(found != held_out["y"])})


def _propagate(dataset: "data.Dataset", given: Any, cfg: Config) -> np.ndarray:
    """Returns the class of each vertex."""
    spread = _normalized(dataset.graph)
    start = np.zeros((dataset.graph.vertices, dataset.outputs))
    start[given["x"], given["y"]] = 1
    labels = start
    for _ in range(100):
        labels = cfg.share * (spread @ labels) + (1 - cfg.share) * start
    return labels.argmax(1)


def _regress(dataset: "data.Dataset", given: Any, cfg: Config) -> np.ndarray:
    """Returns the class of each vertex."""
    import scipy.sparse
    from sklearn.linear_model import LogisticRegression

    from hpcjax import graphs

    looped = graphs.add_self_loops(dataset.graph)
    rows = dataset.graph.features
    features = scipy.sparse.csr_array(
        (rows.values, rows.columns, rows.offsets), shape=rows.shape
    )
    spread = _normalized(looped)
    features = (spread @ (spread @ features)).tocsr()
    model = LogisticRegression(C=cfg.inverse_penalty, max_iter=1000)
    return model.fit(features[given["x"]], given["y"]).predict(features)


def _normalized(graph: Any) -> Any:
    """Returns D^(−1/2) A D^(−1/2) of scipy."""
    import scipy.sparse

    ones, ends = np.ones(len(graph.senders)), (graph.receivers, graph.senders)
    a = scipy.sparse.coo_array((ones, ends), shape=(graph.vertices,) * 2).tocsr()
    degree = a.sum(1)
    root = scipy.sparse.diags_array(np.where(degree > 0, degree, np.inf) ** -0.5)
    return root @ a @ root
