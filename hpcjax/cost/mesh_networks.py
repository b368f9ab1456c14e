"""Networks without a global switch: HammingMesh, and the torus; imports no JAX."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import numpy as np

from hpcjax.collectives import ring_cycles
from hpcjax.core import checks
from hpcjax.core.config import Size
from hpcjax.cost.network_graphs import (
    HALF,
    PORTS,
    Cable,
    Links,
    NetworkGraph,
    deal,
    join_nodes,
)
from hpcjax.cost.networks import Bill, Network


@dataclasses.dataclass(frozen=True, kw_only=True)
class HxMesh(Network):
    """HammingMesh: boards with a mesh of a·b accelerators, in a grid of x·y boards.

    The accelerators of a row of the whole grid that stand at the edges of their boards
    are joined by a fat tree, from copper, and those of a column by one from fibre. A
    tree of at most 64 ports is one switch, or a part of one; else it has two levels.

    Attributes:
      a: accelerators in a column of a board.
      b: in a row of a board.
      x: boards in a column.
      y: boards in a row.
    """

    planes: ClassVar[int] = 4

    a: Size = 2
    b: Size = 2
    x: Size = 16
    y: Size = 16

    @property
    def accelerators(self) -> int:
        """N, how many accelerators it has."""
        return self.a * self.b * self.x * self.y

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of accelerators."""
        return self.a * self.x, self.b * self.y

    def cycles(self) -> tuple[tuple[int, ...], ...]:
        """Returns the cycles that rings go around, see `Network`."""
        return ring_cycles(*self.shape)

    def bisection(self) -> float:
        """Returns the bandwidth between its halves, see `Network`."""
        # A cut between columns of boards takes half of the ports of every row's tree:
        # y of 2y in a·x rows, out of 4 · N / 2; that between rows likewise.
        rule = "the bisection is known if x and y are even"
        checks.require(self.x % 2 == self.y % 2 == 0, rule, x=self.x, y=self.y)
        return min(1 / (2 * self.a), 1 / (2 * self.b))

    def bill(self) -> Bill:
        """Returns what it is bought of."""
        rows, cols = self.shape
        along = _line_bill(rows, 2 * self.y)
        down = _line_bill(cols, 2 * self.x)
        switches = along.switches + down.switches
        copper, fibre = rows * 2 * self.y, cols * 2 * self.x
        fibre += along.uplinks + down.uplinks
        return Bill(*(self.planes * count for count in (switches, copper, fibre)))

    def graph(self) -> NetworkGraph:
        """Returns one of its planes."""
        rows, cols = self.shape
        grid = np.arange(rows * cols).reshape(rows, cols)
        across = _Lines(grid, self.b, "row", self.accelerators, self.a)
        first = self.accelerators + across.switches
        down = _Lines(grid.T, self.a, "column", first, self.b)
        # Lines of a single switch share cases with the others of their dimension.
        pools = np.repeat(
            [-1 if across.spines else 0, -1 if down.spines else 1],
            [across.switches, down.switches],
        )
        links = [
            *_board_links(grid, self.a, self.b),
            *across.links("copper"),
            *down.links("fibre"),
        ]
        # Boards can change places, and whole leaves, if all leaves have equally many.
        alike = _equal_leaves(2 * self.y) and _equal_leaves(2 * self.x)
        if not alike:
            links = [each._replace(orbit=None) for each in links]
        sources = grid[: self.a, : self.b] if alike else grid
        return NetworkGraph.of(self.accelerators, pools, links, sources.ravel())


class _LineBill(NamedTuple):
    switches: int
    uplinks: int


def _line_bill(lines: int, ports: int) -> _LineBill:
    """Returns switches and links between them of all lines of a dimension."""
    if ports <= PORTS:
        return _LineBill(math.ceil(lines * ports / PORTS), 0)
    leaves, spines = _tree(ports)
    return _LineBill(lines * (leaves + spines), lines * HALF * leaves)


def _tree(ports: int) -> tuple[int, int]:
    """Returns leaves and spines of a line that one switch cannot hold."""
    leaves = math.ceil(ports / HALF)
    return leaves, math.ceil(leaves / 2)


def _equal_leaves(ports: int) -> bool:
    """Says whether all boards of a line have leaves of the same kind."""
    return ports <= PORTS or ports % HALF == 0


