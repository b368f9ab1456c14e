"""Sampled neighbourhoods as examples: blocks of vertices, padded to a rung."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hpcjax import graphs
from hpcjax.core.errors import ConfigError
from hpcjax.data.access import shuffle
from hpcjax.data.pipeline import shard_rows
from hpcjax.data.source import Batch, check_indices

Build = Callable[[np.ndarray, graphs.Draw], graphs.Blocks]
_PROBES = 8
# Seeds of runs are below it.
_PROBING, _EVALUATING = 2**32, 2**32 + 1


class BlockMaker:
    """Makes batches of blocks, with what a layer takes of the whole graph.

    Args:
      graph: the whole.
      csr: its lists.
      labels: integers [vertices].
      block: targets of a block.
    """

    def __init__(
        self, graph: graphs.Graph, csr: graphs.Csr, labels: np.ndarray, block: int
    ) -> None:
        self.graph, self.labels, self.block = graph, labels, block
        loops = graph.receivers[graph.senders == graph.receivers]
        self._loops = np.bincount(loops, minlength=graph.vertices).astype(np.float32)
        self._degrees = csr.degrees.astype(np.float32)
        features: Any = graph.features
        sparse = isinstance(features, graphs.SparseRows)
        self._entries = None
        if sparse:
            every = features.offsets, features.columns, features.values
            self._entries = graphs.Csr(*every)

    def sizes(self, blocks: graphs.Blocks) -> np.ndarray:
        """Returns what a ladder holds: rows of groups, edges of lists, and entries.

        The rows of the targets are left out, and a group has one that pads.
        """
        entries = 0
        if self._entries is not None:
            starts = self._entries.offsets
            counts = starts[blocks.vertices + 1] - starts[blocks.vertices]
            entries = counts.sum()
        rows = np.diff(blocks.hop_offsets)[:-1] + 1
        return np.array([*rows, *np.diff(blocks.edge_offsets), entries], np.int64)

    def batch(self, blocks: Sequence[graphs.Blocks], sizes: np.ndarray) -> Batch:
        """Returns "x", `graphs.Blocks` [batch, ...], and "y" and "scored".

        Labels are int32 [batch, block]; scored is float32, 0 for what fills a block up.

        Args:
          blocks: of the batch.
          sizes: that all are padded to, see `sizes`.
        """
        rows = jax.tree.map(
            lambda *leaves: np.stack(leaves),
            *(self._pad(each, sizes) for each in blocks),
        )
        labels = np.zeros((len(blocks), self.block), np.int32)
        scored = np.zeros(labels.shape, np.float32)
        for row, each in enumerate(blocks):
            targets = each.vertices[each.hop_offsets[-2] :]
            labels[row, : len(targets)] = self.labels[targets]
            scored[row, : len(targets)] = 1
        return {"x": rows, "y": labels, "scored": scored}

    def _pad(self, blocks: graphs.Blocks, sizes: np.ndarray) -> graphs.Blocks:
        """Returns a block as the model takes it."""
        hops = len(blocks.edge_offsets) - 1
        rows = (*sizes[:hops].tolist(), self.block + 1)
        padded = graphs.pad_blocks(blocks, rows, sizes[hops:-1])
        own, edges = padded.vertices, padded.edge_ids
        # Number −1, that of padding, takes the last one's: it is put to zero.
        real, kept = own >= 0, edges >= 0
        degrees = self._degrees[own] * real
        features = self._take(blocks.features, own, real, int(sizes[-1]))
        of_edges: Any = self.graph.edge_features
        if of_edges is not None:
            of_edges = of_edges[edges] * kept[:, None]
        return dataclasses.replace(
            padded,
            vertices=None,
            edge_ids=None,
            weights=_weigh(padded, degrees, kept),
            degrees=degrees,
            loops=self._loops[own] * real,
            features=features,
            edge_features=of_edges,
        )

    def _take(self, given: Any, own: np.ndarray, real: np.ndarray, entries: int) -> Any:
        """Returns features of rows, which a block may bring; zero where they pad."""
        if given is not None:
            features = np.zeros((len(own), *given.shape[1:]), given.dtype)
            features[real] = given
            return features
        if self._entries is None:
            return self.graph.features[own] * real[:, None]
        found = graphs.sample_neighbours(self._entries, own[real], -1, graphs.Draw(0))
        counts = np.zeros(len(own), np.int32)
        counts[real] = found.degrees
        counts[-1] = entries - len(found.neighbours)  # the last row pads
        more = (0, int(counts[-1]))
        return {
            "offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            "columns": np.pad(found.neighbours, more),
            "values": np.pad(found.edge_ids, more),
        }


def _weigh(blocks: graphs.Blocks, degrees: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns of each edge its receiver's degree over how many of it are listed."""
    weights = np.zeros(len(kept), np.float32)
    for start, stop in itertools.pairwise(blocks.edge_offsets):
        at, own = blocks.receivers[start:stop], kept[start:stop]
        listed = np.bincount(at[own], minlength=len(degrees))
        weights[start:stop] = own * degrees[at] / np.maximum(listed[at], 1)
    return weights


