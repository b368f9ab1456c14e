"""Sampling the neighbourhoods of vertices, on the host, by numbers of a hash.

Nothing is drawn in order: what a vertex draws depends on who asks for what alone, and
neither on the layout of the graph in memory, nor on shards or threads.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.graphs.blocks import Blocks
from hpcjax.graphs.csr import Csr

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def _mix(bits: np.ndarray) -> np.ndarray:
    """Returns splitmix64's output for each state."""
    bits = bits + _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * _FACTORS[0]
    bits = (bits ^ (bits >> np.uint64(27))) * _FACTORS[1]
    return bits ^ (bits >> np.uint64(31))


class Draw(NamedTuple):
    """What a draw is for; equal ones draw equal numbers.

    Attributes:
      seed: of the run.
      epoch: counted from 0.
      position: of the block in its epoch.
      hop: from the targets, at 0.
    """

    seed: int
    epoch: int = 0
    position: int = 0
    hop: int = 0

    def keys(self, vertices: np.ndarray) -> np.ndarray:
        """Returns a number for each vertex, uint64 [vertices]."""
        key = np.zeros(1, np.uint64)
        for part in self:
            key = _mix(key ^ np.uint64(part))
        return _mix(key ^ vertices.astype(np.uint64))


def sample_neighbours(
    csr: Csr, vertices: np.ndarray, fanout: int, draw: Draw, *, replace: bool = False
) -> Csr:
    """Returns lists of at most `fanout` edges that vertices receive, list i of i-th.

    All subsets of a list are equally likely. It takes rounds of Floyd's algorithm over
    all vertices, O(fanout) reads each, and none of lists as long as they are.

    Args:
      csr: of the graph.
      vertices: integers [lists].
      fanout: most entries of a list; −1 for all.
      draw: what it is for.
      replace: whether a list that is cut is drawn with replacement, as Marius does.

    Examples:
      >>> csr = Csr(np.array([0, 100]), np.arange(100), np.arange(100))
      >>> found = sample_neighbours(csr, np.array([0]), 9, Draw(0))
      >>> len(found.neighbours), len(set(found.neighbours.tolist()))
      (9, 9)

    Raises:
      ConfigError: a fanout of 0 or below −1, a vertex that is not there.
    """
    rule = "a fanout must be positive, or -1 for all"
    checks.require(fanout == -1 or fanout > 0, rule, fanout=fanout)
    vertices = _check_vertices(csr, vertices)
    starts = np.asarray(csr.offsets[vertices])
    degrees = np.asarray(csr.offsets[vertices + 1]) - starts
    counts = degrees if fanout < 0 else np.minimum(degrees, fanout)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
    cut = np.flatnonzero(degrees > counts)
    if len(cut):
        keys = draw.keys(vertices[cut])
        chosen = choose(keys, degrees[cut], counts[cut], replace=replace)
        slots = offsets[cut] + np.arange(fanout)[:, None]
        places[slots] = starts[cut] + chosen
    return Csr(offsets, csr.neighbours[places], csr.edge_ids[places])


def _check_vertices(csr: Csr, vertices: np.ndarray) -> np.ndarray:
    """Returns vertices whose successors have room in their dtype, int32 or int64.

    Raises:
      ConfigError: some are no integers or not of the graph.
    """
    vertices = np.asarray(vertices)
    count = len(csr.offsets) - 1
    rule = f"vertices must be integers in [0, {count})"
    checks.require(vertices.dtype.kind in "iu" or not vertices.size, rule)
    outside = vertices[(vertices < 0) | (vertices >= count)]
    checks.require(not outside.size, rule, first=outside[:1].tolist())
    wide = vertices.dtype in (np.int32, np.int64)
    return vertices if wide else vertices.astype(np.int64)


def choose(
    keys: np.ndarray, sizes: np.ndarray, counts: np.ndarray, *, replace: bool = False
) -> np.ndarray:
    """Returns `counts` numbers below each size, [most, sizes], −1 behind them.

    All subsets are equally likely, in an order that means nothing.

    Args:
      keys: uint64 [sizes], see `Draw.keys`.
      sizes: integers [sizes].
      counts: integers [sizes], none above its size unless `replace`.
      replace: whether a number may come more than once.
    """
    slots = np.arange(counts.max(initial=0))[:, None]
    last = sizes - counts + slots
    bits = _mix(keys ^ slots.astype(np.uint64)) >> np.uint64(32)
    below = (sizes if replace else last + 1).astype(np.uint64)
    chosen = ((bits * below) >> np.uint64(32)).astype(np.int64)
    for slot in range(0 if replace else len(slots)):
        # Floyd: what is there already becomes the number that could not be before.
        taken = (chosen[:slot] == chosen[slot]).any(0)
        chosen[slot][taken] = last[slot][taken]
    return np.where(slots < counts, chosen, -1)


