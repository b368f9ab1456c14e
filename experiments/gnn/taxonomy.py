"""Which layers of a graph network train by which parallelism, found by trying."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from experiments.gnn.names import KINDS, WAYS
from hpcjax import runs
from hpcjax.core import config
from hpcjax.core.errors import ConfigError

# The fields of the model, and the collective of its own that a step must have.
_WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({}, "psum"),
    "vertex": ({"scheme": "halo"}, "ppermute"),
    "features": ({"scheme": "features"}, "reduce_scatter"),
    "stale": ({"scheme": "halo", "stale": 1}, "ppermute"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Training steps of drawn graphs, which are traced and never run.

    Attributes:
      layers: of the model.
      devices: of the mesh.
      composed_for: devices that parts are told of; the control is another number.
      seed: of the run; the graph is the same.
    """

    smoke: ClassVar[Mapping[str, str]] = {"layers": '["gcn"]', "devices": "1"}
    figures: ClassVar[Mapping[str, str]] = {
        "tick": "layer way: the parts compose a task, without an error",
        "traced": "layer way: the task's training step is traced",
        "own": "layer way: that step has the collective of this parallelism, and late "
        "rows in its state where there are any",
        "named": "layer way: it is traced, or a ConfigError names what was given",
        "refusal": "layer way: what the error says",
    }

    layers: tuple[str, ...] = KINDS
    devices: config.Size = 4
    composed_for: config.Size | None = None
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"layer": self.layers, "way": WAYS}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Composes and traces each layer by each parallelism."""
    every = [[_try(cfg, layer, way) for way in WAYS] for layer in cfg.layers]
    return {
        name: [[found[name] for found in row] for row in every] for name in cfg.figures
    }


def _try(cfg: Config, layer: str, way: str) -> dict[str, Any]:
    """Returns the figures of one combination."""
    found: dict[str, Any] = dict.fromkeys(("tick", "traced", "own", "named"), 0)
    _, collective = _WAYS[way]
    try:
        task = _compose(cfg, layer, way)
        found["tick"] = 1
        program, state = _trace(cfg, task)
    except ConfigError as error:
        text = str(error)
        named = _names(text, layer)
        return {**found, "named": int(named), "refusal": text}
    except Exception as error:  # a fault, which the table tells
        return {**found, "refusal": f"{type(error).__name__}: {error}"}
    # Late rows are kept in the model's state.
    own = f" {collective}" in str(program) and bool(state) == (way == "stale")
    return {**found, "traced": 1, "own": int(own), "named": 1, "refusal": ""}


def _names(text: str, layer: str) -> bool:
    """Says whether an error names the layer that it refuses, not one it allows."""
    refused = re.sub(r"allowed are [^:]*:", "", text)
    return bool(re.search(rf"\b(layer=|got )'?{layer}\b", refused))


def _compose(cfg: Config, layer: str, way: str) -> Any:
    from hpcjax import data, models, optim
    from hpcjax.runs import training
    from hpcjax.train.config import TrainConfig

    graph = data.CommunityGraphConfig(vertices=40, degree=6.0, classes=3)
    parts: Any = data.PartitionedVerticesConfig(source=graph, partitions=cfg.devices)
    if way == "data":
        parts = data.SampledGraphConfig(source=graph, fanouts=(2, 2), block=2)
    given: Any = {"layer": layer, **_WAYS[way][0]}
    whole = training.TrainingConfig(
        dataset=parts,
        model=models.GnnConfig(hidden=4, heads=2, dropout=0.0, **given),
        optimizer=optim.SgdConfig(lr=0.1, momentum=0.0),
        train=TrainConfig(steps=1, batch_size=cfg.devices, checkpoint_every=0),
    )
    devices = cfg.composed_for or cfg.devices
    return training.task(whole, pathlib.Path(), devices)


def _trace(cfg: Config, task: Any) -> Any:
    """Returns the jaxpr of the task's training step, and the model's state."""
    import jax

    from hpcjax import data, train

    mesh = task.mesh(cfg.devices)
    shapes = train.state_shapes(task, mesh)
    batch = data.batches(task.dataset.train, cfg.devices, 0)[0]
    step = train.train_step(task, mesh, shapes)
    return jax.make_jaxpr(step)(shapes, batch), shapes.model_state
