"""What a transformer's block sends on every grid of devices."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from hpcjax import core, cost, data, perf, runs, sharding, train
from hpcjax.core import compat, config
from hpcjax.models import CausalLmConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs.training import with_stacks

AXES = ("row", "col")
FLOAT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Grids of row times col devices, and a language model on them.

    Attributes:
      devices: row times col.
      broken: none; "marked", x is taken by each matrix by itself, so that its slopes
        are summed once for each.
      model: the network, whose depth is not used.
      characters: of its vocabulary.
      context: length of a sequence.
      rows: sequences of a batch.
      seed: of tokens.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "devices": "2",
        "model.width": "16",
        "context": "3",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "words": "grid axis: that a device sends for a block in a step, by rings",
        "formula": "grid axis: what the cost model says",
        "moments": "grid axis: what the block's two norms send besides",
        "megatron": ": the formula's for one row",
        "chosen": "grid: 1 for the grid that `cost.best_grid` puts first",
    }

    devices: config.Several = 8
    broken: Literal["no", "marked"] = "no"
    model: CausalLmConfig = CausalLmConfig(width=64, heads=16)
    characters: config.Several = 64
    context: config.Several = 8
    rows: config.Size = 4
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the grids of the devices, and the axes."""
        return {"grid": [name_of(each) for each in grids(self.devices)], "axis": AXES}


def grids(devices: int) -> "list[sharding.Grid]":
    """Returns the grids of one model, with few rows first."""
    sizes = [each for each in range(1, devices + 1) if devices % each == 0]
    return [sharding.Grid(row=row, col=devices // row) for row in sizes]


def name_of(grid: "sharding.Grid") -> str:
    """Returns a grid's name, such as 2x4."""
    return f"{grid.row}x{grid.col}"


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Reads what a block sends, by compiling steps of two and of three blocks."""
    every = grids(cfg.devices)
    model = _model(cfg, 1)
    layers = sharding.list_matrices(model)
    rows = cfg.rows * cfg.context
    best, *_ = cost.best_grid(model, rows, cfg.devices, parts=cfg.devices)
    planned = [cost.comm_volume(layers, rows, grid) for grid in every]
    megatron = cost.comm_volume(layers, rows, every[0], "megatron")
    with _broken() if cfg.broken == "marked" else contextlib.nullcontext():
        found = [_block_words(cfg, grid) for grid in every]
    # Mean and variance of two norms, each summed in the forward pass, and its slope in
    # the backward pass.
    moments = [
        {"row": 8 * rows * 2 * (grid.row - 1) / grid.row, "col": 0.0} for grid in every
    ]
    return {
        "words": _by_axis(found),
        "formula": _by_axis(planned),
        "moments": _by_axis(moments),
        "megatron": megatron["row"] + megatron["col"],
        "chosen": [float(grid == best.grid) for grid in every],
    }


def _by_axis(found: list[dict[str, float]]) -> np.ndarray:
    return np.array([[each.get(axis, 0.0) for axis in AXES] for each in found])


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    """Breaks the model: nothing is marked before several matrices take it."""
    from hpcjax.models import block

    right = block.share_inputs
    block.share_inputs = lambda x, *_: x
    try:
        yield
    finally:
        block.share_inputs = right


def _model(cfg: Config, depth: int) -> "core.Model":
    own = dataclasses.replace(cfg.model, depth=depth)
    return own.make((cfg.context,), cfg.characters, core.Policy())


def _block_words(cfg: Config, grid: "sharding.Grid") -> dict[str, float]:
    """Returns what the third block adds to what a device sends, by axis."""
    two, three = (_step_words(cfg, grid, depth) for depth in (2, 3))
    return {axis: three.get(axis, 0.0) - two.get(axis, 0.0) for axis in AXES}


def _step_words(cfg: Config, grid: "sharding.Grid", depth: int) -> dict[str, float]:
    """Returns the words that a device sends in a step, by axis, with rings."""
    import jax

    task = compose(cfg, _model(cfg, depth), grid)
    mesh = task.mesh(cfg.devices)
    state = train.state_shapes(task, mesh)
    lowered = train.train_step(task, mesh, state).lower(
        state, train.batch_shapes(task, cfg.rows, mesh)
    )
    options = compat.quick_compilation(jax.default_backend())
    compiled = lowered.compile(compiler_options=options)
    words: dict[str, float] = {}
    for axes, size in perf.ring_bytes_by_axis(compiled, mesh).items():
        # What goes along both axes counts as well, such as activations laid out anew.
        words[axes[0]] = words.get(axes[0], 0.0) + size / FLOAT
    return words


def compose(
    cfg: Any,
    model: "core.Model",
    grid: "sharding.Grid",
    zero: Literal[0, 1] = 0,
) -> "train.Task":
    """Returns the task of training a model on a grid."""
    parallel = sharding.Tensor3dConfig(
        row=grid.row, col=grid.col, depth=grid.depth, zero=zero
    )
    dataset = data.noise_tokens(cfg.rows, cfg.context, cfg.characters, seed=cfg.seed)
    method = train.compose(
        model,
        dataset,
        SgdConfig(lr=0.1, momentum=0.9),
        parallel=with_stacks(parallel, cfg.model.stacks),
        batch_size=cfg.rows,
        steps=3,
        devices=grid.data * grid.depth * grid.row * grid.col,
    )
    return train.supervised(model, method, dataset)
