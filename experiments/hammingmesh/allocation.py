"""How many boards of a HammingMesh jobs use, with better and better placement."""

import csv
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import cost, runs
from hpcjax.core import checks, config

SIZES = pathlib.Path(__file__).parent / "job_sizes.csv"
HEURISTICS = {
    "greedy": cost.Heuristics(),
    "+ transpose": cost.Heuristics(transpose=True),
    "+ ratios": cost.Heuristics(transpose=True, ratios=True),
    "+ sort": cost.Heuristics(transpose=True, ratios=True, sort=True),
    "contiguous": cost.Heuristics(
        transpose=True, ratios=True, sort=True, contiguous=True
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A grid of boards, and the jobs that are to fill it.

    Attributes:
      boards: in each row and column.
      faults: boards that have failed.
      draws: of jobs and faults.
      sizes: a CSV file with columns `boards` and `percent` of jobs of at most so many;
        None for a trace of Alibaba's.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {"boards": "8", "draws": "3"}
    figures: ClassVar[Mapping[str, str]] = {
        "used": "heuristic draw: percent of the boards that work"
    }

    boards: config.Size = 16
    faults: config.Count = 0
    draws: config.Size = 400
    sizes: str | None = None
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"faults must be fewer than {self.boards**2} boards"
        checks.require(self.faults < self.boards**2, rule, faults=self.faults)

    def labels(self) -> "runs.Labels":
        """Returns what drawn jobs are placed by, and their draws."""
        return {"heuristic": HEURISTICS, "draw": range(self.draws)}


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Draws jobs and places them with every heuristic."""
    found = cost.simulate_allocation(
        (cfg.boards, cfg.boards),
        read_sizes(SIZES if cfg.sizes is None else pathlib.Path(cfg.sizes)),
        heuristics=HEURISTICS,
        faults=cfg.faults,
        draws=cfg.draws,
        seed=cfg.seed,
    )
    return {"used": [100 * found[name] for name in HEURISTICS]}


def read_sizes(path: pathlib.Path) -> "cost.JobSizes":
    """Reads a distribution of job sizes.

    Raises:
      ConfigError: a column is missing, a cell is no number, or one does not ascend.
    """
    checks.require(path.is_file(), "sizes must be the path of a file", sizes=str(path))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    try:
        boards = tuple(int(row["boards"]) for row in rows)
        percent = tuple(float(row["percent"]) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        rule = f"{path} must have numbers in columns boards and percent"
        checks.require(False, rule, problem=str(error))
        raise
    return cost.JobSizes(boards, percent).check()
