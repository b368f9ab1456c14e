"""The exact mean over a torus of members, on all links at once."""

import dataclasses
import math
from typing import Any

import numpy as np

from hpcjax.collectives.amounts import dense_words
from hpcjax.collectives.exchange import CommStats, Outcome, VectorMethod
from hpcjax.collectives.group import Group, Vector
from hpcjax.collectives.hamiltonian_cycles import ring_cycles
from hpcjax.collectives.rings import Rings, gather_parts, scatter_sum
from hpcjax.collectives.torus_config import TorusConfig
from hpcjax.collectives.transfers import Transfer
from hpcjax.core import checks

QUARTERS = 4


@dataclasses.dataclass(frozen=True)
class Torus(VectorMethod):
    """See `TorusConfig`."""

    config: TorusConfig

    def check_members(self, members: int) -> None:
        """Raises ConfigError unless rows · cols are the members."""
        rows, cols = self.find_shape(members)
        rule = "exchange=torus needs rows x cols members"
        checks.require(rows * cols == members, rule, rows=rows, cols=cols, size=members)

    def find_shape(self, members: int) -> tuple[int, int]:
        """Returns rows and columns; what is not given makes them up to the members."""
        rows, cols = self.config.rows, self.config.cols
        if rows is None and cols is None:
            divisors = range(math.isqrt(members), 0, -1)
            rows = next(size for size in divisors if members % size == 0)
        return rows or members // (cols or 1), cols or members // (rows or 1)

    def run(self, group: Group, x: Vector, own: Any, shared: Any) -> Outcome:
        """Averages the vector."""
        xp, size = group.xp, group.size
        padded = xp.concatenate([x, xp.zeros(_padding(x.size, size), x.dtype)])
        routes = self.list_routes(size)
        parts = padded.reshape(len(routes), -1)
        sums = [
            _sum_along(group, part, route)
            for part, route in zip(parts, routes, strict=True)
        ]
        mean = xp.concatenate(sums)[: x.size] / xp.float32(size)
        words = self.words(x.size, size)
        stats = CommStats.of(
            group, selected=x.size, kept=x.size, sent_words=words, received_words=words
        )
        return Outcome(mean, xp.zeros_like(x), own, shared, stats)

    def list_routes(self, members: int) -> list[list[Rings]]:
        """Returns the rings that each part of the vector goes around, one by one.

        With two cycles there are four parts, one for each direction of each. Where
        there is one, as in odd x 2, there are two, and half of the links are idle.
        """
        rows, cols = self.find_shape(members)
        grid = np.arange(rows * cols).reshape(rows, cols)
        if self.config.algorithm == "rings":
            walks = [[[walk]] for walk in ring_cycles(rows, cols)]
        else:
            walks = [[grid.tolist(), grid.T.tolist()], [grid.T.tolist(), grid.tolist()]]
        return [
            [Rings.of([walk[::way] for walk in ring], grid.size) for ring in route]
            for route in walks
            for way in (1, -1)
        ]

    def transfers(self, n: int, members: int, place: float) -> tuple[Transfer, ...]:
        """Returns one all-reduce of n words, which go over all links of a member."""
        words = dense_words(n + _padding(n, members), members)
        if self.config.algorithm == "rings":
            return (Transfer(words, passes=2),)
        return (Transfer(words, passes=2, per_pass=sum(self.find_shape(members)) - 2),)


def _padding(n: int, members: int) -> int:
    """Returns how many zeros make four quarters of equal parts of n words."""
    return -n % (QUARTERS * members)


def _sum_along(group: Group, x: Vector, route: list[Rings]) -> Vector:
    """Returns the sum over all members: parts of it along the first rings, and so on.

    Every member then has a part of the sum, from which all is gathered on the way back.
    """
    for rings in route:
        x = scatter_sum(group, x, rings)
    for rings in reversed(route):
        x = gather_parts(group, x, rings)
    return x