class _Lines:
    """The trees of all lines of a grid of accelerators, and their switches."""

    def __init__(self, grid: np.ndarray, board: int, name: str, first: int, kinds: int):
        """Numbers the switches from `first` on.

        Args:
          grid: accelerators, lines first.
          board: accelerators of a board in a line.
          name: of the lines.
          first: number of the first switch.
          kinds: lines that a board has, each of which differs from the others.
        """
        lines, length = grid.shape
        self.grid, self.board, self.name, self.kinds = grid, board, name, kinds
        self.ports = 2 * (length // board)
        single = self.ports <= PORTS
        self.leaves, self.spines = (1, 0) if single else _tree(self.ports)
        each = self.leaves + self.spines
        self.first = first + np.arange(lines) * each
        self.switches = lines * each

    def links(self, cable: Cable) -> list[Links]:
        """Returns the links of accelerators to leaves, and of these to spines."""
        found: list[Links] = []
        boards = np.arange(self.ports // 2)
        # Two ports of each board: those of 16 boards fill the lower half of a leaf.
        leaf = boards // (HALF // 2) if self.leaves > 1 else 0 * boards
        for kind in range(self.kinds):
            rows = np.arange(kind, len(self.grid), self.kinds)
            for side, place in (("first", 0), ("last", self.board - 1)):
                ends = self.grid[rows][:, boards * self.board + place]
                switch = self.first[rows, None] + leaf
                orbit = f"{self.name} {kind} {side}"
                found.append(join_nodes(ends, switch, cable, orbit))
            if self.spines:
                found.append(self._uplinks(rows, f"{self.name} {kind} up"))
        return found

    def _uplinks(self, rows: np.ndarray, orbit: str) -> Links:
        numbers = np.arange(HALF * self.leaves)
        spine = deal(numbers, self.leaves, self.spines)
        start = self.first[rows, None] + numbers // HALF
        return join_nodes(start, self.first[rows, None] + spine, "fibre", orbit)


def _board_links(grid: np.ndarray, a: int, b: int) -> list[Links]:
    """Returns the traces of all boards, an orbit for each place on a board."""
    found: list[Links] = []
    for i in range(a):
        for j in range(b):
            own = grid[i::a, j::b]
            if j + 1 < b:
                beside = grid[i::a, j + 1 :: b]
                found.append(join_nodes(own, beside, "trace", f"right {i} {j}"))
            if i + 1 < a:
                below = grid[i + 1 :: a, j::b]
                found.append(join_nodes(own, below, "trace", f"down {i} {j}"))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torus(Network):
    """A torus of accelerators, on boards of 2×2, whose other links are fibre.

    Attributes:
      rows: of accelerators.
      cols: of accelerators.
    """

    planes: ClassVar[int] = 4

    rows: Size = 32
    cols: Size = 32

    @property
    def accelerators(self) -> int:
        """N, how many accelerators it has."""
        return self.rows * self.cols

    def cycles(self) -> tuple[tuple[int, ...], ...]:
        """Returns the cycles that rings go around, see `Network`."""
        return ring_cycles(self.rows, self.cols)

    def bisection(self) -> float:
        """Returns the bandwidth between its halves, see `Network`."""
        # Two cuts across the longer dimension, out of 4 · N / 2; of a ring 2 · N / 2.
        rule = "the bisection is known if the longer side is even"
        even = max(self.rows, self.cols) % 2 == 0
        checks.require(even, rule, rows=self.rows, cols=self.cols)
        return (1 if min(self.rows, self.cols) > 1 else 2) / max(self.rows, self.cols)

    def bill(self) -> Bill:
        """Returns what it is bought of."""
        along, down = _count_wires(self.cols), _count_wires(self.rows)
        wires = self.rows * along + self.cols * down
        return Bill(0, 0, self.planes * wires)

    def graph(self) -> NetworkGraph:
        """Returns one of its planes."""
        grid = np.arange(self.accelerators).reshape(self.rows, self.cols)
        links = [*_wrapped(grid, "right"), *_wrapped(grid.T, "down")]
        return NetworkGraph.of(self.accelerators, (), links, [0])


def _count_wires(length: int) -> int:
    """Returns the links of a line of accelerators that leave their board."""
    return length - length // 2 if length > 1 else 0


def _wrapped(grid: np.ndarray, orbit: str) -> list[Links]:
    """Returns the links along lines of a torus: on boards, and between them."""
    length = grid.shape[1]
    place, after = np.arange(length), np.roll(grid, -1, axis=1)
    inside = (place % 2 == 0) & (place + 1 < length)
    outside = ~inside if length > 1 else inside
    return [
        join_nodes(grid[:, which], after[:, which], cable, orbit)
        for which, cable in ((inside, "trace"), (outside, "fibre"))
    ]
