"""Rows of sampled neighbours in memory, the arrays of a snapshot."""

from typing import NamedTuple

import numpy as np


class Edges(NamedTuple):
    """Senders and numbers of edges, [slots, vertices], −1 for none."""

    senders: np.ndarray
    numbers: np.ndarray

    def take(self, slots: np.ndarray) -> "Edges":
        """Returns entries by slot, none where it is −1."""
        columns = np.arange(slots.shape[1])
        return Edges(*(np.where(slots < 0, -1, each[slots, columns]) for each in self))

    def join(self, other: "Edges") -> "Edges":
        """Returns entries of both."""
        return Edges(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))

    def pack(self, width: int) -> "Edges":
        """Returns entries in the first slots, of which there are `width`."""
        real, packed = self.numbers >= 0, self
        if (real[1:] > real[:-1]).any():
            packed = self.take(np.argsort(~real, axis=0, kind="stable"))
        if len(real) < width:
            room = ((0, width - len(real)), (0, 0))
            packed = Edges(*(np.pad(e, room, constant_values=-1) for e in packed))
        return Edges(*(each[:width] for each in packed))

    @property
    def counts(self) -> np.ndarray:
        """How many there are, [vertices]."""
        return (self.numbers >= 0).sum(0)


class Rows:
    """The rows of a layer, or of all.

    Args:
      width: entries of a row, C.
      rows: how many.
      vertices: of the graph.
      edges: that numbers are below, roughly; decides their dtype.
    """

    def __init__(self, width: int, rows: int, vertices: int, edges: int) -> None:
        self.width = width
        number = np.int32 if edges < 2**30 else np.int64
        self.senders = np.full((rows, width), -1, np.int32)
        self.numbers = np.full((rows, width), -1, number)
        self.counts = np.zeros(rows, np.int32)
        self.used = np.full(rows, -1, np.int32)  # last batch
        self.turns = np.full(rows, -1, np.int32)  # the refresh that drew it
        self.owners = np.full(rows, -1, np.int32)
        self.slots = np.full(vertices, -1, np.int32)  # row of a vertex
        self.entry = self.senders.itemsize + self.numbers.itemsize  # bytes

    def get(self, rows: np.ndarray, slots: np.ndarray | None = None) -> Edges:
        """Returns entries of rows by slot, none where it is −1; None for all."""
        if slots is None:
            return Edges(self.senders[rows].T, self.numbers[rows].T)
        at, none = rows * self.width + slots, slots < 0
        arrays = (self.senders.ravel(), self.numbers.ravel())
        return Edges(*(np.where(none, -1, each[at]) for each in arrays))

    def put(self, rows: np.ndarray, edges: Edges) -> None:
        """Writes rows."""
        packed = edges.pack(self.width)
        self.senders[rows], self.numbers[rows] = packed.senders.T, packed.numbers.T
        self.counts[rows] = packed.counts

    def make_room(self, vertices: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Returns rows for new vertices: free ones, then those used longest ago."""
        free = self.used.copy()
        free[busy] = np.iinfo(free.dtype).max
        rows = np.argsort(free, kind="stable")[: len(vertices)]
        left = self.owners[rows]
        self.slots[left[left >= 0]] = -1
        self.owners[rows], self.slots[vertices] = vertices, rows
        self.turns[rows] = -1
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(e.nbytes for e in vars(self).values() if isinstance(e, np.ndarray))
