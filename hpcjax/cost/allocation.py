"""How well jobs fit on a grid of boards, of which some have failed; imports no JAX.

A job may have any rows and any columns of the grid whose boards are free where they
cross: the trees of a HammingMesh join these as if they were neighbours.

References:
  Hoefler et al., HammingMesh: A Network Topology for Large-Scale Deep Learning, SC
  2022, section 4.2.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks

FAILED = -1
_FLATTEST = 8  # sides of a job, the longer over the shorter


class Heuristics(NamedTuple):
    """What is tried beyond the first place of a job's first shape.

    Attributes:
      transpose: also a shape's rows for its columns.
      ratios: also the other shapes of as many boards, nearest to a square first, as
        long as no side is more than eight times the other.
      sort: the largest jobs first.
      contiguous: only neighbouring rows and columns, as a torus needs them.
    """

    transpose: bool = False
    ratios: bool = False
    sort: bool = False
    contiguous: bool = False


class JobSizes(NamedTuple):
    """A distribution of jobs.

    Attributes:
      boards: sizes, ascending.
      percent: of the jobs that are at most so large, ascending to 100.
    """

    boards: tuple[int, ...]
    percent: tuple[float, ...]

    def check(self) -> "JobSizes":
        """Returns itself.

        Raises:
          ConfigError: sizes or percentages do not ascend, or do not end at 100.
        """
        for name, values in self._asdict().items():
            wrong = [a for a, b in itertools.pairwise(values) if not 0 <= a < b]
            rule = f"{name} must ascend from 0"
            checks.require(not wrong, rule, not_below_the_next=wrong)
        good = 0 < len(self.boards) == len(self.percent) and self.percent[-1] == 100
        rule = "every size needs a percentage, the last 100"
        checks.require(good, rule, sizes=len(self.boards), percent=self.percent[-1:])
        checks.require_count(1, boards=self.boards[0])
        return self

    def keep(self, fits: Callable[[int], bool]) -> "JobSizes":
        """Returns the distribution of those jobs whose size fits."""
        shares = np.diff(self.percent, prepend=0.0)
        kept = [
            (boards, share)
            for boards, share in zip(self.boards, shares, strict=True)
            if share > 0 and fits(boards)
        ]
        rule = "a job of some size must fit"
        checks.require(bool(kept), rule, boards=self.boards, percent=self.percent)
        boards, own = zip(*kept, strict=True)
        total = np.cumsum(own)
        return JobSizes(boards, (*(100 * total[:-1] / total[-1]).tolist(), 100.0))

    def draw(self, rng: np.random.Generator) -> int:
        """Draws the size of a job."""
        place = np.searchsorted(self.percent, 100 * rng.random(), side="right")
        return self.boards[int(place)]


_GREEDY = Heuristics()


def list_shapes(boards: int) -> list[tuple[int, int]]:
    """Returns (rows, columns) of a job, nearest to square first, none wider than high.

    Examples:
      >>> list_shapes(12)
      [(4, 3), (6, 2)]
    """
    checks.require_count(1, boards=boards)
    divisors = range(math.isqrt(boards), 0, -1)
    shapes = [(boards // cols, cols) for cols in divisors if boards % cols == 0]
    return [
        shape
        for number, shape in enumerate(shapes)
        if number == 0 or shape[0] <= _FLATTEST * shape[1]
    ]


def draw_jobs(
    sizes: JobSizes, grid: np.ndarray, rng: np.random.Generator
) -> tuple[int, ...]:
    """Draws jobs until they fill all free boards; the last is cut to what is left.

    There are no jobs whose first shape has a side of more than half of the grid.

    Raises:
      ConfigError: there are no others.
    """
    half, left = min(grid.shape) // 2, int(np.sum(grid == 0))
    sizes = sizes.keep(lambda boards: list_shapes(boards)[0][0] <= half)
    jobs: list[int] = []
    while left:
        jobs.append(min(sizes.draw(rng), left))
        left -= jobs[-1]
    return tuple(jobs)


def allocate(
    grid: np.ndarray,
    jobs: Sequence[int],
    heuristics: Heuristics = _GREEDY,
) -> np.ndarray:
    """Places jobs one after the other; those that do not fit are left out.

    Rows are tried by number: one is taken if it leaves the columns that are free in all
    rows taken so far at least as many as the job needs, of which it gets the first.

    Args:
      grid: of boards, `[rows, columns]`: 0 if free, −1 if failed.
      jobs: how many boards each wants.
      heuristics: what else is tried.

    Returns:
      The grid, with the number of its job, from 1, on every board that has one.

    Raises:
      ConfigError: a job of no boards, or of more than the grid has; other numbers in
        the grid.

    Examples:
      >>> allocate(np.array([[0, -1, 0], [0, 0, 0], [0, 0, 0]]), [4, 2, 2]).tolist()
      [[1, -1, 1], [1, 2, 1], [0, 2, 0]]
    """
    placed = np.array(grid, int)
    states = np.unique(placed).tolist()
    good = placed.ndim == 2 and set(states) <= {0, FAILED}
    checks.require(good, "boards must be 0 or -1", shape=placed.shape, found=states[:4])
    rule = f"a job needs 1 to {placed.size} boards"
    wrong = [boards for boards in jobs if not 1 <= boards <= placed.size]
    checks.require(not wrong, rule, boards=wrong[:3])
    free = [_pack(row == 0) for row in placed]
    find = _find_block if heuristics.contiguous else _find_rows
    order = range(len(jobs))
    if heuristics.sort:
        order = sorted(order, key=lambda number: -jobs[number])
    for number in order:
        for rows, columns in _list_tries(jobs[number], heuristics):
            found = find(free, rows, columns)
            if found is None:
                continue
            for row in found[0]:
                free[row] &= ~found[1]
                placed[row, _unpack(found[1], placed.shape[1])] = number + 1
            break
    return placed


def simulate_allocation(
    shape: tuple[int, int],
    sizes: JobSizes,
    *,
    heuristics: Mapping[str, Heuristics],
    faults: int = 0,
    draws: int = 100,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Returns the share of working boards that are used, `[draws]`, by name.

    All heuristics get the same jobs and the same failed boards.

    Args:
      shape: rows and columns of boards.
      sizes: of jobs.
      heuristics: what is compared.
      faults: boards that have failed, at random places.
      draws: how often jobs and faults are drawn.
      seed: of all draws.

    Raises:
      ConfigError: more faults than boards, or none left.
    """
    checks.require_count(1, rows=shape[0], columns=shape[1])
    boards = shape[0] * shape[1]
    good = 0 <= faults < boards
    checks.require(good, f"faults must be below {boards} boards", faults=faults)
    used: dict[str, list[float]] = {name: [] for name in heuristics}
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        grid = np.zeros(boards, int)
        grid[rng.permutation(boards)[:faults]] = FAILED
        grid = grid.reshape(shape)
        jobs = draw_jobs(sizes, grid, rng)
        for name, chosen in heuristics.items():
            filled = np.sum(allocate(grid, jobs, chosen) > 0)
            used[name].append(filled / (boards - faults))
    return {name: np.array(shares) for name, shares in used.items()}


