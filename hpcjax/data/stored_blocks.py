"""Blocks of a graph in files: among the partitions of an epoch, or of all of them."""

import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from hpcjax import graphs
from hpcjax.data.block_source import BlockMaker, BlockSampler
from hpcjax.data.graph_store import GraphStore

# Of lists, and blocks an epoch; returns what makes blocks of targets and a draw.
Sampling = Callable[[graphs.Csr], Any]


class StoredMaker(BlockMaker):
    """Makes batches of blocks that bring their features."""

    def __init__(self, store: GraphStore, block: int) -> None:
        self.graph, self.labels, self.block = outline(store), store.labels, block
        self._loops, self._degrees = store.loops, store.degrees
        self._entries: Any = None


def outline(store: GraphStore) -> graphs.Graph:
    """Returns the graph without an edge, its features zeros that take no memory."""
    none, vertices = np.zeros(0, np.int32), len(store.place)
    zeros = np.broadcast_to(np.float32(0), (vertices, store.width))
    return graphs.Graph(senders=none, receivers=none, features=zeros, vertices=vertices)


class ResidentBlocks:
    """Makes blocks of what is resident in their epoch; a thread at a time.

    When the epoch changes, partitions that its state does not have give their rows to
    those that it adds, and the edges among all of them are read.

    Args:
      store: of the graph.
      capacity: partitions that are resident.
      draw: returns the partitions of a seed and an epoch.
      sampling: of lists, returns what makes blocks.
    """

    def __init__(
        self,
        store: GraphStore,
        capacity: int,
        draw: Callable[[int, int], np.ndarray],
        sampling: Sampling,
    ) -> None:
        self._store, self._draw, self._sampling = store, draw, sampling
        self._rows = np.zeros((capacity * store.size, store.width), np.float32)
        self._first = np.full(store.partitions, -1)  # row of each that is resident
        self._free = [store.size * slot for slot in reversed(range(capacity))]
        self._now: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self.largest = 0  # bytes of rows and of edges, as they are in the file

    def __call__(self, targets: np.ndarray, draw: graphs.Draw) -> graphs.Blocks:
        """Returns a block with its features."""
        with self._lock:
            if self._now != (draw.seed, draw.epoch):
                self._turn(draw.seed, draw.epoch)
            blocks = self._build(targets, draw)
            place, size = self._store.place[blocks.vertices], self._store.size
            rows = self._rows[self._first[place // size] + place % size]
        return dataclasses.replace(blocks, features=rows)

    def _turn(self, seed: int, epoch: int) -> None:
        """Makes an epoch's partitions resident."""
        self._now, state = None, np.sort(self._draw(seed, epoch))
        held = np.flatnonzero(self._first >= 0)
        for part in np.setdiff1d(held, state):
            self._free.append(int(self._first[part]))
            self._first[part] = -1
        for part in np.setdiff1d(state, held).tolist():
            rows, first = self._store.partition(part), self._free[-1]
            self._rows[first : first + len(rows)] = rows
            self._first[part] = self._free.pop()
        self._build = self._sampling(self._store.lists(state.tolist(), state))
        edges = self._store.bucket_bytes(state)
        self.largest = max(self.largest, self._rows.nbytes + edges)
        self._now = seed, epoch


class StoredSampler(BlockSampler):
    """Blocks of training vertices by what is resident, see `BlockSampler`."""

    def __init__(
        self, store: GraphStore, resident: ResidentBlocks, block: int, spare: float
    ) -> None:
        super().__init__(StoredMaker(store, block), resident, store.train, spare)
        self._store, self._resident = store, resident

    def figures(self) -> dict[str, float]:
        """Returns bytes of the graph, of what is resident, and that were read."""
        return {
            "graph_bytes": self._store.num_bytes,
            "resident_bytes": self._resident.largest,
            "read_bytes": self._store.bytes_read,
            "edge_bytes": self._store.edge_bytes_read,
        }


def whole_blocks(store: GraphStore, sampling: Sampling) -> Any:
    """Returns what makes blocks of whole neighbourhoods, read by partition."""
    none = np.zeros(0, np.int32)
    empty = graphs.Csr(np.zeros(len(store.place) + 1, np.int64), none, none)
    build = sampling(empty)  # its lists are not used
    sample = functools.partial(_sample, store, build.keywords["sample"])

    def make(targets: np.ndarray, draw: graphs.Draw) -> graphs.Blocks:
        blocks = build(targets, draw, sample=sample)
        rows = store.rows(store.place[blocks.vertices])
        return dataclasses.replace(blocks, features=rows)

    return make


def _sample(
    store: GraphStore,
    inner: graphs.Sample,
    csr: graphs.Csr,
    vertices: np.ndarray,
    fanout: int,
    draw: graphs.Draw,
) -> graphs.Csr:
    """Lists neighbours as `graphs.sample_neighbours`, of a partition at a time."""
    del csr
    wanted = np.zeros(len(store.place), bool)
    wanted[vertices] = True
    owner, every = store.place[vertices] // store.size, np.arange(store.partitions)
    order, none = np.argsort(owner, kind="stable"), np.zeros(0, np.int32)
    found = [graphs.Csr(np.zeros(1, np.int64), none, none)]  # a hop may find no vertex
    for part in np.unique(owner).tolist():
        lists = store.lists([part], every, wanted)
        found.append(inner(lists, vertices[owner == part], fanout, draw))
    joined = graphs.Csr(
        np.append(0, np.cumsum(np.concatenate([each.degrees for each in found]))),
        np.concatenate([each.neighbours for each in found]),
        np.concatenate([each.edge_ids for each in found]),
    )
    return graphs.sample_neighbours(joined, np.argsort(order), -1, draw)
