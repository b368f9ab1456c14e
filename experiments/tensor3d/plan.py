"""The planner's grids for large language models."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import cost, runs, sharding
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A language model on a number of devices.

    Attributes:
      width: of the blocks.
      layers: how many blocks.
      devices: of the machine.
      sequences: of a batch.
      context: tokens of a sequence.
      memory: bytes of a device.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"layers": "2", "devices": "8"}
    figures: ClassVar[Mapping[str, str]] = {
        "words": "scheme: that a device sends in a step on the best grid that fits",
        "part": "scheme: of those of Megatron's grid",
        "grid": "scheme axis: sizes of that grid",
    }

    width: config.Size = 11520
    layers: config.Size = 24
    devices: config.Size = 256
    sequences: config.Size = 1024
    context: config.Size = 2048
    memory: config.Positive = 40e9
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the kinds of grids, and the axes."""
        return {"scheme": SCHEMES, "axis": AXES}


SCHEMES = ("Megatron", "Tensor3D", "with depth")
AXES = ("data", "depth", "row", "col")


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Plans the blocks' matrices: with one row and no depth, with rows, and depth."""
    count = 10**6  # all of them
    rows = cfg.sequences * cfg.context
    every = cost.best_grid(
        _block(cfg), rows, cfg.devices, memory=cfg.memory, topk=count
    )
    flat = [each for each in every if each.grid.depth == 1]
    chosen = [next(each for each in flat if each.grid.row == 1), flat[0], every[0]]
    return {
        "words": [each.total for each in chosen],
        "part": [each.total / chosen[0].total for each in chosen],
        "grid": [[getattr(each.grid, axis) for axis in AXES] for each in chosen],
    }


def _block(cfg: Config) -> "list[sharding.MatrixLayer]":
    """Returns the matrices of all blocks: query, key and value are one."""
    sizes = ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
    return [
        sharding.MatrixLayer(
            inputs=inputs * cfg.width,
            outputs=outputs * cfg.width,
            transposed=turned,
            count=cfg.layers,
        )
        for inputs, outputs, turned in sizes
    ]
