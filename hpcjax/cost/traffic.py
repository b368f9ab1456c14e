"""What share of its bandwidth a network has for balanced traffic, and around rings.

Messages go by shortest paths, split evenly over all of them, parallel links included.
A share is that of the injection bandwidth at which the first link is full: from routes
on the graph alone, without congestion, buffers or adaptive routes.
"""

import functools
from collections.abc import Iterator

import numpy as np
from scipy import sparse

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.cost.network_graphs import NetworkGraph
from hpcjax.cost.networks import Network

Cycles = tuple[tuple[int, ...], ...]
_BALANCED, _RINGS = 32, 4096  # columns at once, of many targets each and of one
_REACHED = 1024  # sources at once where a bit each is enough


@functools.lru_cache(maxsize=64)
def alltoall_share(network: Network) -> float:
    """Returns the share when all send equally much to all others.

    Every accelerator sends I / (N − 1) to each other, with I its links; the share is 1
    over the load of the fullest link. Only the paths of the graph's `sources` are
    followed: the other accelerators load its orbits alike.

    Examples:
      >>> from hpcjax.cost import Torus
      >>> round(alltoall_share(Torus(rows=4, cols=4)), 3)
      0.469
    """
    graph = network.graph()
    if graph.accelerators == 1:
        return 1.0
    loads = np.zeros((2, len(graph.start)))
    for sources in _split(graph.sources, _BALANCED):
        loads += follow_paths(graph, sources, _want_all(graph, sources))
    links = np.bincount(graph.orbit, graph.count)
    whole = np.stack([np.bincount(graph.orbit, each) for each in loads])
    alike = graph.accelerators / len(graph.sources)
    each = graph.injection / (graph.accelerators - 1)
    return float(1 / (whole / links).max() / (alike * each))


@functools.lru_cache(maxsize=64)
def ring_share(network: Network, cycles: Cycles | None = None) -> float:
    """Returns the share when all send to their neighbours in cycles.

    Every cycle goes both ways: with two, an accelerator sends a quarter of its
    bandwidth to each of four neighbours.

    Args:
      network: whose links are filled.
      cycles: through all accelerators; None for the network's own.

    Examples:
      >>> from hpcjax.cost import HxMesh
      >>> ring_share(HxMesh(a=2, b=2, x=2, y=2))
      1.0
    """
    graph, cycles = network.graph(), cycles or network.cycles()
    if graph.accelerators == 1:
        return 1.0
    loads = np.zeros((2, len(graph.start)))
    for pairs in _split(_list_pairs(cycles), _RINGS):
        loads += follow_paths(graph, pairs[:, 0], _want_one(graph, pairs[:, 1]))
    # The other way round loads every link in the other direction.
    both = (loads + loads[::-1]) / graph.count
    return float(1 / both.max() / (graph.injection / (2 * len(cycles))))


@functools.lru_cache(maxsize=64)
def diameter(network: Network) -> int:
    """Returns the most links on a shortest path between two accelerators.

    Examples:
      >>> from hpcjax.cost import Torus
      >>> diameter(Torus(rows=4, cols=4))
      4
    """
    graph = network.graph()
    parts = _split(graph.sources, _REACHED)
    return max(_count_levels(graph, sources) for sources in parts)


def _count_levels(graph: NetworkGraph, sources: np.ndarray) -> int:
    """Returns in how many links all sources have come to all accelerators.

    A bit for each source says at every node whether it has come there.
    """
    ends = np.concatenate([graph.end, graph.start])
    order = np.argsort(ends, kind="stable")
    before = np.concatenate([graph.start, graph.end])[order]
    nodes, first = np.unique(ends[order], return_index=True)
    here = np.zeros((graph.nodes, len(sources)), bool)
    here[sources, np.arange(len(sources))] = True
    reached = np.packbits(here, axis=1)
    whole = np.bitwise_or.reduce(reached)
    for level in range(graph.nodes):
        if (reached[: graph.accelerators] == whole).all():
            return level
        reached[nodes] |= np.bitwise_or.reduceat(reached[before], first)
    raise ConfigError("the network must be connected")


@functools.lru_cache(maxsize=64)
def ring_hops(network: Network) -> int:
    """Returns the most links between neighbours in the network's cycles."""
    if network.accelerators == 1:
        return 0
    graph = network.graph()
    return max(
        len(_walk(graph, pairs[:, 0], _want_one(graph, pairs[:, 1]))) - 1
        for pairs in _split(_list_pairs(network.cycles()), _RINGS)
    )


