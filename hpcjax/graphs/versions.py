"""Lists of neighbours that change, and are read as they were at any version.

The edges stay where they are, on a disk for instance. Versions hold what is inserted
and deleted, sorted, in memory, and are merged into lists when these are read.
"""

from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.graphs.csr import Csr

_NONE = np.zeros(0, np.int64)


class Lists(NamedTuple):
    """The lists of a version: of the edges below what is alive, then what was inserted.

    Edges have numbers: those below their places there, inserted ones the next.

    Attributes:
      csr: the edges below.
      deleted: int64 [edges], numbers of those of them that are gone, ascending.
      receivers: int64 [edges], of inserted edges that are alive, ascending.
      senders: int64 [edges], theirs.
      numbers: int64 [edges], theirs; ascending in a list.
      shortened: int64 [vertices], that lost an edge in this version.
    """

    csr: Csr
    deleted: np.ndarray = _NONE
    receivers: np.ndarray = _NONE
    senders: np.ndarray = _NONE
    numbers: np.ndarray = _NONE
    shortened: np.ndarray = _NONE

    def degrees(self, vertices: np.ndarray) -> np.ndarray:
        """Returns how many edges vertices receive, int64 [vertices]."""
        first, stop = self._ranks(vertices)
        low, high = self._inserted(vertices)
        return stop - first + high - low

    def read(
        self, vertices: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns senders and numbers of edges, −1 where a position is.

        Args:
          vertices: integers [vertices].
          positions: integers [slots, vertices], below the degrees, or −1.
        """
        first, stop = self._ranks(vertices)
        numbers = rank = first + positions
        if len(self.deleted):
            # Of the i-th deleted edge `deleted[i] - i` edges before it are alive: as
            # many deleted ones precede an edge as there are such counts up to its rank.
            alive = self.deleted - np.arange(len(self.deleted))
            numbers = rank + np.searchsorted(alive, rank, side="right")
        behind = rank >= stop
        if not len(self.numbers):
            return self._take(numbers, positions < 0)
        senders, numbers = self._take(numbers, behind | (positions < 0))
        at = (self._inserted(vertices)[0] + rank - stop)[behind]
        senders[behind], numbers[behind] = self.senders[at], self.numbers[at]
        return senders, numbers

    def _take(
        self, numbers: np.ndarray, none: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns senders and numbers of edges below, −1 for none."""
        if none.any():
            numbers = np.where(none, -1, numbers)
        senders = self.csr.neighbours[numbers]
        senders[none] = -1
        return senders, numbers

    def find(self, vertices: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Returns where edges are in the lists of vertices, −1 where they are not.

        Args:
          vertices: integers [vertices].
          numbers: integers [slots, vertices], −1 for none.
        """
        edges = len(self.csr.neighbours)
        first, stop = self._ranks(vertices)
        rank, gone = _rank(self.deleted, numbers)
        gone |= (rank < first) | (rank >= stop) | (numbers < 0)
        found = np.where(gone, -1, rank - first)
        if len(self.numbers):
            span = max(self.numbers.max(), numbers.max(initial=0)) + 1
            keys = self.receivers * span + self.numbers
            wanted = np.asarray(vertices, np.int64) * span + numbers
            at, there = _rank(keys, wanted, among=True)
            place = stop - first + at - self._inserted(vertices)[0]
            found = np.where(numbers < edges, found, np.where(there, place, -1))
        return found

    def _ranks(self, vertices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns how many edges below are alive before a list, and before its end."""
        vertices = np.asarray(vertices)
        starts, stops = (self.csr.offsets[vertices + end] for end in (0, 1))
        if not len(self.deleted):
            return starts, stops
        return _rank(self.deleted, starts)[0], _rank(self.deleted, stops)[0]

    def _inserted(self, vertices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where a vertex's inserted edges begin, and their end."""
        low, high = (
            np.searchsorted(self.receivers, vertices, side=side)
            for side in ("left", "right")
        )
        return low, high

    def _receivers_of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns who receives edges that are alive."""
        below = np.searchsorted(self.csr.offsets, numbers, side="right") - 1
        order = np.argsort(self.numbers)
        own = np.searchsorted(self.numbers, numbers, sorter=order)
        if not len(order):
            return below
        inserted = self.receivers[order[own % len(order)]]
        return np.where(numbers < len(self.csr.neighbours), below, inserted)


def _integers(values: object, empty: tuple[int, ...], rule: str) -> np.ndarray:
    """Returns an array of a shape as that of an empty one, int64."""
    array = np.asarray(values)
    array = array if array.size else np.zeros(empty, np.int64)
    good = array.dtype.kind in "iu" and array.shape[1:] == empty[1:]
    good &= array.ndim == len(empty)
    checks.require(good, rule, shape=array.shape, dtype=array.dtype)
    return array.astype(np.int64)


def _rank(
    ascending: np.ndarray, values: np.ndarray, *, among: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns values less how many precede them, or how many do, and who is one."""
    before = np.searchsorted(ascending, values)
    there = np.zeros(np.shape(values), bool)
    if len(ascending):
        there = ascending[before % len(ascending)] == values
        there &= before < len(ascending)
    return before if among else values - before, there


class VersionedCsr:
    """A store of edges that may be updated; its versions count from 0.

    Args:
      csr: the edges at first, numbered by their places, as `Csr.of` does. Its arrays
        may be memory-mapped; they are never written.

    Raises:
      ConfigError: edges are numbered otherwise.

    Examples:
      >>> csr = Csr(np.array([0, 2, 2]), np.array([0, 1]), np.arange(2))
      >>> store = VersionedCsr(csr)
      >>> store.apply(inserts=[[0, 0]], deletes=[0])
      1
      >>> store.snapshot().read(np.array([0]), np.array([[0], [1]]))[0].tolist()
      [[1], [0]]
      >>> store.snapshot(0).degrees(np.array([0])).tolist()
      [2]
    """

    def __init__(self, csr: Csr) -> None:
        rule = "edges must be numbered by their places, as Csr.of does"
        edges = len(csr.neighbours)
        checks.require(np.array_equal(csr.edge_ids, np.arange(edges)), rule)
        checks.require(edges > 0, "a store begins with at least one edge")
        self.csr, self._next = csr, edges
        self._versions = [Lists(csr)]

    @property
    def version(self) -> int:
        """The newest one."""
        return len(self._versions) - 1

    def snapshot(self, version: int | None = None) -> Lists:
        """Returns the lists of a version, which do not change; None for the newest.

        Raises:
          ConfigError: there is no such version.
        """
        version = self.version if version is None else version
        rule = f"versions are 0 to {self.version}"
        checks.require(0 <= version <= self.version, rule, version=version)
        return self._versions[version]

    def apply(self, inserts: object = (), deletes: object = ()) -> int:
        """Makes a version, whose number it returns.

        Args:
          inserts: pairs of sender and receiver, integers [edges, 2]. Their numbers
            follow the largest so far, in this order.
          deletes: numbers of edges, integers [edges], that were alive before.

        Raises:
          ConfigError: an end is no vertex; a number is not of an edge that is alive,
            or comes twice; arrays are not of these shapes, or not of integers. Nothing
            is changed.
        """
        old = self.snapshot()
        new = _integers(inserts, (0, 2), "inserts must be integers [edges, 2]")
        gone = _integers(deletes, (0,), "deletes must be integers [edges]")
        vertices = len(self.csr.offsets) - 1
        rule = f"ends of edges must be in [0, {vertices})"
        outside = new[((new < 0) | (new >= vertices)).any(1)]
        checks.require(not len(outside), rule, first=outside[:1].tolist())
        self._check_alive(old, gone)
        stay = ~np.isin(old.numbers, gone)
        numbers = np.r_[old.numbers[stay], self._next + np.arange(len(new))]
        senders = np.r_[old.senders[stay], new[:, 0]]
        receivers = np.r_[old.receivers[stay], new[:, 1]]
        order = np.argsort(receivers, kind="stable")
        below = gone[gone < len(self.csr.neighbours)]
        made = Lists(
            csr=self.csr,
            deleted=np.sort(np.r_[old.deleted, below]),
            receivers=receivers[order],
            senders=senders[order],
            numbers=numbers[order],
            shortened=np.unique(old._receivers_of(gone)),
        )
        self._next += len(new)
        self._versions.append(made)
        return self.version

    def _check_alive(self, lists: Lists, numbers: np.ndarray) -> None:
        """Raises ConfigError unless all are of edges that are alive, each once."""
        below = (numbers >= 0) & (numbers < len(self.csr.neighbours))
        alive = below & ~np.isin(numbers, lists.deleted)
        alive |= np.isin(numbers, lists.numbers)
        dead = numbers[~alive]
        rule = "deletes must be numbers of edges that are alive"
        checks.require(not len(dead), rule, first=dead[:1].tolist())
        once = len(np.unique(numbers)) == len(numbers)
        checks.require(once, "deletes must differ")
