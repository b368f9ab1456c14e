"""Heat that spreads through a plate of several materials, simulated when it is loaded.

The data set of Spatial Mixture-of-Experts (NeurIPS 2022), number by number: where a
material lies is the same in all runs, and nothing in a field tells it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Float32, Int, Int8

from hpcjax.core import checks
from hpcjax.core.config import AtLeast, Config, Size
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import FIELDS
from hpcjax.data.source import Batch, Dataset, check_indices

# Seeds of the published data: where materials lie, and the runs of each part.
MATERIALS = 42
PARTS = {"train": 42, "validation": 546981, "test": 865124}
COLD, HOT = 0.1, 1.0  # the most of what a field starts with, and a heated cell
# How much likelier a set neighbour makes its material, over what is left to the
# uniform probability; of at most four set neighbours none can become negative.
_CLUSTERING = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeatConfig(Config):
    """Fields of heat on a plate, each with the one that follows it.

    Attributes:
      size: height and width of the plate; 64 in the paper.
      runs: simulations for training; 1,000 in the paper.
      holdout_runs: those that are held out.
      steps: pairs of fields in a run.
      diffusivities: of each material, in cells² a step; at most 1/4, where the scheme
        stays stable.
      holdout: the part that is held out.
    """

    objective: ClassVar[Objective] = FIELDS
    smoke: ClassVar[Mapping[str, str]] = {
        **{"size": "8", "runs": "2", "holdout_runs": "2"},
        "steps": "3",
    }

    size: Annotated[int, AtLeast(4)] = 64
    runs: Size = 50
    holdout_runs: Size = 20
    steps: Size = 100
    diffusivities: tuple[float, ...] = (0.0025, 0.025, 0.25)
    holdout: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "diffusivities must be at least two numbers in (0, 0.25]"
        good = len(self.diffusivities) > 1 and all(
            0 < each <= 0.25 for each in self.diffusivities
        )
        checks.require(good, rule, diffusivities=self.diffusivities)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns pairs of fields; `root` is not used.

        Examples:
          >>> heat = HeatConfig(size=8, runs=2, holdout_runs=1, steps=5).load()
          >>> len(heat.train), len(heat.validation), heat.inputs
          (10, 5, (8, 8, 1))
        """
        del root
        train, held_out = (
            PairSource(simulate(self, part, count))
            for part, count in (("train", self.runs), (self.holdout, self.holdout_runs))
        )
        return Dataset(train, held_out, (self.size, self.size, 1), 1, FIELDS)


class PairSource:
    """Pairs of successive fields, of one run after another."""

    def __init__(self, fields: Float32[np.ndarray, "runs times height width"]) -> None:
        self.fields = fields

    def __len__(self) -> int:
        return len(self.fields) * (self.fields.shape[1] - 1)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns "x" and what follows it, "y", float32 [batch, height, width, 1]."""
        check_indices(indices, len(self))
        runs, times = np.divmod(indices, self.fields.shape[1] - 1)
        x, y = self.fields[runs, times], self.fields[runs, times + 1]
        return {"x": x[..., None], "y": y[..., None]}


@functools.lru_cache(maxsize=8)
def place_materials(
    size: int, count: int, seed: int = MATERIALS
) -> Int8[np.ndarray, "size size"]:
    """Returns the material of each cell, in patches.

    Cells are drawn row by row. The probabilities, 1/T at first, are shifted by each
    neighbour that is set: by (1 − 1/T)/5 towards its material, in equal parts from the
    others.

    Args:
      size: height and width.
      count: T, number of materials.
      seed: 42 is that of the published map, of size 64 and three materials.

    Examples:
      >>> place_materials(64, 3)[0, :10].tolist()
      [2, 1, 2, 2, 0, 2, 2, 2, 0, 0]
    """
    rng = np.random.default_rng(seed)
    materials = np.full((size, size), -1, np.int8)
    shift = (1 - 1 / count) / _CLUSTERING
    for row, column in np.ndindex(size, size):
        top, left = max(row - 1, 0), max(column - 1, 0)
        near = materials[top : row + 2, left : column + 2]
        odds = np.full(count, 1 / count)
        for material in range(count):
            met = np.count_nonzero(near == material)
            if met:
                odds -= shift / (count - 1) * met
                odds[material] += shift * met + shift / (count - 1) * met
        materials[row, column] = rng.choice(count, p=odds)
    return materials


def draw_starts(
    materials: Int8[np.ndarray, "height width"], runs: int, seed: int
) -> Float[np.ndarray, "runs height width"]:
    """Returns where runs start: up to 0.1, and 1 in one to three cells a material."""
    rng = np.random.default_rng(seed)
    cells = [np.argwhere(materials == each) for each in np.unique(materials)]
    return np.stack([_draw_start(materials.shape, cells, rng) for _ in range(runs)])


def _draw_start(
    shape: tuple[int, ...], cells: list[np.ndarray], rng: np.random.Generator
) -> np.ndarray:
    field = rng.uniform(0, COLD, shape)
    count = rng.integers(1, 3, endpoint=True)
    for each in cells:
        hot = rng.choice(each, size=count)
        field[hot[:, 0], hot[:, 1]] = HOT
    return field


def diffuse(
    fields: Float[np.ndarray, "... height width"],
    diffusivity: Float[np.ndarray, "height width"],
) -> Float[np.ndarray, "... height width"]:
    """Returns fields after a step: u + d (Σ of four neighbours − 4 u), 0 outside."""
    around = np.pad(fields, [(0, 0)] * (fields.ndim - 2) + [(1, 1), (1, 1)])
    rows = around[..., :-2, 1:-1] + around[..., 2:, 1:-1]
    columns = around[..., 1:-1, :-2] + around[..., 1:-1, 2:]
    return fields + diffusivity * (rows + columns - 4 * fields)


def stencil(diffusivity: float) -> Float[np.ndarray, "3 3"]:
    """Returns the filter that is a step in one material.

    Examples:
      >>> stencil(0.25).tolist()
      [[0.0, 0.25, 0.0], [0.25, 0.0, 0.25], [0.0, 0.25, 0.0]]
    """
    filled = np.zeros((3, 3))
    filled[1], filled[:, 1] = diffusivity, diffusivity
    filled[1, 1] = 1 - 4 * diffusivity
    return filled


def simulate(
    cfg: HeatConfig, part: str, runs: int
) -> Float32[np.ndarray, "runs times size size"]:
    """Returns the fields of one part, computed in float64 and kept in float32."""
    materials = place_materials(cfg.size, len(cfg.diffusivities))
    start = draw_starts(materials, runs, PARTS[part])
    diffusivity = np.asarray(cfg.diffusivities)[materials]
    return np.stack(list(_run(start, diffusivity, cfg.steps)), axis=1)


def _run(
    fields: np.ndarray, diffusivity: np.ndarray, steps: int
) -> Iterator[np.ndarray]:
    yield fields.astype(np.float32)
    for _ in range(steps):
        fields = diffuse(fields, diffusivity)
        yield fields.astype(np.float32)
