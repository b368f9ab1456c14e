"""Graphs drawn with a long tail of degrees."""

import numpy as np

from hpcjax.core import checks
from hpcjax.graphs.graph import Graph, make_graph

_QUADRANTS = 0.57, 0.19, 0.19  # and what is left
_PIECE = 1 << 20


def rmat(scale: int, edges: int, seed: int = 0) -> Graph:
    """Returns a Kronecker graph: bits of an edge's ends pick one of four quadrants.

    Quadrants have probabilities 0.57, 0.19, 0.19 and 0.05; vertices are renumbered at
    random, so that those with many edges do not lie side by side. Multi-edges and loops
    are kept.

    Args:
      scale: of 2^scale vertices, 1 to 30.
      edges: how many, at least 1.
      seed: of the draw.

    References:
      Chakrabarti, Zhan and Faloutsos, R-MAT, SDM 2004; the probabilities of Graph500.

    Examples:
      >>> graph = rmat(8, 1000)
      >>> graph.vertices, len(graph.senders)
      (256, 1000)
    """
    checks.require_count(1, scale=scale, edges=edges)
    checks.require(scale <= 30, "scale must be at most 30", scale=scale)
    rng = np.random.Generator(np.random.Philox(seed))
    one, other, third = _QUADRANTS
    ends = np.zeros((2, edges), np.int64)
    for start in range(0, edges, _PIECE):
        part = ends[:, start : start + _PIECE]
        for _ in range(scale):
            drawn = rng.random(part.shape[1], np.float32)
            part *= 2
            part[0] += drawn >= one + other
            part[1] += (drawn >= one) & (drawn < one + other)
            part[1] += drawn >= one + other + third
    senders, receivers = rng.permutation(1 << scale)[ends]
    return make_graph(senders, receivers, 1 << scale)
