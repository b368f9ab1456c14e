"""KAISA: who decomposes a layer's factors, who keeps them, who only gets results."""

import math
import zlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from hpcjax.core.assignment import Assignment, assign_longest_first
from hpcjax.core.errors import ConfigError
from hpcjax.optim.kfac._blocks import Block, Plan, Unit
from hpcjax.optim.kfac._decomposition import SIDES, item_shapes
from hpcjax.optim.kfac.config import KfacOptions

Cost = Literal["compute", "memory"]
WORKER_AXIS, RECEIVER_AXIS = "grad_worker", "grad_receiver"
AXES = (WORKER_AXIS, RECEIVER_AXIS)


class Distribution:
    """How K-FAC's work and memory are shared by P devices, KAISA's knob.

    Each layer has m = max(1, P·f) gradient workers, which keep its decomposition and
    precondition its gradient; the other P − m receive the result at every step. So
    f = 1/P is MEM-OPT, f = 1 COMM-OPT. The devices are a grid of m × n, n = P/m,
    numbered row by row; a column holds the workers of its layers, a row receives.

    Args:
      axis_size: P.
      grad_worker_fraction: f.
      cost: what a factor of n rows counts when columns and workers are balanced:
        `"compute"` n³, `"memory"` n².
      colocate_factors: whether one device decomposes both factors of a layer.

    Raises:
      ConfigError: f is outside [0, 1], or P·f is no divisor of P.

    References:
      Pauloski et al., KAISA, SC 2021, §3.1 and §3.2.

    Examples:
      >>> Distribution(8, 1 / 4).columns
      [[0, 4], [1, 5], [2, 6], [3, 7]]
      >>> Distribution(8, 1 / 4).mesh_shape
      {'grad_worker': 2, 'grad_receiver': 4}
    """

    def __init__(
        self,
        axis_size: int,
        grad_worker_fraction: float = 1.0,
        cost: Cost = "compute",
        colocate_factors: bool = True,
    ) -> None:
        if axis_size < 1:
            raise ConfigError(f"axis_size must be at least 1: got {axis_size}")
        if cost not in ("compute", "memory"):
            raise ConfigError(f"cost must be 'compute' or 'memory': got {cost!r}")
        self.axis_size, self.cost = axis_size, cost
        self.fraction = grad_worker_fraction
        self.workers = _workers(axis_size, grad_worker_fraction)
        self.receivers = axis_size // self.workers
        # With one worker there is nowhere else for the other factor to be.
        self.colocate_factors = colocate_factors or self.workers == 1

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The axes and sizes to give to `sharding.make_mesh`."""
        return {WORKER_AXIS: self.workers, RECEIVER_AXIS: self.receivers}

    @property
    def columns(self) -> list[list[int]]:
        """The gradient workers of each column."""
        n = self.receivers
        return [list(range(c, self.axis_size, n)) for c in range(n)]

    @property
    def rows(self) -> list[list[int]]:
        """The devices among which results are passed on."""
        n = self.receivers
        return [list(range(r * n, r * n + n)) for r in range(self.workers)]

    def assign(self, chosen: Plan) -> Assignment:
        """Returns who decomposes the factors `"a"` and `"g"` of each matrix."""
        power = {"compute": 3.0, "memory": 2.0}[self.cost]
        work = {
            unit: {"a": block.a**power, "g": block.g**power}
            for unit, block in chosen.units.items()
        }
        return assign_longest_first(work, self.columns, colocate=self.colocate_factors)


def _workers(axis_size: int, fraction: float) -> int:
    """Returns the gradient workers of a layer."""
    inside = 0 <= fraction <= 1
    exact = max(1.0, axis_size * fraction) if inside else 1.0
    count = round(exact)
    valid = [str(Fraction(m, axis_size)) for m in _divisors(axis_size)]
    if not inside or abs(exact - count) > 1e-9 or axis_size % count:
        raise ConfigError(
            "axis_size times grad_worker_fraction must be an integer that divides "
            f"axis_size: got grad_worker_fraction={fraction}, axis_size={axis_size}; "
            f"fractions that are: {', '.join(valid)}"
        )
    return count


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class Piece(NamedTuple):
    """One item's place in its column's buffer."""

    unit: Unit
    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Words."""
        return math.prod(self.shape)


