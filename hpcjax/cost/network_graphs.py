"""One plane of a network as a graph of accelerators and switches."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

PORTS = 64  # of a switch
HALF = PORTS // 2
Cable = Literal["trace", "copper", "fibre"]
CABLES: tuple[Cable, ...] = ("trace", "copper", "fibre")


class Links(NamedTuple):
    """Some links, one entry for each pair of nodes that they join.

    Attributes:
      start: nodes at one end.
      end: nodes at the other.
      count: how many links they are.
      cable: what they are made of.
      orbit: name; all links of one name carry equal loads in balanced traffic of all
        accelerators, from `start` to `end`, and back. None if each may carry another.
    """

    start: np.ndarray
    end: np.ndarray
    count: np.ndarray
    cable: Cable
    orbit: str | None


@dataclasses.dataclass(frozen=True)
class NetworkGraph:
    """Accelerators, switches and the links between them.

    Attributes:
      accelerators: how many; they are the first nodes.
      nodes: in all; the others are switches.
      start: of each link bundle, one end.
      end: the other.
      count: links of the bundle, each of which carries one unit both ways at a time.
      cable: of the bundle, a place in `CABLES`.
      orbit: of the bundle, see `Links`.
      sources: accelerators whose balanced traffic loads every orbit, summed over its
        bundles, as that of any other accelerators would in the mean.
      pools: of each switch, the pool of switches with which it may share a case, and −1
        for those that have one alone.
    """

    accelerators: int
    nodes: int
    start: np.ndarray
    end: np.ndarray
    count: np.ndarray
    cable: np.ndarray
    orbit: np.ndarray
    sources: np.ndarray
    pools: np.ndarray

    @classmethod
    def of(
        cls,
        accelerators: int,
        pools: Sequence[int] | np.ndarray,
        links: Sequence[Links],
        sources: Sequence[int] | np.ndarray,
    ) -> "NetworkGraph":
        """Returns the graph of some links; `pools` has an entry for each switch."""
        links = [each for each in links if len(each.start)]

        def join(parts: Sequence[np.ndarray]) -> np.ndarray:
            return np.concatenate([np.zeros(0, np.int64), *parts])

        cables = [np.full(len(e.start), CABLES.index(e.cable)) for e in links]
        return cls(
            accelerators=accelerators,
            nodes=accelerators + len(pools),
            start=join([each.start for each in links]),
            end=join([each.end for each in links]),
            count=join([each.count for each in links]),
            cable=join(cables),
            orbit=join(_number_orbits(links)),
            sources=np.asarray(sources),
            pools=np.asarray(pools, np.int64),
        )

    @property
    def injection(self) -> int:
        """Links of an accelerator, all of which it may fill at once."""
        ends = np.concatenate([self.start, self.end])
        degree = np.bincount(ends, np.tile(self.count, 2), self.nodes)
        return int(degree[: self.accelerators].min(initial=degree.max(initial=0)))

    def count_cables(self) -> dict[str, int]:
        """Returns how many links are of each kind."""
        found = np.bincount(self.cable, self.count, len(CABLES))
        return dict(zip(CABLES, found.astype(int).tolist(), strict=True))

    def count_switches(self, *, shared: bool = True) -> int:
        """Returns how many cases of 64 ports the switches fill.

        Args:
          shared: whether switches of a pool share cases.
        """
        ends = np.concatenate([self.start, self.end])
        used = np.bincount(ends, np.tile(self.count, 2), self.nodes)
        used = used[self.accelerators :]
        alone = self.pools < 0 if shared else np.ones(len(self.pools), bool)
        cases = np.ceil(used[alone] / PORTS).sum()
        for pool in np.unique(self.pools[~alone]):
            cases += np.ceil(used[self.pools == pool].sum() / PORTS)
        return int(cases)


def _number_orbits(links: Sequence[Links]) -> list[np.ndarray]:
    """Returns the number of each bundle's orbit."""
    numbers: list[np.ndarray] = []
    known: dict[str, int] = {}
    first = 0
    for each in links:
        size = len(each.start)
        if each.orbit is None:
            numbers.append(first + np.arange(size))
            first += size
            continue
        if each.orbit not in known:
            known[each.orbit], first = first, first + 1
        numbers.append(np.full(size, known[each.orbit]))
    return numbers


def join_nodes(
    start: np.ndarray, end: np.ndarray, cable: Cable, orbit: str | None = None
) -> Links:
    """Returns one link for each pair of nodes; pairs may be repeated."""
    start, end = np.ravel(start), np.ravel(end)
    pairs, count = np.unique(np.stack([start, end]), axis=1, return_counts=True)
    return Links(pairs[0], pairs[1], count, cable, orbit)


def deal(links: np.ndarray, first: int, several: int) -> np.ndarray:
    """Returns to which of `several` nodes from `first` on the links go, in turns."""
    return first + links % several