def follow_paths(
    graph: NetworkGraph, sources: np.ndarray, wanted: sparse.csr_array
) -> np.ndarray:
    """Returns the load of every bundle of links, in both directions.

    Args:
      graph: a plane of a network.
      sources: nodes, one for each column of `wanted`.
      wanted: what each source sends to every node, `[nodes, sources]`.

    Returns:
      Loads `[2, bundles]`: from `start` to `end`, and back.
    """
    levels = _walk(graph, sources, wanted)
    start, end, loads = graph.start, graph.end, np.zeros((2, len(graph.start)))
    passed = sparse.csr_array(wanted.shape)
    for before, level in zip(levels[-2::-1], levels[:0:-1], strict=True):
        # What passes a node, for each path to it: its own and what goes on from it.
        inverse = level.copy()
        inverse.data = 1 / inverse.data
        passed = (wanted.multiply(_ones(level)) + passed).multiply(inverse).tocsr()
        # A link carries that times the paths that come to it.
        loads[0] += _rows(before, start).multiply(_rows(passed, end)).sum(axis=1)
        loads[1] += _rows(before, end).multiply(_rows(passed, start)).sum(axis=1)
        passed = before.multiply(_adjacency(graph) @ passed).tocsr()
    return loads * graph.count


def _walk(
    graph: NetworkGraph, sources: np.ndarray, wanted: sparse.csr_array
) -> list[sparse.csr_array]:
    """Returns the numbers of shortest paths to the nodes of each distance."""
    adjacency, columns = _adjacency(graph), np.arange(len(sources))
    ones = np.ones(len(sources)), (sources, columns)
    levels = [sparse.csr_array(ones, shape=wanted.shape)]
    seen, left = levels[0], _ones(wanted)
    while left.nnz:
        # Columns that have reached all their targets go no further.
        going = sparse.diags_array((left.sum(axis=0) > 0).astype(float))
        ahead = adjacency @ (levels[-1] @ going)
        ahead = _drop(ahead, seen)
        checks.require(ahead.nnz > 0, "the network must be connected", left=left.nnz)
        levels.append(ahead)
        seen, left = seen + _ones(ahead), _drop(left, ahead)
    return levels


def _want_all(graph: NetworkGraph, sources: np.ndarray) -> sparse.csr_array:
    """Returns one for every accelerator but the source itself, `[nodes, sources]`."""
    wanted = np.zeros((graph.nodes, len(sources)))
    wanted[: graph.accelerators] = 1
    wanted[sources, np.arange(len(sources))] = 0
    return sparse.csr_array(wanted)


def _want_one(graph: NetworkGraph, targets: np.ndarray) -> sparse.csr_array:
    """Returns one for the target of each source, `[nodes, sources]`."""
    ones = np.ones(len(targets)), (targets, np.arange(len(targets)))
    return sparse.csr_array(ones, shape=(graph.nodes, len(targets)))


def _adjacency(graph: NetworkGraph) -> sparse.csr_array:
    ends = np.concatenate([graph.start, graph.end])
    others = np.concatenate([graph.end, graph.start])
    counts = np.tile(graph.count.astype(float), 2)
    return sparse.csr_array((counts, (ends, others)), shape=(graph.nodes, graph.nodes))


def _rows(matrix: sparse.csr_array, places: np.ndarray) -> sparse.csr_array:
    return sparse.csr_array(matrix[places])


def _ones(matrix: sparse.csr_array) -> sparse.csr_array:
    """Returns one where a matrix has an entry."""
    matrix = matrix.tocsr()
    return sparse.csr_array(
        (np.ones_like(matrix.data), matrix.indices, matrix.indptr), matrix.shape
    )


def _drop(matrix: sparse.csr_array, where: sparse.csr_array) -> sparse.csr_array:
    """Returns a matrix without its entries where another one has any."""
    kept = (matrix - matrix.multiply(_ones(where))).tocsr()
    kept.eliminate_zeros()
    return kept


def _list_pairs(cycles: Cycles) -> np.ndarray:
    """Returns all (member, next member), `[pairs, 2]`."""
    walks = [np.asarray(walk) for walk in cycles]
    pairs = [np.stack([walk, np.roll(walk, -1)], axis=1) for walk in walks]
    return np.concatenate(pairs)


def _split(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]
