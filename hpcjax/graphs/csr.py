"""The edges of a graph by the vertex that receives them, for samplers on the host."""

from typing import Any, NamedTuple

import numpy as np

from hpcjax.graphs.graph import Graph


class Csr(NamedTuple):
    """Lists of neighbours, in numpy arrays that may be memory-mapped.

    List i is `neighbours[offsets[i]:offsets[i + 1]]`, the vertices that send to i.

    Attributes:
      offsets: int64 [lists + 1].
      neighbours: integers [edges]; as often as there are edges.
      edge_ids: integers [edges], the number of each edge where its features are.
    """

    offsets: np.ndarray
    neighbours: np.ndarray
    edge_ids: np.ndarray

    @classmethod
    def of(cls, graph: Graph) -> "Csr":
        """Returns the edges of a graph of numpy arrays, in its order.

        Examples:
          >>> from hpcjax.graphs import make_graph
          >>> csr = Csr.of(make_graph([0, 2, 1, 1], [1, 0, 1, 1], vertices=3))
          >>> csr.offsets.tolist(), csr.neighbours.tolist()
          ([0, 1, 4, 4], [2, 0, 1, 1])
        """
        offsets = np.searchsorted(graph.receivers, np.arange(graph.vertices + 1))
        ids = np.arange(len(graph.senders))
        return cls(offsets, graph.senders, ids)

    def graph(self, **features: Any) -> Graph:
        """Returns the graph with an edge for each entry.

        Args:
          **features: `features`, `edge_type` and `edge_features` of the result, those
            of edges by `edge_ids`.

        Raises:
          ConfigError: a neighbour that is no vertex.
        """
        for name in ("edge_type", "edge_features"):
            if features.get(name) is not None:
                features[name] = features[name][self.edge_ids]
        return Graph(
            senders=np.asarray(self.neighbours, np.int32),
            receivers=self.receivers().astype(np.int32),
            vertices=len(self.degrees),
            **features,
        )

    @property
    def degrees(self) -> np.ndarray:
        """How many edges each vertex receives, int64 [lists]."""
        return np.diff(self.offsets)

    def receivers(self) -> np.ndarray:
        """Returns the list that each edge is in, int64 [edges]."""
        return np.repeat(np.arange(len(self.degrees)), self.degrees)
