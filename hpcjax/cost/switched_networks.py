"""Networks whose accelerators hang on switches: fat tree, Dragonfly; imports no JAX."""

import dataclasses
import math
from typing import ClassVar, Literal

import numpy as np

from hpcjax.core import checks
from hpcjax.core.config import Size
from hpcjax.cost.network_graphs import (
    HALF,
    PORTS,
    Links,
    NetworkGraph,
    deal,
    join_nodes,
)
from hpcjax.cost.networks import Bill, Network

_LARGEST = {2: PORTS, 3: HALF * PORTS}  # leaves of a tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class FatTree(Network):
    """A fat tree of 64-port switches, whose leaves may have fewer links up than down.

    Leaves are full: there may be some endpoints more than are asked for. Copper joins
    endpoints to leaves, fibre everything above. With three levels, 32 leaves are a pod.

    Attributes:
      endpoints: how many are asked for.
      down: ports of a leaf to accelerators.
      up: ports of a leaf to switches above.
      levels: of switches, 2 or 3.
    """

    planes: ClassVar[int] = 16

    endpoints: Size = 1024
    down: Size = 32
    up: Size = 32
    levels: Literal[2, 3] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"a leaf has {PORTS} ports"
        checks.require(self.down + self.up <= PORTS, rule, down=self.down, up=self.up)
        most = self.down * _LARGEST[self.levels]
        rule = f"a tree of {self.levels} levels has at most {most} endpoints"
        checks.require(self.endpoints <= most, rule, endpoints=self.endpoints)

    @property
    def leaves(self) -> int:
        """Switches of the lowest level."""
        return math.ceil(self.endpoints / self.down)

    @property
    def accelerators(self) -> int:
        """N, how many accelerators it has."""
        return self.leaves * self.down

    def bisection(self) -> float:
        """Returns the bandwidth between its halves, see `Network`.

        All above the leaves counts as one switch.
        """
        # Half of the leaves are cut off above. An odd one is cut in two, its switch on
        # the side of the leaves that are not cut off.
        pairs, odd = divmod(self.leaves, 2)
        cut, half = pairs * self.up + odd * (self.down // 2), self.accelerators // 2
        return min(1.0, cut / half) if half else 1.0

    def bill(self) -> Bill:
        """Returns what it is bought of."""
        uplinks = self.leaves * self.up
        middle, upper = 0, uplinks
        if self.levels == 3:
            middle = math.ceil(uplinks / HALF)
            upper = HALF * middle
        switches = self.leaves + middle + math.ceil(upper / PORTS)
        fibre = uplinks + (upper if middle else 0)
        one = switches, self.accelerators, fibre
        return Bill(*(self.planes * count for count in one))

    def graph(self) -> NetworkGraph:
        """Returns one of its planes."""
        members = np.arange(self.accelerators)
        leaf = self.accelerators + np.arange(self.leaves)
        links = _hang(members, leaf)
        low, middle = leaf, 0
        if self.levels == 3:
            uplinks, middle = self._join_pods(leaf)
            links.append(uplinks)
            low = leaf[-1] + 1 + np.arange(middle)
        up = HALF if middle else self.up
        top = math.ceil(len(low) * up / PORTS)
        numbers = np.arange(len(low) * up)
        above = deal(numbers, low[-1] + 1, top)
        links.append(join_nodes(low[numbers // up], above, "fibre"))
        pools = np.full(self.leaves + middle + top, -1)
        sources = members[:: self.down]
        return NetworkGraph.of(self.accelerators, pools, links, sources)

    def _join_pods(self, leaf: np.ndarray) -> tuple[Links, int]:
        """Returns the links of leaves to the middle of their pods, and its switches."""
        start, end, first = [], [], leaf[-1] + 1
        for pod in np.split(leaf, range(HALF, len(leaf), HALF)):
            numbers = np.arange(len(pod) * self.up)
            several = math.ceil(len(numbers) / HALF)
            start.append(pod[numbers // self.up])
            end.append(deal(numbers, first, several))
            first += several
        links = join_nodes(np.concatenate(start), np.concatenate(end), "fibre")
        return links, int(first - leaf[-1] - 1)


def _hang(members: np.ndarray, switches: np.ndarray) -> list[Links]:
    """Returns the links of accelerators to switches, which have equally many each."""
    by_switch = zip(np.split(members, len(switches)), switches, strict=True)
    return [
        join_nodes(own, np.full_like(own, each), "copper", f"{each}")
        for own, each in by_switch
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dragonfly(Network):
    """Groups of routers that are all joined, and links between all pairs of groups.

    What global links are left when all pairs of groups have equally many goes to the
    next groups on both sides, and to the opposite one if the rest is odd.

    Attributes:
      routers: of a group.
      endpoints: of a router.
      links: of a router to other groups.
      groups: how many.
    """

    planes: ClassVar[int] = 16

    routers: Size = 32
    endpoints: Size = 17
    links: Size = 16
    groups: Size = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        ports = self.endpoints + self.links + self.routers - 1
        sizes = dataclasses.asdict(self)
        checks.require(ports <= PORTS, f"a router has {PORTS} ports", **sizes)
        rule = "every group needs a link to every other"
        leaving = self.routers * self.links
        checks.require(1 < self.groups <= leaving + 1, rule, **sizes)
        rule = "links between groups have two ends"
        checks.require(self.groups * leaving % 2 == 0, rule, **sizes)

    @property
    def accelerators(self) -> int:
        """N, how many accelerators it has."""
        return self.routers * self.endpoints * self.groups

    def bisection(self) -> float:
        """Returns the bandwidth between its halves, see `Network`."""
        # Of halves of neighbouring groups, which have most links among them. Where an
        # odd number is left over, and opposite groups get some, others may have fewer.
        even = self.groups % 2 == 0
        checks.require(even, "the bisection needs even groups", groups=self.groups)
        half = self.groups // 2 * self.routers
        cut = sum((one < half) != (other < half) for one, other in self._join_groups())
        return min(1.0, 2 * cut / self.accelerators)

    def bill(self) -> Bill:
        """Returns what it is bought of."""
        routers = self.routers * self.groups
        inside = self.groups * self.routers * (self.routers - 1) // 2
        one = routers, self.accelerators + inside, routers * self.links // 2
        return Bill(*(self.planes * count for count in one))

    def graph(self) -> NetworkGraph:
        """Returns one of its planes."""
        members = np.arange(self.accelerators)
        count = self.routers * self.groups
        every = self.accelerators + np.arange(count).reshape(self.groups, -1)
        one, other = np.triu_indices(self.routers, 1)
        ends = np.array(list(self._join_groups())).T + self.accelerators
        links = [
            *_hang(members, every.ravel()),
            join_nodes(every[:, one], every[:, other], "copper"),
            join_nodes(ends[0], ends[1], "fibre"),
        ]
        sources = members[:: self.endpoints]
        pools = np.full(count, -1)
        return NetworkGraph.of(self.accelerators, pools, links, sources)

    def _join_groups(self) -> list[tuple[int, int]]:
        """Returns the routers at both ends of all links between groups.

        A group's links leave from its routers in turns.
        """
        groups = self.groups
        each, rest = divmod(self.routers * self.links, groups - 1)
        extra = {*range(1, rest // 2 + 1), *([groups // 2] if rest % 2 else [])}
        used = [0] * groups

        def take(group: int) -> int:
            used[group] += 1
            return group * self.routers + (used[group] - 1) % self.routers

        return [
            (take(one), take(other))
            for one in range(groups)
            for other in range(one + 1, groups)
            for _ in range(each + len({other - one, groups - (other - one)} & extra))
        ]
