"""A graph in files: its features in partitions of rows, its edges in buckets."""

import itertools
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from hpcjax import graphs
from hpcjax.core import files
from hpcjax.core.errors import DataFormatError
from hpcjax.data.row_file import RowFile
from hpcjax.data.source import Dataset

_EDGE = np.dtype("<i4")  # sender, receiver and number of an edge
EDGE_BYTES = 3 * _EDGE.itemsize
# What a damaged file of arrays is told by.
_DAMAGE = ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error
Rows = Callable[[np.ndarray], np.ndarray]


def write_store(
    folder: pathlib.Path, whole: Dataset, rows: Rows, place: np.ndarray, partitions: int
) -> None:
    """Writes a graph, a partition at a time; it is there once its index is.

    Args:
      folder: to write to.
      whole: the data set; features of its graph are not used.
      rows: makes features of vertices by their numbers, float32 [vertices, features].
      place: row of each vertex in the file of features.
      partitions: of rows, of equal size but for the last.

    Raises:
      DiskFull: there is no room.
    """
    graph, train, held_out = whole.graph, whole.train, whole.validation
    assert isinstance(graph, graphs.Graph)
    ends = {"senders": graph.senders, "receivers": graph.receivers}
    size, width = -(-graph.vertices // partitions), rows(np.arange(1)).shape[1]
    order, shape = np.argsort(place), (graph.vertices, width)
    pieces = (rows(order[at : at + size]) for at in range(0, len(order), size))
    with RowFile.build(folder / "features", pieces, shape, np.float32, size) as file:
        row_sums = file.sums
    own = {name: place[each] // size for name, each in ends.items()}
    bucket = own["receivers"].astype(np.int64) * partitions + own["senders"]
    by = np.argsort(bucket, kind="stable")
    counts = np.bincount(bucket, minlength=partitions**2)
    starts, sums = np.append(0, np.cumsum(counts)), np.zeros(len(counts), np.uint64)
    with files.replacing(folder / "edges") as path, path.open("wb") as file:
        files.check_room(path, len(by) * EDGE_BYTES)
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            ids = by[start:stop]
            edges = np.stack([graph.senders[ids], graph.receivers[ids], ids], 1)
            data = edges.astype(_EDGE).tobytes()
            sums[number] = _digest(data, number)
            file.write(data)
    loops = graph.receivers[graph.senders == graph.receivers]
    index: dict[str, Any] = {
        "place": place.astype(np.int32),
        "starts": starts,
        "sums": sums,
        "row_sums": row_sums,
        "labels": train.labels,  # pyrefly: ignore
        "train": train.numbers,  # pyrefly: ignore
        "held_out": held_out.numbers,  # pyrefly: ignore
        "degrees": np.bincount(graph.receivers, minlength=graph.vertices),
        "loops": np.bincount(loops, minlength=graph.vertices),
        "form": np.array([partitions, width, whole.outputs]),
    }
    with files.replacing(folder / "index.npz") as path, path.open("wb") as file:
        np.savez(file, **index)


class GraphStore:
    """What `write_store` has written.

    Attributes:
      place: row of each vertex in the file of features, int32 [vertices].
      labels: of vertices, int32.
      train: vertices that are trained on; `held_out` others.
      degrees: edges that each vertex receives, float32; `loops` those from itself.
      partitions: of rows; each has `size` of them, the last ones fewer.
      width: number of features; `outputs` that of classes.
      bytes_read: from both files; of these `edge_bytes_read` from that of edges.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens a store.

        Raises:
          DataFormatError: its files are damaged, or of different graphs.
        """
        self._folder, self.bytes_read, self.edge_bytes_read = folder, 0, 0
        try:
            with np.load(folder / "index.npz") as index:
                found = {name: index[name] for name in index.files}
            self.partitions, self.width, self.outputs = found["form"].tolist()
        except _DAMAGE as error:
            raise self._damaged("index.npz", f"damaged: {error}") from error
        self.place, self.labels = found["place"], found["labels"]
        self.train, self.held_out = found["train"], found["held_out"]
        self.degrees = found["degrees"].astype(np.float32)
        self.loops = found["loops"].astype(np.float32)
        self._starts, self._sums = found["starts"], found["sums"]
        self.size = -(-len(self.place) // self.partitions)
        wanted = int(self._starts[-1]) * EDGE_BYTES
        size = (folder / "edges").stat().st_size if self._has("edges") else 0
        if size != wanted:
            told = f"expected {wanted} bytes, found {size}"
            raise self._damaged("edges", told)
        with self._features() as file:
            shape, want = file.shape, (len(self.place), self.width)
            if shape != want or file.partition_rows != self.size:
                told = f"expected rows {[*want]} by {self.size}, found {[*shape]} by "
                raise self._damaged("features", f"{told}{file.partition_rows}")
            if (file.sums != found["row_sums"]).any():
                raise self._damaged("features", "rows of another graph")

    def _has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def _damaged(self, name: str, told: str) -> DataFormatError:
        path = self._folder / name
        return DataFormatError(f"{path}: {told}; delete the folder, it is made again")

    def _features(self) -> RowFile:
        return RowFile(self._folder / "features", writable=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of all features and edges."""
        return 4 * len(self.place) * self.width + int(self._starts[-1]) * EDGE_BYTES

    def bucket_bytes(self, state: np.ndarray) -> int:
        """Returns the bytes of the edges among some partitions."""
        counts = np.diff(self._starts).reshape(self.partitions, self.partitions)
        return int(counts[np.ix_(state, state)].sum()) * EDGE_BYTES

    def rows(self, places: np.ndarray) -> np.ndarray:
        """Returns rows of features, of which partitions are read one by one."""
        with self._features() as file:
            found = file[places]
            self.bytes_read += file.bytes_read
        return found

    def partition(self, number: int) -> np.ndarray:
        """Returns the rows of a partition; the last ones may have fewer, or none."""
        every = number * self.size + np.arange(self.size)
        return self.rows(every[every < len(self.place)])

    def lists(
        self,
        receivers: Iterable[int],
        senders: np.ndarray,
        wanted: np.ndarray | None = None,
    ) -> graphs.Csr:
        """Returns what vertices receive, each list in the order of the graph.

        Args:
          receivers: partitions of vertices that have lists.
          senders: sorted partitions of vertices that are in them.
          wanted: whether a vertex has a list, bool [vertices]; None for all.
        """
        # Neighbouring buckets are read at once.
        cuts = np.flatnonzero(np.diff(senders) > 1) + 1
        runs = [(int(x[0]), int(x[-1]) + 1) for x in np.split(senders, cuts) if len(x)]
        found = [np.zeros((0, 3), _EDGE)]
        with (self._folder / "edges").open("rb", buffering=0) as file:
            for receiver in receivers:
                first = receiver * self.partitions
                for start, stop in runs:
                    edges = self._read(file.fileno(), first + start, first + stop)
                    found.append(
                        edges if wanted is None else edges[wanted[edges[:, 1]]]
                    )
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        edges = np.concatenate(found)
        # Numbers of edges do not decrease with receivers.
        own, at, ids = edges[np.argsort(edges[:, 2])].T.copy()
        counts = np.bincount(at, minlength=len(self.place))
        return graphs.Csr(np.append(0, np.cumsum(counts)), own, ids)

    def _read(self, file: int, first: int, last: int) -> np.ndarray:
        """Returns the edges of neighbouring buckets."""
        starts = self._starts[first : last + 1] * EDGE_BYTES
        data = bytearray(int(starts[-1] - starts[0]))
        left, place = memoryview(data), int(starts[0])
        while left:
            count = os.preadv(file, [left], place)
            if not count:
                raise self._damaged("edges", f"cut off at {place}")
            left, place = left[count:], place + count
        self.bytes_read += len(data)
        self.edge_bytes_read += len(data)
        cuts = itertools.pairwise((starts - starts[0]).tolist())
        for number, (start, stop) in enumerate(cuts, first):
            told = _digest(memoryview(data)[start:stop], number)
            if told != self._sums[number]:
                raise self._damaged("edges", f"bucket {number} has other bytes")
        return np.frombuffer(data, _EDGE).reshape(-1, 3)


def _digest(data: Any, seed: int) -> int:
    """Returns the checksum of a bucket; it differs by its number."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)