Sample = Callable[[Csr, np.ndarray, int, Draw], Csr]
"""Lists neighbours of vertices as `sample_neighbours` does."""


def _build(
    csr: Csr,
    fanouts: Sequence[int],
    targets: np.ndarray,
    draw: Draw,
    sample: Sample,
    reuse: bool,
) -> Blocks:
    targets = _check_vertices(csr, targets)
    once = len(np.unique(targets)) == len(targets)
    checks.require(once, "targets must differ", targets=len(targets))
    position = np.zeros(len(csr.offsets) - 1, np.int32)  # of a vertex, from 1
    position[targets] = 1
    groups, lists = [targets], []
    for hop, fanout in enumerate(fanouts):
        frontier = groups[0] if reuse else np.concatenate(groups)
        lists.insert(0, sample(csr, frontier, fanout, draw._replace(hop=hop)))
        groups.insert(0, _find_new(lists[0].neighbours, position))
    vertices = np.concatenate(groups)
    position[vertices] = np.arange(len(vertices))
    hop_offsets = (0, *np.cumsum([len(group) for group in groups]).tolist())
    receivers = [
        each.receivers() + first
        for each, first in zip(lists, hop_offsets[1:-1], strict=True)
    ]
    edges = np.cumsum([len(each.neighbours) for each in lists])
    return Blocks(
        vertices=vertices,
        senders=position[np.concatenate([each.neighbours for each in lists])],
        receivers=np.concatenate(receivers).astype(np.int32),
        edge_ids=np.concatenate([each.edge_ids for each in lists]),
        hop_offsets=hop_offsets,
        edge_offsets=(0, *edges.tolist()),
        reuse=reuse,
    )


def _find_new(neighbours: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Returns the vertices that have no position, each once, and gives them one."""
    found = neighbours[position[neighbours] == 0]
    numbers = np.arange(1, len(found) + 1, dtype=np.int32)
    position[found] = numbers  # of equal ones the last assignment stays
    return np.sort(found[position[found] == numbers])


def dense_blocks(
    csr: Csr,
    fanouts: Sequence[int],
    targets: np.ndarray,
    draw: Draw,
    *,
    sample: Sample = sample_neighbours,
) -> Blocks:
    """Returns DENSE: each vertex is sampled once, and its list serves all layers.

    Args:
      csr: of the graph.
      fanouts: of each hop, that of the targets first; −1 for all.
      targets: vertices, each once.
      draw: what it is for; its hop is not used.
      sample: lists neighbours.

    References:
      Waleffe et al., MariusGNN, EuroSys 2023, section 4.
    """
    return _build(csr, fanouts, targets, draw, sample, True)


def layerwise_blocks(
    csr: Csr,
    fanouts: Sequence[int],
    targets: np.ndarray,
    draw: Draw,
    *,
    sample: Sample = sample_neighbours,
) -> Blocks:
    """Returns what loaders commonly sample: a vertex met at two hops is drawn twice.

    Args:
      csr: of the graph.
      fanouts: of each hop, that of the targets first; −1 for all.
      targets: vertices, each once.
      draw: what it is for; its hop is not used.
      sample: lists neighbours.
    """
    return _build(csr, fanouts, targets, draw, sample, False)


class Ladder(NamedTuple):
    """Sizes that arrays are padded to, so that few programs are compiled for them.

    Attributes:
      base: integers [sizes], those of the lowest rung. One rung counts for all sizes,
        each of which grows by √2.

    Examples:
      >>> ladder = Ladder(np.array([10, 40]))
      >>> rung = ladder.rung(np.array([19, 30]))
      >>> rung, ladder.sizes(rung).tolist()
      (2, [20, 80])
    """

    base: np.ndarray

    def sizes(self, rung: int) -> np.ndarray:
        """Returns the sizes of a rung."""
        return np.ceil(self.base * 2 ** (rung / 2) - 1e-6).astype(np.int64)

    def rung(self, sizes: np.ndarray) -> int:
        """Returns the lowest rung that has room for sizes."""
        rung = 0
        while (sizes > self.sizes(rung)).any():
            rung += 1
        return rung
