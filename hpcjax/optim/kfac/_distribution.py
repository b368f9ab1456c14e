"""KAISA: which devices decompose a layer's factors, and which get its results."""

import math
import zlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from hpcjax.core.assignment import Assignment, assign_longest_first
from hpcjax.core.errors import ConfigError
from hpcjax.optim.kfac._blocks import Block, Plan, Unit
from hpcjax.optim.kfac._decomposition import SIDES, item_shapes
from hpcjax.optim.kfac.options import KfacOptions

Cost = Literal["compute", "memory"]
WORKER_AXIS, RECEIVER_AXIS = "grad_worker", "grad_receiver"
AXES = (WORKER_AXIS, RECEIVER_AXIS)


class Distribution:
    """How P devices share K-FAC's work and memory, after KAISA.

    Each layer has m = max(1, P·f) gradient workers, which keep its decomposition and
    precondition its gradient; the other P − m devices receive the result at every step.
    f = 1 (COMM-OPT) needs no such communication, f = 1/P (MEM-OPT) the least memory.

    The devices form a grid of m × n, n = P/m, numbered row by row. Each layer belongs
    to a column, whose m devices are its gradient workers, and each of these sends its
    result to the other devices of its row.

    Args:
      axis_size: P, the number of devices.
      grad_worker_fraction: f, the share of devices that are gradient workers of a
        layer.
      cost: the cost of a factor of n rows when work is balanced: `"compute"` stands for
        n³, `"memory"` for n².
      colocate_factors: whether one device decomposes both factors of a layer.

    Raises:
      ConfigError: f is outside [0, 1], or P·f does not divide P.

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
        # A column of one device must decompose both factors there.
        self.colocate_factors = colocate_factors or self.workers == 1

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axes and sizes of the grid, for `sharding.make_mesh`."""
        return {WORKER_AXIS: self.workers, RECEIVER_AXIS: self.receivers}

    @property
    def columns(self) -> list[list[int]]:
        """The devices of each column: the gradient workers of its layers."""
        n = self.receivers
        return [list(range(c, self.axis_size, n)) for c in range(n)]

    @property
    def rows(self) -> list[list[int]]:
        """The devices of each row, among which results are broadcast."""
        n = self.receivers
        return [list(range(r * n, r * n + n)) for r in range(self.workers)]

    def assign(self, chosen: Plan) -> Assignment:
        """Returns each matrix's column, and the device that decomposes each factor."""
        # An eigendecomposition of n rows takes O(n³) operations and stores O(n²)
        # numbers.
        power = {"compute": 3.0, "memory": 2.0}[self.cost]
        work = {
            unit: {"a": block.a**power, "g": block.g**power}
            for unit, block in chosen.units.items()
        }
        return assign_longest_first(work, self.columns, colocate=self.colocate_factors)


def _workers(axis_size: int, fraction: float) -> int:
    """Returns m, the number of gradient workers of a layer.

    Raises:
      ConfigError: it is not an integer that divides the number of devices.
    """
    inside = 0 <= fraction <= 1
    # The tolerance is for fractions such as 1/3, whose product with P is inexact.
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
    """The place of one array of a decomposition in its column's buffer, in words."""

    unit: Unit
    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Length in words."""
        return math.prod(self.shape)


class Layout(NamedTuple):
    """Where the buffer of each column keeps the decompositions of its layers.

    Each device holds its column's buffer as one flat array. What a device decomposes is
    contiguous in it, so that one broadcast passes it on.

    Attributes:
      columns: the pieces of each column, in the order of their offsets.
      spans: for each device (offset, words) of what it decomposes.
      owned: for each device the factors, `"a"` or `"g"`, that it decomposes of
        matrices.
      length: words of the longest column, to which all are padded.
    """

    columns: list[list[Piece]]
    spans: list[tuple[int, int]]
    owned: list[dict[Unit, tuple[str, ...]]]
    length: int

    @property
    def imbalance(self) -> float:
        """Length of the longest column over the mean length; the excess is padding."""
        used = [sum(piece.size for piece in column) for column in self.columns]
        return self.length * len(used) / sum(used)

    @property
    def fingerprint(self) -> int:
        """A hash of the layout, positive and below 2³¹, so never zero and an int32."""
        return zlib.crc32(repr(self).encode()) >> 1 or 1

    def units(self, column: int) -> list[Unit]:
        """Returns the matrices that a column preconditions, in the buffer's order."""
        return list(dict.fromkeys(piece.unit for piece in self.columns[column]))


def make_layout(
    chosen: Plan, options: KfacOptions, distribution: Distribution
) -> Layout:
    """Returns the layout of the columns' buffers.

    Raises:
      ConfigError: `prediv` without `colocate_factors`: a quotient needs the eigenvalues
        of both factors on one device.
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
    # Offsets grow device by device within a column, so that each device's results form
    # one span. Columns have buffers of their own, all starting at offset 0.
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
    """Returns names and shapes of the arrays that decomposing `sides` gives."""
    # Names end in the side they belong to, as in "values_a", except for a quotient of
    # both sides' eigenvalues, which needs both on one device.
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
    """Returns the words that K-FAC communicates besides the gradients' all-reduce.

    - `"factors"`: the operand, on each device, of the all-reduce of A and G, at every
      update of the factors.
    - `"decompositions"`: broadcasts within columns at every decomposition, summed over
      all devices: each array goes to m − 1 other gradient workers.
    - `"gradients"`: broadcasts within rows at every step, summed over all devices: each
      preconditioned matrix goes to the P − m devices that are not its workers.

    Examples:
      >>> from hpcjax import models
      >>> from hpcjax.optim import kfac
      >>> chosen = kfac.plan(models.mlp((2,), 2, widths=()))
      >>> comm_volume(chosen, KfacOptions(), Distribution(4, 0.5))
      {'factors': 13, 'decompositions': 19, 'gradients': 12}
    """
    blocks = list(chosen.units.values())
    p, m = distribution.axis_size, distribution.workers

    # A symmetric matrix is sent as one triangle, the diagonal included.
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
    """Returns the words that each device keeps, by purpose, padding included.

    Those of factors are of `factor_dtype`, those of decompositions of `inv_dtype`.

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
