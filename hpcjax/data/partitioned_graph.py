"""A graph larger than memory: blocks of what is resident of its files; no JAX."""

import dataclasses
import functools
import hashlib
import inspect
import math
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import filelock
import numpy as np

from hpcjax.core import checks, files
from hpcjax.core.config import Positive, Size
from hpcjax.core.errors import ConfigError
from hpcjax.data.objectives import BLOCKS
from hpcjax.data.sampled_graph import DenseConfig, LayerwiseConfig, SampledGraphConfig
from hpcjax.data.source import Dataset
from hpcjax.data.triples import rng_of

FOLDER = "partitioned_graphs"
_FORMAT = 2  # of the files: with another number they are made again


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedGraphConfig(SampledGraphConfig):
    """Blocks of a graph in files, of which some partitions are in memory (MariusGNN).

    Vertices are cut into partitions of rows, those that are trained on first. An epoch
    has the partitions of these and as many others as there is room for, drawn anew; its
    blocks see the neighbours that are resident, weighed as if they were a sample of
    all. Held-out blocks see all, which are read partition by partition. The files are
    made once, below the data root, of any source of vertices; one that can `stream` its
    features needs no room for all of them. Fields are those of `SampledGraphConfig`,
    and features dense; edges have none.

    Attributes:
      partitions: of all vertices.
      capacity: partitions that are resident.
      order: "sequential", others are drawn for each epoch; or "one_fill", those of the
        first epoch stay.
      relabel: the order of vertices that are not trained on: "random"; "given", by
        their numbers; or "classes", by their classes first, a control.
      memory: bytes of features and edges that may be resident, by which partitions and
        capacity are chosen in place of those given, see `graphs.choose_partitions`.
      disk_block: bytes of the disk's block, the least that edges of two partitions take
        in the mean then.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **SampledGraphConfig.smoke,
        **{"partitions": "8", "capacity": "6"},
    }
    figures: ClassVar[Mapping[str, str]] = {  # pyrefly: ignore[bad-override]
        "graph_bytes": ": of all features and edges",
        "resident_bytes": ": of these, most in memory while steps are taken",
        "read_bytes": ": of the files in training, with what sizes were probed with",
        "edge_bytes": ": of these, of edges",
    }

    sampler: DenseConfig | LayerwiseConfig = DenseConfig()
    partitions: Size = 64
    capacity: Size = 16
    order: Literal["sequential", "one_fill"] = "sequential"
    relabel: Literal["random", "given", "classes"] = "random"
    memory: Positive | None = None
    disk_block: Size = 512 * 1024

    def draw(self, training: int, seed: int, epoch: int) -> np.ndarray:
        """Returns the partitions of an epoch; the first `training` are always there.

        Raises:
          ConfigError: there is no room for these.
        """
        from hpcjax import graphs

        rng = rng_of(seed, epoch * (self.order == "sequential"))
        cut = self.partitions, self.capacity, training
        return graphs.sequential(*cut, rng).states[0]

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the blocks.

        Raises:
          ConfigError: fewer training vertices than a block has, or more partitions of
            them than are resident, features of edges, no data root, or less memory
            than two partitions need.
          DataFormatError: damaged files.
          DiskFull: there is no room for the files.

        Examples:
          >>> import tempfile
          >>> from hpcjax.data import CommunityGraphConfig
          >>> graph = CommunityGraphConfig(vertices=1000, labelled=200)
          >>> part = PartitionedGraphConfig(source=graph, fanouts=(5, 5))
          >>> blocks = part.load(pathlib.Path(tempfile.mkdtemp()))
          >>> len(blocks.train), len(blocks.validation), blocks.inputs
          (2, 2, (2, 128))
        """
        from hpcjax.data import stored_blocks
        from hpcjax.data.block_source import BlockSource
        from hpcjax.data.graph_store import GraphStore

        if self.memory is not None:
            return self.choose(root).load(root)
        folder = self._find(root)
        store, own = GraphStore(folder), GraphStore(folder)  # each counts its reads
        self._check(len(store.train), len(store.place))
        epoch = math.ceil(len(store.train) / self.block)
        seen = DenseConfig() if self.evaluate == "all" else self.sampler
        every = (-1,) * len(self.fanouts) if self.evaluate == "all" else self.fanouts
        draw = functools.partial(self.draw, math.ceil(len(store.train) / store.size))
        resident = stored_blocks.ResidentBlocks(
            *(store, self.capacity, draw),
            lambda csr: self.sampler.build(csr, self.fanouts, epoch),
        )
        whole = stored_blocks.whole_blocks(
            own, lambda csr: seen.build(csr, every, epoch)
        )
        maker = stored_blocks.StoredMaker(own, self.block)
        sampler: Any = stored_blocks.StoredSampler(
            store, resident, self.block, self.spare
        )
        return Dataset(
            sampler,
            BlockSource(maker, whole, store.held_out),
            inputs=(len(self.fanouts), self.block),
            outputs=store.outputs,
            objective=BLOCKS,
            graph=maker.graph,
        )

    def _check(self, train: int, vertices: int) -> None:
        """Raises ConfigError if the graph cannot be trained in these partitions."""
        rule = f"block must be at most the {train} training vertices"
        checks.require(self.block <= train, rule, block=self.block)
        rule = f"partitions must be at most the {vertices} vertices"
        checks.require(self.partitions <= vertices, rule, partitions=self.partitions)
        self.draw(math.ceil(train / -(-vertices // self.partitions)), 0, 0)

    def _find(self, root: pathlib.Path | None) -> pathlib.Path:
        """Returns the folder of the graph's files, which are made if need be.

        It is named by the source where that can be told without its features, or else
        by what it holds.
        """
        name, found = self._name(root, f"{self.partitions} {self.relabel}")
        folder = _inside(root, name)
        if not (folder / "index.npz").exists():
            self._write(folder, *(found or self.source.stream(root)))
        return folder

    def _name(self, root: Any, what: str) -> tuple[str, Any]:
        """Returns a name for what is made of the source, and this if it was loaded."""
        told = f"{_FORMAT} {what} {self.source!r}".encode()
        source, found = self.source, None
        if hasattr(source, "stream"):
            told += inspect.getsource(sys.modules[type(source).__module__]).encode()
        else:
            found = _stream(source, root)
            told += _digest(*found).encode()
        return hashlib.sha256(told).hexdigest()[:32], found

    def choose(self, root: pathlib.Path | None) -> Self:
        """Returns the config with the partitions that `memory` has room for.

        Raises:
          ConfigError: it has not even room for two.
        """
        from hpcjax import graphs
        from hpcjax.data.graph_store import EDGE_BYTES

        name, found = self._name(root, "sizes")
        path = _inside(root, f"{name}.json")
        if not path.exists():
            whole, rows = found or self.source.stream(root)
            nodes = whole.graph.vertices * rows(np.arange(1)).nbytes
            size = {"nodes": nodes, "edges": EDGE_BYTES * len(whole.graph.senders)}
            files.write_json(path, size)
        size = graphs.GraphBytes(**files.read_json(path))
        memory = int(self.memory or 0)
        cut = graphs.choose_partitions(size, memory, self.disk_block)
        own = {"partitions": cut.partitions, "capacity": cut.capacity}
        return dataclasses.replace(self, memory=None, **own)

    def _write(self, folder: pathlib.Path, whole: Any, rows: Any) -> None:
        from hpcjax.data.graph_store import write_store

        vertices, train = whole.graph.vertices, whole.train
        self._check(len(train), vertices)
        rule = "edges must have no features, which are not kept in files"
        checks.require(whole.graph.edge_features is None, rule)
        edges, rule = len(whole.graph.senders), "edges must be fewer than 2³¹"
        checks.require(edges < 2**31, rule, edges=edges)
        shuffled = rng_of(0).permutation(vertices)
        keys = {"random": shuffled, "given": 0, "classes": train.labels}[self.relabel]
        later = ~np.isin(np.arange(vertices), train.numbers)
        order = np.lexsort(np.broadcast_arrays(keys * later, later))
        place = np.argsort(order)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_suffix(".lock")):
            if (folder / "index.npz").exists():
                return  # of another process, meanwhile
            # What a killed process has left.
            shutil.rmtree(folder, ignore_errors=True)
            try:
                write_store(folder, whole, rows, place, self.partitions)
            except BaseException:
                shutil.rmtree(folder)
                raise


def _inside(root: pathlib.Path | None, name: str) -> pathlib.Path:
    """Returns where a file or folder is; it raises ConfigError without a root."""
    if root is None:
        raise ConfigError("the files are below a data root: got root=None")
    return files.inside(root, FOLDER, name)


def _stream(source: Any, root: pathlib.Path) -> Any:
    """Returns a data set and its features, of a source that has all in memory."""
    from hpcjax import graphs

    whole = source.load(root)
    features = graphs.make_dense(whole.graph.features)
    return whole, np.asarray(features, np.float32).__getitem__


def _digest(whole: Any, rows: Any) -> str:
    """Returns a digest of all that is written."""
    graph, digest = whole.graph, hashlib.sha256()
    parts = [each.numbers for each in (whole.train, whole.validation)]
    ends = [graph.senders, graph.receivers]
    arrays = *parts, *ends, whole.train.labels, np.array(whole.outputs)
    for array in (*arrays, rows(np.arange(graph.vertices))):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
