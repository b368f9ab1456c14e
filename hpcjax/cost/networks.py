"""What all networks of accelerators have: a bill and a graph; imports no JAX.

A network has planes, all alike, of which a graph shows one. Prices are of 64-port
switches and of cables; traces on a board cost nothing. All links have one bandwidth.

References:
  Hoefler et al., HammingMesh: A Network Topology for Large-Scale Deep Learning, SC
  2022: sections 3 and 4 and appendix C.
"""

import abc
import dataclasses
from typing import ClassVar, NamedTuple

from hpcjax.core.config import Config
from hpcjax.cost.network_graphs import NetworkGraph


class Prices(NamedTuple):
    """Dollars.

    Attributes:
      switch: of a switch of 64 ports.
      copper: of a cable of 5 m.
      fibre: of an active cable of 20 m.
    """

    switch: int = 14_280
    copper: int = 272
    fibre: int = 603


PRICES = Prices()


class Bill(NamedTuple):
    """What a network is bought of, in all planes.

    Attributes:
      switches: of 64 ports.
      copper: cables.
      fibre: cables.
    """

    switches: int
    copper: int
    fibre: int

    def dollars(self, prices: Prices = PRICES) -> int:
        """Returns the price.

        Examples:
          >>> Bill(switches=1, copper=64, fibre=0).dollars()
          31688
        """
        return sum(count * price for count, price in zip(self, prices, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(Config, abc.ABC):
    """A network of accelerators."""

    planes: ClassVar[int] = 16

    @property
    @abc.abstractmethod
    def accelerators(self) -> int:
        """N, how many accelerators it has."""

    @abc.abstractmethod
    def bill(self) -> Bill:
        """Returns what it is bought of, by the rules of its construction."""

    @abc.abstractmethod
    def graph(self) -> NetworkGraph:
        """Returns one of its planes."""

    @abc.abstractmethod
    def bisection(self) -> float:
        """Returns the bandwidth between its halves, over that of half the members.

        Of an odd number the halves are as equal as can be, and the smaller one counts.

        Raises:
          ConfigError: the least cut is not known for such sizes.
        """

    def cycles(self) -> tuple[tuple[int, ...], ...]:
        """Returns the cycles through all accelerators that rings of it go around."""
        return (tuple(range(self.accelerators)),)

    def count_bill(self, *, shared: bool = True) -> Bill:
        """Returns the bill by counting the graph.

        Args:
          shared: whether lines of few ports share switches, as in `bill`.
        """
        graph = self.graph()
        cables = graph.count_cables()
        switches = graph.count_switches(shared=shared)
        one = switches, cables["copper"], cables["fibre"]
        return Bill(*(self.planes * count for count in one))
