"""What a language model sends on a grid of devices, beside what the cost model says."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import cost, runs, sharding
from hpcjax.core import checks
from hpcjax.runs import program
from hpcjax.sharding import Tensor3dConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A language model whose matrices are cut in two dimensions."""

    axes: ClassVar[tuple[str, ...]] = ("data", "depth", "row", "col")

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.parallel, Tensor3dConfig)
        checks.require(good, "a grid is that of tensor3d", parallel=self.parallel)

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and what the cost model says."""
        return {
            **super().figures,
            "formula": ": words that a device sends in a step",
            "turn": ": that it sends for a block, without sums over data",
            "whole matrices": ": 1 for the grid that `cost.best_grid` puts first, for "
            "the whole model, and for its blocks' matrices alone",
        }


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the step; the formula of a block is what one more adds."""
    dataset, tokens = cfg.dataset.load(ctx.data_root), cfg.train.batch_size
    rows, devices = tokens * cfg.dataset.context, cfg.devices or ctx.mesh.size
    spread = cfg.parallel
    grid = sharding.Grid.of(devices, spread.row, spread.col, spread.depth)
    deeper = dataclasses.replace(cfg.model, depth=cfg.model.depth + 1)
    model, more = (
        each.make(dataset.inputs, dataset.outputs) for each in (cfg.model, deeper)
    )
    words, others = (cost.comm_volume(each, rows, grid) for each in (model, more))
    blocks = [each for each in sharding.list_matrices(model) if each.count > 1]
    whole, matrices = (
        cost.best_grid(each, rows, devices)[0].grid == grid for each in (model, blocks)
    )
    return {
        **program.read(cfg, ctx),
        "formula": sum(words.values()),
        "turn": sum(others[axis] - words[axis] for axis in words if axis != "data"),
        "whole": float(whole),
        "matrices": float(matrices),
    }
