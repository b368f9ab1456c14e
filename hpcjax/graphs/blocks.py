"""Blocks: target vertices, those that they were sampled from, and the edges between."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hpcjax.core.structs import pytree, static
from hpcjax.graphs.features import Features
from hpcjax.graphs.graph import Graph, SelfLoops
from hpcjax.graphs.segments import segment_mean


class Part(NamedTuple):
    """What a layer computes of a graph: a layer's arguments of these names.

    Attributes:
      graph: the vertices that it sees, and the edges.
      weights: of edges, for sums; None for 1.
      degrees: of vertices in the whole graph; None for those of `graph`.
      targets: how many vertices, the last ones, are computed; None for all.
    """

    graph: Graph
    weights: Any = None
    degrees: Any = None
    targets: int | None = None


@pytree
class Blocks:
    """The sampled neighbourhood of targets, for as many layers as there were hops.

    Rows are groups of vertices, those of the last hop first and the targets last. The
    vertices that layer l sees begin at row `hop_offsets[l]`, those that it computes at
    `hop_offsets[l + 1]`: to advance is to take a slice. Edges are lists, the one of the
    last hop first: DENSE's are of the vertices that were new at a hop, and serve all
    layers; the others are of all vertices that a layer computes, and serve this one.

    Attributes:
      vertices: integers [rows], −1 for a row that pads.
      senders: int32 [edges], rows.
      receivers: int32 [edges], rows; does not decrease in a list.
      edge_ids: integers [edges], −1 for an edge that pads.
      weights: float32 [edges], a receiver's degree over how many of it are listed.
      degrees: float32 [rows], edges that a vertex receives in the whole graph.
      loops: float32 [rows], how many of these come from itself.
      features: of rows, an array or a dict of `SparseRows`' arrays.
      edge_features: [edges, features].
      hop_offsets: where each group of rows begins, and their end.
      edge_offsets: where each list begins, and their end.
      reuse: whether lists are DENSE's.
    """

    vertices: Any
    senders: Any
    receivers: Any
    edge_ids: Any
    weights: Any = None
    degrees: Any = None
    loops: Any = None
    features: Features = None
    edge_features: Any = None
    hop_offsets: tuple[int, ...] = static()
    edge_offsets: tuple[int, ...] = static()
    reuse: bool = static()

    def edges_of(self, layer: int) -> slice:
        """Returns the edges of a layer, the first of which sees all rows."""
        stop = self.edge_offsets[-1 if self.reuse else layer + 1]
        return slice(self.edge_offsets[layer], stop)

    def receivers_of(self, layer: int) -> slice:
        """Returns the rows that the layer's own list is of."""
        stop = self.hop_offsets[layer + 2 if self.reuse else -1]
        return slice(self.hop_offsets[layer + 1], stop)

    def part(self, layer: int, self_loops: SelfLoops | None = None) -> Part:
        """Returns what a layer computes.

        Args:
          layer: from 0, which sees all rows.
          self_loops: as of `add_self_loops`; None for those that are there.
        """
        first, edges = self.hop_offsets[layer], self.edges_of(layer)
        of_edges = None if self.edge_features is None else self.edge_features[edges]
        vertices = self.hop_offsets[-1] - first
        graph = Graph(
            senders=self.senders[edges] - first,
            receivers=self.receivers[edges] - first,
            edge_features=of_edges,
            vertices=vertices,
        )
        targets = self.hop_offsets[-1] - self.hop_offsets[layer + 1]
        degrees = self.degrees[first:]
        part = Part(graph, self.weights[edges], degrees, targets)
        if self_loops is None:
            return part
        left_out = self.loops[first:] if self_loops == "one" else 0
        return _add_loops(part, degrees - left_out + 1, self_loops)


def _add_loops(part: Part, degrees: Any, how: SelfLoops) -> Part:
    """Returns a part with a loop behind the list of each vertex that it computes."""
    graph, targets = part.graph, part.targets or 0
    real = graph.senders != graph.receivers
    every = jnp.arange(targets) + graph.vertices - targets
    ends = jnp.searchsorted(graph.receivers, every, side="right")
    lists = graph.receivers - every[0]
    edges, loops = jnp.arange(len(real)) + lists, ends + jnp.arange(targets)

    def merge(of_edges: Any, of_loops: Any) -> Any:
        size = len(real) + targets
        both = jnp.zeros((size, *of_edges.shape[1:]), of_edges.dtype)
        return both.at[edges].set(of_edges).at[loops].set(of_loops)

    features = graph.edge_features
    if features is not None:
        mean = segment_mean(features, lists, targets, mask=real, is_sorted=True)
        features = merge(features, mean)
    merged = Graph(
        senders=merge(graph.senders, every),
        receivers=merge(graph.receivers, every),
        edge_features=features,
        vertices=graph.vertices,
    )
    kept = jnp.where(real, part.weights, 0) if how == "one" else part.weights
    return Part(merged, merge(kept, 1.0), degrees, targets)


def pad_blocks(blocks: Blocks, rows: Any, edges: Any) -> Blocks:
    """Returns blocks with so many rows in each group, and edges in each list.

    An edge that pads is at the last row that its list is of, which must pad too.

    Args:
      blocks: of `dense_blocks` or `layerwise_blocks`.
      rows: of each group, more than it has where a list is of it.
      edges: of each list, no fewer than it has.
    """
    hop_offsets, edge_offsets = _offsets(rows), _offsets(edges)
    place = _shift(blocks.hop_offsets, hop_offsets)
    at = _shift(blocks.edge_offsets, edge_offsets)
    padded = dataclasses.replace(
        blocks,
        vertices=np.full(hop_offsets[-1], -1, blocks.vertices.dtype),
        edge_ids=np.full(edge_offsets[-1], -1, blocks.edge_ids.dtype),
        senders=np.empty(edge_offsets[-1], np.int32),
        hop_offsets=hop_offsets,
        edge_offsets=edge_offsets,
    )
    for layer, (start, stop) in enumerate(itertools.pairwise(edge_offsets)):
        padded.senders[start:stop] = padded.receivers_of(layer).stop - 1
    receivers = padded.senders.copy()
    padded.vertices[place] = blocks.vertices
    padded.edge_ids[at] = blocks.edge_ids
    padded.senders[at] = place[blocks.senders]
    receivers[at] = place[blocks.receivers]
    return dataclasses.replace(padded, receivers=receivers)


def _offsets(sizes: Any) -> tuple[int, ...]:
    """Returns where groups of these sizes begin, and their end."""
    return (0, *np.cumsum(sizes).tolist())


def _shift(old: tuple[int, ...], new: tuple[int, ...]) -> np.ndarray:
    """Returns the new place of each entry of groups that begin elsewhere now."""
    moved = np.subtract(new[:-1], old[:-1])
    return np.arange(old[-1]) + np.repeat(moved, np.diff(old))