def _list_tries(boards: int, heuristics: Heuristics) -> list[tuple[int, int]]:
    shapes = list_shapes(boards)
    shapes = shapes if heuristics.ratios else shapes[:1]
    if not heuristics.transpose:
        return shapes
    turned = [[(rows, cols), (cols, rows)] for rows, cols in shapes]
    return [shape for both in turned for shape in dict.fromkeys(both)]


# Columns of a row are the bits of an integer: the intersection of rows is one `&`.


def _find_rows(
    free: list[int], rows: int, columns: int
) -> tuple[list[int], int] | None:
    """Returns rows and a mask of columns that are free in all of them."""
    taken: list[int] = []
    common = -1
    for row, mask in enumerate(free):
        if (common & mask).bit_count() >= columns:
            common &= mask
            taken.append(row)
            if len(taken) == rows:
                return taken, _keep_lowest(common, columns)
    return None


def _find_block(
    free: list[int], rows: int, columns: int
) -> tuple[list[int], int] | None:
    """As `_find_rows`, but of neighbouring rows and columns."""
    for first in range(len(free) - rows + 1):
        block = list(range(first, first + rows))
        starts = free[first]
        for row in block[1:]:
            starts &= free[row]
        for shift in [starts >> step for step in range(1, columns)]:
            starts &= shift
        if starts:
            start = (starts & -starts).bit_length() - 1
            return block, ((1 << columns) - 1) << start
    return None


def _keep_lowest(mask: int, count: int) -> int:
    """Returns the lowest bits of a mask."""
    kept = 0
    for _ in range(count):
        lowest = mask & -mask
        kept, mask = kept | lowest, mask ^ lowest
    return kept


def _pack(free: np.ndarray) -> int:
    return sum(1 << place for place in np.flatnonzero(free).tolist())


def _unpack(mask: int, columns: int) -> list[int]:
    return [place for place in range(columns) if mask >> place & 1]
