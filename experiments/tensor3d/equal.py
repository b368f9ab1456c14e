"""Training on every grid of devices against training on one device."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.tensor3d.grids import compose
from hpcjax import core, runs, sharding, train
from hpcjax.core import config
from hpcjax.models import CausalLmConfig

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A small language model, trained on grids.

    Attributes:
      devices: of all grids.
      model: the network.
      characters: of its vocabulary.
      context: length of a sequence.
      rows: sequences of a batch.
      steps: of SGD with momentum.
      broken: whether norms take the moments of a device's own features.
      seed: of parameters and tokens.
    """

    smoke: ClassVar[Mapping[str, str]] = {"devices": "2", "steps": "1"}
    figures: ClassVar[Mapping[str, str]] = {
        "distance": "grid: of any parameter the largest, see `_distance`"
    }

    devices: config.Several = 8
    model: CausalLmConfig = CausalLmConfig(depth=2, width=16, heads=8)
    characters: config.Several = 24
    context: config.Several = 6
    rows: config.Size = 8
    steps: config.Size = 3
    broken: bool = False
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the grids of the devices."""
        return {"grid": [name_of(grid) for grid in grids(self.devices)]}


def grids(devices: int) -> "list[sharding.Grid]":
    """Returns all grids of data, depth, row and col."""
    sizes = [each for each in range(1, devices + 1) if devices % each == 0]
    return [
        sharding.Grid(data, depth, row, devices // (data * depth * row))
        for data in sizes
        for depth in sizes
        for row in sizes
        if devices % (data * depth * row) == 0
    ]


def name_of(grid: "sharding.Grid") -> str:
    """Returns a grid's name: data, depth, row, col."""
    return "x".join(map(str, grid))


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Trains on all grids, and on one device."""
    every = grids(cfg.devices)
    alone = _train(cfg, sharding.Grid())
    with _broken() if cfg.broken else contextlib.nullcontext():
        found = [_distance(_train(cfg, grid), alone) for grid in every]
    return {"distance": found}


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """Breaks norms: what devices have is not summed."""
    from hpcjax.layers import norms

    right = norms._mean

    def alone(x: "jax.Array", axes: tuple[str, ...]) -> "jax.Array":
        del axes
        return right(x, ())

    norms._mean = alone
    try:
        yield
    finally:
        norms._mean = right


def _train(cfg: Config, grid: "sharding.Grid") -> "dict[str, jax.Array]":
    """Returns the parameters after the steps, by path."""
    import jax

    model = cfg.model.make((cfg.context,), cfg.characters, core.Policy())
    task = compose(cfg, model, grid)
    mesh = task.mesh(int(np.prod(grid)))
    state = train.init_state(task, cfg.seed, mesh)
    step = train.train_step(task, mesh, train.state_shapes(task, mesh))
    rows = task.dataset.train.gather(np.arange(cfg.rows))
    batch = sharding.place_batch(rows, mesh)
    for _ in range(cfg.steps):
        state, _ = step(state, batch)
    return core.trees.flatten(jax.device_get(state.params))


def _distance(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Returns the largest ‖a − b‖ over ‖b‖, or over 1/1000 of the norm of all."""
    norms = {path: np.linalg.norm(leaf) for path, leaf in theirs.items()}
    least = 1e-3 * np.sqrt(sum(norm**2 for norm in norms.values()))
    return max(
        float(np.linalg.norm(ours[path] - leaf) / max(norms[path], least))
        for path, leaf in theirs.items()
    )