class BlockSampler:
    """Blocks of vertices in a new order each epoch, each sampled anew.

    An epoch's last block has what is left of its vertices.

    Args:
      maker: of batches.
      build: of blocks.
      vertices: integers [vertices], at least as many as a block has.
      spare: by how much the lowest rung is above the largest of some probes, a share.
    """

    def __init__(
        self, maker: BlockMaker, build: Build, vertices: np.ndarray, spare: float
    ) -> None:
        self._maker, self._build, self._spare = maker, build, spare
        self._vertices = vertices
        self._order = functools.lru_cache(4)(self._shuffle)

    def __len__(self) -> int:
        return math.ceil(len(self._vertices) / self._maker.block)

    def figures(self) -> dict[str, float]:
        """Returns what a snapshot read for a block, in the mean, and its bytes."""
        if not isinstance(self._build, graphs.Snapshot):
            return {}
        read = self._build.mean_reads()
        kept = self._build.memory_report()["snapshot"]
        return {"snapshot_bytes": kept} | {f"read_{k}": v for k, v in read.items()}

    def _shuffle(self, seed: int, epoch: int) -> np.ndarray:
        return self._vertices[shuffle(len(self._vertices), seed, epoch)]

    def make(self, position: int, seed: int) -> graphs.Blocks:
        """Returns a block by its position in the endless sequence.

        What samples with a memory makes those before it that it has not seen, again.
        """
        if isinstance(self._build, graphs.Snapshot):
            for missed in self._build.missed(position, seed):
                self._make(missed, seed)
        return self._make(position, seed)

    def _make(self, position: int, seed: int) -> graphs.Blocks:
        epoch, place = divmod(position, len(self))
        size = self._maker.block
        targets = self._order(seed, epoch)[place * size : (place + 1) * size]
        return self._build(targets, graphs.Draw(seed, epoch, place))

    @functools.cached_property
    def ladder(self) -> graphs.Ladder:
        """What blocks are padded to, by probes that are the same in all runs."""
        probes = (self.make(number, _PROBING) for number in range(_PROBES))
        largest = (1 + self._spare) * _largest(self._maker, probes)
        return graphs.Ladder(np.ceil(largest).astype(np.int64))

    def sample(
        self, number: int, batch_size: int, seed: int, shard: tuple[int, int]
    ) -> Batch:
        """Returns the shard's blocks of a batch, see `BlockMaker.batch`.

        Raises:
          ConfigError: one of several shards has a block above the lowest rung, or would
            have a snapshot that depends on its own batches.
        """
        if isinstance(self._build, graphs.Snapshot):
            self._build.check_shards(shard[1])
        ladder = self.ladder  # first, for its probes end a snapshot's rows
        places = range(batch_size)[shard_rows(batch_size, shard)]
        made = [self.make(number * batch_size + place, seed) for place in places]
        rung = ladder.rung(_largest(self._maker, made))
        if rung and shard[1] > 1:
            raise ConfigError(
                "processes that share a batch must compile one shape, and a block is "
                f"above it: raise dataset.spare={self._spare}, such as to "
                f"{(1 + self._spare) * 2 ** (rung / 2) - 1:.1f}"
            )
        return self._maker.batch(made, ladder.sizes(rung))


class BlockSource:
    """Vertices by blocks in their order, with fixed draws, all padded to one shape.

    Args:
      maker: of batches.
      build: of blocks.
      vertices: integers [vertices].
    """

    def __init__(self, maker: BlockMaker, build: Build, vertices: np.ndarray) -> None:
        self._maker, self._build, self._vertices = maker, build, vertices

    def __len__(self) -> int:
        return math.ceil(len(self._vertices) / self._maker.block)

    def _make(self, index: int) -> graphs.Blocks:
        size = self._maker.block
        targets = self._vertices[index * size : (index + 1) * size]
        return self._build(targets, graphs.Draw(_EVALUATING, 0, index))

    @functools.cached_property
    def _sizes(self) -> np.ndarray:
        every = (self._make(index) for index in range(len(self)))
        return _largest(self._maker, every)

    def gather(self, indices: np.ndarray) -> Batch:
        """Returns blocks by number, see `BlockMaker.batch`."""
        check_indices(indices, len(self))
        made = [self._make(int(index)) for index in indices]
        return self._maker.batch(made, self._sizes)


def _largest(maker: BlockMaker, blocks: Any) -> np.ndarray:
    """Returns the largest of each of the sizes of blocks, at least 1."""
    sizes = np.stack([maker.sizes(each) for each in blocks]).max(0)
    return np.maximum(sizes, 1)