class Layout(NamedTuple):
    """Where each column keeps what.

    Attributes:
      columns: the pieces of each column, those of one worker next to each other.
      spans: for each device (offset, words) of what it decomposes in its column.
      owned: for each device, the sides it decomposes of each of its matrices.
      length: words of the longest column; all are padded to it.
    """

    columns: list[list[Piece]]
    spans: list[tuple[int, int]]
    owned: list[dict[Unit, tuple[str, ...]]]
    length: int

    @property
    def imbalance(self) -> float:
        """The longest column over the mean one; the rest is padding."""
        used = [sum(piece.size for piece in column) for column in self.columns]
        return self.length * len(used) / sum(used)

    @property
    def fingerprint(self) -> int:
        """A positive number below 2³¹ that is another for another layout."""
        return zlib.crc32(repr(self).encode()) >> 1 or 1

    def units(self, column: int) -> list[Unit]:
        """The matrices that a column preconditions, in the order of the buffer."""
        return list(dict.fromkeys(piece.unit for piece in self.columns[column]))


def make_layout(
    chosen: Plan, options: KfacOptions, distribution: Distribution
) -> Layout:
    """Returns where each column keeps the decompositions of its layers.

    Raises:
      ConfigError: quotients are to be kept, which need both factors on one device.
    """
    if options.prediv_used and not distribution.colocate_factors:
        raise ConfigError("prediv=True needs colocate_factors=True: got False")
    assignment, units = distribution.assign(chosen), chosen.units
    owned: list[dict[Unit, tuple[str, ...]]] = [
        {
            unit: sides
            for unit in units
            if (sides := tuple(s for s in SIDES if assignment.owner[unit][s] == rank))
        }
        for rank in range(distribution.axis_size)
    ]
    spans, columns = [(0, 0)] * distribution.axis_size, []
    for members in distribution.columns:
        pieces: list[Piece] = []
        end = 0
        for rank in members:
            start = end
            for unit, sides in owned[rank].items():
                for name, shape in _shapes(options, units[unit], sides).items():
                    pieces.append(Piece(unit, name, shape, end))
                    end += pieces[-1].size
            spans[rank] = (start, end - start)
        columns.append(pieces)
    length = max((p.offset + p.size for column in columns for p in column), default=0)
    return Layout(columns, spans, owned, length)


def _shapes(
    options: KfacOptions, block: Block, sides: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Returns the items that come from decomposing `sides`."""
    shapes = item_shapes(options, block.a, block.g)
    if len(sides) == len(SIDES):
        return shapes
    return {
        name: shape
        for name, shape in shapes.items()
        if name.rpartition("_")[2] in sides
    }


def comm_volume(
    chosen: Plan, options: KfacOptions, distribution: Distribution
) -> dict[str, int]:
    """Returns the words that K-FAC moves, beside the all-reduce of the gradients.

    `"factors"`: operand of the all-reduce of A and G on each device, at every update of
    the factors. `"decompositions"`: broadcast within columns, over all devices
    together, at every decomposition: (m − 1) times each item. `"gradients"`: broadcast
    within rows, over all devices together, at every step: (P − m) times each matrix.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> chosen = kfac.plan(models.mlp((2,), 2, widths=()))
      >>> comm_volume(chosen, KfacOptions(), Distribution(4, 0.5))
      {'factors': 13, 'decompositions': 19, 'gradients': 12}
    """
    blocks = list(chosen.units.values())
    p, m = distribution.axis_size, distribution.workers

    def words(n: int) -> int:
        return n * (n + 1) // 2 if options.symmetry_aware else n * n

    items = sum(
        math.prod(shape)
        for block in blocks
        for shape in item_shapes(options, block.a, block.g).values()
    )
    return {
        "factors": sum(words(b.a) + words(b.g) for b in blocks) if p > 1 else 0,
        "decompositions": (m - 1) * items,
        "gradients": (p - m) * sum(b.a * b.g for b in blocks),
    }


def memory_words(
    chosen: Plan, options: KfacOptions, distribution: Distribution | None = None
) -> Mapping[str, Any]:
    """Returns words per device: `"factors"`, `"decompositions"`, padding included.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> chosen = kfac.plan(models.mlp((2,), 2, widths=()))
      >>> memory_words(chosen, KfacOptions())
      {'factors': 13, 'decompositions': 19}
    """
    alone = distribution or Distribution(1)
    return {
        "factors": sum(b.a**2 + b.g**2 for b in chosen.units.values()),
        "decompositions": make_layout(chosen, options, alone).length,
    }
