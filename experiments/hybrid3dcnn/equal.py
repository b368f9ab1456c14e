"""Whether a network on samples in blocks learns what one device learns."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from hpcjax import core, data, runs, sharding, train
from hpcjax.core import config, trees
from hpcjax.core.parts import Part
from hpcjax.models import CosmoFlowConfig
from hpcjax.optim import SgdConfig
from hpcjax.sharding import SpatialConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network, its volumes, and how they are cut.

    Attributes:
      model: the network.
      dataset: its volumes.
      parallel: blocks of a volume.
      devices: all of them; those beside a volume's blocks share out the batch.
      double: whether parameters, products and norms are of float64.
      broken: what is left out, for negative controls: "statistics" of other blocks in
        norms, or "corners" of halos.
      refused: a layer that cannot be cut, whose error is looked at alone; "" for none.
      steps: of SGD with momentum.
      batch: samples of a step.
      seed: of parameters and draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"model": "cosmoflow", "model.width_divisor": "16", "dataset": "universes"},
        **{"dataset.width": "8", "dataset.count": "4", "steps": "1"},
        **{"parallel.depth": "1", "parallel.height": "1", "parallel.width": "1"},
        **{"devices": "1", "batch": "1", "broken": "none", "refused": ""},
    }
    figures: ClassVar[Mapping[str, str]] = {
        "loss": ": largest difference of a step's loss from one device's, relative",
        "gradient": ": of a gradient of step 1, over the largest of its array",
        "told": ": whether the layer that cannot be cut was told",
    }

    model: Annotated[Any, Part("model")] = CosmoFlowConfig(width_divisor=4)
    dataset: Annotated[Any, Part("dataset")] = data.UniversesConfig(count=8, width=64)
    parallel: SpatialConfig = SpatialConfig(depth=8)
    devices: config.Size = 8
    double: bool = False
    broken: Literal["none", "statistics", "corners"] = "none"
    refused: str = ""
    steps: config.Size = 5
    batch: config.Size = 2
    seed: config.Seed = 0


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Takes the same steps on all devices, and on one."""
    import jax

    with jax.enable_x64(cfg.double):
        if cfg.refused:
            return {"loss": np.nan, "gradient": np.nan, "told": is_told(cfg)}
        with break_blocks(cfg.broken):
            blocks = take_steps(cfg, cfg.parallel, cfg.devices)
        return {**compare(blocks, take_steps(cfg, None, 1)), "told": 0.0}


def is_told(cfg: Config) -> float:
    """Says whether an error names the layer that is refused."""
    try:
        take_steps(cfg, cfg.parallel, cfg.devices)
    except core.ConfigError as error:
        return float(f" at {cfg.refused}: use fewer" in str(error))
    return 0.0


Steps = tuple[np.ndarray, dict[str, np.ndarray]]


def take_steps(cfg: Config, cut: SpatialConfig | None, devices: int) -> Steps:
    """Returns the losses of some steps, and the gradients of the first."""
    import jax

    own = cfg.dataset.load()
    model = cut.cut_model(cfg.model, own.objective) if cut else cfg.model
    kind = "float64" if cfg.double else "float32"
    policy = core.Policy(param=kind, compute=kind, output=kind)
    made = model.make(own.inputs, own.outputs, policy)
    method = train.compose(
        *(made, own, SgdConfig(lr=0.01, momentum=0.9)),
        **{"parallel": cut, "batch_size": cfg.batch, "steps": cfg.steps},
        **{"devices": devices, "seed": cfg.seed},
    )
    task = train.supervised(made, method, own)
    mesh = task.mesh(devices)
    like = train.state_shapes(task, mesh), train.batch_shapes(task, cfg.batch, mesh)
    # Its machine code runs a few steps: what takes LLVM longest pays in none.
    quick: dict[str, bool | str] = {"xla_llvm_disable_expensive_passes": True}
    step = train.train_step(task, mesh, like[0]).lower(*like).compile(quick)
    state, losses, slopes = train.init_state(task, cfg.seed, mesh), [], {}
    for number in range(cfg.steps):
        rows = np.arange(cfg.batch) + number * cfg.batch
        batch = own.train.gather(rows % len(own.train))
        state, metrics = step(
            state, sharding.place_batch(batch, mesh, task.method.batch)
        )
        losses.append(float(metrics["loss"]))
        if not number:  # momentum is the gradient then
            held = trees.flatten(jax.device_get(state.opt_state))
            slopes = {path: each for path, each in held.items() if "trace" in path}
    return np.array(losses), slopes


def compare(blocks: Steps, whole: Steps) -> dict[str, float]:
    """Returns the largest differences of losses, and of gradients."""
    slopes = [
        np.max(abs(blocks[1][path] - leaf)) / np.max(abs(leaf))
        for path, leaf in whole[1].items()
    ]
    losses = np.max(abs(blocks[0] / whole[0] - 1))
    return {"loss": float(losses), "gradient": float(np.max(slopes))}


@contextlib.contextmanager
def break_blocks(broken: str) -> Iterator[None]:
    """Norms take the statistics of a device's block alone, or halos lack corners."""
    from experiments.spatial import controls
    from hpcjax.models import modules

    right = modules.axes_of_space
    with controls.without_corners(broken == "corners"):
        if broken == "statistics":
            modules.axes_of_space = lambda space: right(space[:0])
        try:
            yield
        finally:
            modules.axes_of_space = right
