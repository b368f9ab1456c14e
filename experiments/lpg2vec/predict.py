"""A property of vertices, predicted from what a graph database knows of them."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import core, runs, train
from hpcjax.core import config
from hpcjax.data import PropertyGraphConfig
from hpcjax.data.property_graph import open_store, prediction_keys
from hpcjax.models import GnnConfig
from hpcjax.optim import AdamWConfig

if TYPE_CHECKING:
    from hpcjax import data
    from hpcjax.data.property_graph import Target
    from hpcjax.graphs import lpg


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A property graph, a network of it, and its training.

    Attributes:
      dataset: the graph, and what is predicted of what.
      model: the network.
      optimizer: of the training.
      steps: each with all vertices of training.
      write: key under which predictions are written into the store, beside it
        `<key>_confidence`, their probabilities; none for no writing.
      overwrite: whether a key that is there already is written again.
      seed: of parameters and dropout.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "steps": "2",
        "model.hidden": "4",
        "model.heads": "2",
        "dataset.information": "degrees",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "accuracy": ": share of held-out vertices whose class is right",
        "present": ": the same of those that have the property",
        "features": ": of a vertex",
    }

    dataset: PropertyGraphConfig = PropertyGraphConfig(holdout="test")
    model: GnnConfig = GnnConfig(
        layer="gat", hidden=16, dropout=0.6, activation="elu", penalty=5e-4
    )
    optimizer: AdamWConfig = AdamWConfig(lr=0.005, weight_decay=0.0)
    steps: config.Size = 120
    write: str = ""
    overwrite: bool = False
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "predictions are written of the vertices of one label"
        good = not self.write or self.dataset.label != ""
        core.checks.require(good, rule, write=self.write, label=self.dataset.label)
        rule = "predictions cannot be written over what they are of"
        good = self.dataset.target not in prediction_keys(self.write)
        core.checks.require(good, rule, write=self.write, target=self.dataset.target)


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains, predicts all vertices, and writes predictions if that is asked for."""
    graph = cfg.dataset.read(ctx.data_root)
    _check_writing(cfg, graph)
    target = cfg.dataset.classify(graph)
    dataset = cfg.dataset.load(ctx.data_root)
    task = _compose(cfg, dataset, ctx.mesh.size)
    rows = len(dataset.train) // ctx.mesh.size * ctx.mesh.size
    length = train.TrainConfig(
        steps=cfg.steps, batch_size=rows, eval_every=cfg.steps, checkpoint_every=0
    )
    ctx.train(task, length, seed=cfg.seed, source="measured")
    likely = _predict(task, ctx, graph)
    if cfg.write:
        _write(cfg, open_store(cfg.dataset.source), graph, target, likely)
    held_out = dataset.validation.gather(np.arange(len(dataset.validation)))
    right = likely.argmax(1)[held_out["x"]] == held_out["y"]
    return runs.measured(
        {
            "accuracy": right.mean(),
            "present": right[target.present[held_out["x"]]].mean(),
            "features": dataset.graph.features.shape[1],
        }
    )


def _check_writing(cfg: Config, graph: "lpg.PropertyGraph") -> None:
    """Raises ConfigError where predictions could not be written, before training."""
    if not cfg.write:
        return
    source = pathlib.Path(cfg.dataset.source)
    known = cfg.dataset.source in ("fincen", "wordnet")
    good = not known and os.access(source, os.W_OK)
    rule = "a store must be there, and writable"
    core.checks.require(good, rule, source=cfg.dataset.source)
    for key in prediction_keys(cfg.write):
        rule = "a key that is there is written with overwrite=true"
        new = cfg.overwrite or key not in graph.keys
        core.checks.require(new, rule, key=key)


def _compose(cfg: Config, dataset: "data.Dataset", devices: int) -> "train.Task":
    model = cfg.model.make(
        dataset.inputs, dataset.outputs, core.Policy(), graph=dataset.graph
    )
    method = train.compose(
        model,
        dataset,
        cfg.optimizer,
        batch_size=len(dataset.train) // devices * devices,
        steps=cfg.steps,
        devices=devices,
        seed=cfg.seed,
    )
    return train.supervised(model, method, dataset)


def _predict(
    task: "train.Task", ctx: "runs.Context", graph: "lpg.PropertyGraph"
) -> np.ndarray:
    """Returns the probabilities of all vertices' classes."""
    import jax

    state: Any = ctx.trained
    every = np.arange(len(graph.vertices))

    @jax.jit
    def predict(params: Any, model_state: Any) -> Any:
        logits, _ = task.model.apply(params, model_state, every, train=False)
        return jax.nn.softmax(logits)

    return np.asarray(predict(state.params, state.model_state))


def _write(
    cfg: Config,
    store: "lpg.GraphStore",
    graph: "lpg.PropertyGraph",
    target: "Target",
    likely: np.ndarray,
) -> None:
    """Writes the most probable classes, and how probable they are."""
    chosen = np.flatnonzero(graph.with_label(cfg.dataset.label))
    ids = graph.vertices["_id"].to_numpy()[chosen]
    names = np.array(target.names, object)[likely.argmax(1)[chosen]]
    sure = likely.max(1)[chosen].astype(float)
    for key, values in zip(prediction_keys(cfg.write), (names, sure), strict=True):
        store.write(cfg.dataset.label, key, ids, values)
