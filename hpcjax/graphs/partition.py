"""A graph's vertices shared out over parts, and what the parts need of each other.

A part has its own vertices, the edges that these receive, and a list of the vertices
of other parts that send to them: its halo. All is padded to one form, so that arrays
of all parts stack: `[parts, ...]`, cut over devices.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jaxtyping import Int, Shaped

from hpcjax.collectives import Boundary, BoundaryScheme, plan_boundary
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.graphs.graph import Graph, make_graph

_ROUNDS, _SLACK = 10, 1.1  # of label propagation, and of its largest part
Scheme = BoundaryScheme | Literal["auto"]


class CommWords(NamedTuple):
    """The numbers that parts exchange in one pass of one layer, of all parts together.

    Attributes:
      operands: what collectives are given, also on devices that do not send in a round.
      sent: what leaves parts, padding with it; by an all-gather, to each of the others.
      live: what is needed: each remote neighbour once.
    """

    operands: int
    sent: int
    live: int


@dataclasses.dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """Parts of a graph; `partition` makes it.

    Rows of a part are first `boundary.arriving` ones of the halo, then `rows` of its
    own, of which the last is nobody's: edges of padding end there. So a layer of
    `graphs` computes a part's vertices with `targets=rows`.

    Attributes:
      owner: the part of each vertex, int32 [vertices].
      boundary: how rows of the halo arrive.
      vertices: of each row, −1 for none, int32 [parts, arriving + rows].
      senders: rows, int32 [parts, edges].
      receivers: rows, int32 [parts, edges]; does not decrease.
      edges: numbers of the edges in the whole graph, −1 for padding, [parts, edges].
      live: rows of the halo of each part that are needed, [parts].
      rows: of each part's own.
    """

    owner: Int[np.ndarray, " vertices"]
    boundary: Boundary
    vertices: Int[np.ndarray, "parts all"]
    senders: Int[np.ndarray, "parts edges"]
    receivers: Int[np.ndarray, "parts edges"]
    edges: Int[np.ndarray, "parts edges"]
    live: Int[np.ndarray, " parts"]
    rows: int

    @property
    def parts(self) -> int:
        """How many there are."""
        return len(self.live)

    @property
    def sizes(self) -> Int[np.ndarray, " parts"]:
        """Vertices of each part."""
        return np.bincount(self.owner, minlength=self.parts)

    @property
    def edge_cut(self) -> float:
        """The share of edges between two parts; 0 without an edge."""
        arriving = self.boundary.arriving
        real = self.edges >= 0
        return float(np.sum(self.senders[real] < arriving) / max(1, real.sum()))

    @property
    def imbalance(self) -> float:
        """The largest part over the mean one."""
        return float(self.sizes.max() / self.sizes.mean())

    @property
    def padding(self) -> float:
        """Rows that are sent over those that are needed; 1 if none is."""
        words = self.comm_words(1)
        return words.sent / words.live if words.live else 1.0

    def comm_words(self, width: int, *, columns: bool = False) -> CommWords:
        """Returns what one exchange of rows of so many numbers sends.

        In float32 the operands of a device's collectives have 4 / parts bytes of these.

        Args:
          width: k, numbers of a row.
          columns: these are shared out, scheme "features", and a product with a matrix
            that has so many is reduce-scattered.
        """
        if columns:
            rows, filled = self.rows_of_columns, -(-width // self.parts) * self.parts
            others = self.parts - 1
            live = others * len(self.owner) * width
            return CommWords(self.parts * rows * filled, others * rows * filled, live)
        operands = sent = 0
        for rows, pairs in self.boundary.rounds:
            operands += rows.size
            sent += {
                "halo": rows.shape[1] * len(pairs),
                "all_to_all": rows.size // self.parts * (self.parts - 1),
                "allgather": rows.size * (self.parts - 1),
            }[self.boundary.scheme]
        live = int(self.live.sum())
        return CommWords(operands * width, sent * width, live * width)

    def graph(self, part: Any) -> Graph:
        """Returns the edges of a part, all rows being its vertices.

        Args:
          part: its number, or on a device `lax.axis_index`.
        """
        at = np.asarray if isinstance(part, int) else jnp.asarray
        return Graph(
            senders=at(self.senders)[part],
            receivers=at(self.receivers)[part],
            vertices=self.vertices.shape[1],
        )

    @property
    def rows_of_columns(self) -> int:
        """Rows where each device has columns of all: as many a part as the largest."""
        return self.parts * (self.rows - 1)

    def graph_of_columns(self, edge_features: Any = None) -> Graph:
        """Returns all edges, vertices being rows of all parts, one after the other.

        Those are rows of `rows_to_columns` of each part's own but the last, nobody's.

        Args:
          edge_features: of the edges of the whole graph, as for `Graph`.
        """
        first, most = self.boundary.arriving, self.rows - 1
        own = self.vertices[:, first : first + most].ravel()
        place = np.zeros(len(self.owner), np.int32)
        place[own[own >= 0]] = np.flatnonzero(own >= 0)
        real = self.edges >= 0
        part, _ = np.nonzero(real)
        sent, received = (
            place[self.vertices[part, rows[real]]]
            for rows in (self.senders, self.receivers)
        )
        if edge_features is not None:
            edge_features = np.asarray(edge_features)[self.edges[real]]
        rows = self.rows_of_columns
        return make_graph(sent, received, rows, edge_features=edge_features)

    def take(
        self, values: Shaped[np.ndarray, "vertices ..."], *, halo: bool = False
    ) -> Shaped[np.ndarray, "parts rows ..."]:
        """Returns what vertices have by parts and rows, zero where there is no vertex.

        Args:
          values: of all vertices.
          halo: rows of the halo as well, which come first.

        Raises:
          ConfigError: values of another number of vertices.
        """
        rule = f"values must be of the {len(self.owner)} vertices"
        checks.require(len(values) == len(self.owner), rule, values=len(values))
        places = self.vertices if halo else self.vertices[:, self.boundary.arriving :]
        taken = np.array(values)[places]
        taken[places < 0] = 0
        return taken

    def join(
        self, values: Shaped[np.ndarray, "parts rows ..."]
    ) -> Shaped[np.ndarray, "vertices ..."]:
        """Returns what parts have of their own rows, by vertices.

        Raises:
          ConfigError: values of other parts or rows.
        """
        own, values = self.vertices[:, self.boundary.arriving :], np.asarray(values)
        rule = f"values must be of {list(own.shape)} parts and rows"
        checks.require(values.shape[:2] == own.shape, rule, values=values.shape)
        joined = np.zeros((len(self.owner), *values.shape[2:]), values.dtype)
        joined[own[own >= 0]] = values[own >= 0]
        return joined


def partition(
    graph: Graph,
    parts: int,
    method: str | Int[np.ndarray, " vertices"] = "hash",
    scheme: Scheme = "halo",
    seed: int = 0,
) -> PartitionedGraph:
    """Returns a graph of numpy arrays with its vertices shared out.

    Args:
      graph: with the self-loops that layers need.
      parts: how many, p.
      method: "hash" shares vertices out evenly by a random order; "contiguous" by their
        numbers; "rcm" by reverse Cuthill–McKee's order, so that neighbours are near;
        "label_propagation" moves vertices from there to the part of most neighbours,
        while no part has over 1.1 of the mean. Or the part of each vertex.
      scheme: how rows are exchanged, see `collectives.plan_boundary`; "auto" is "halo"
        or "allgather", what has fewer words; `boundary.scheme` says which.
      seed: of random orders.

    Raises:
      ConfigError: parts below 1 or above the vertices, a part without a vertex, an
        unknown method or scheme.

    Examples:
      >>> from hpcjax.graphs import make_graph, symmetrize
      >>> ring = symmetrize(make_graph([0, 1, 2, 3], [1, 2, 3, 0], vertices=4))
      >>> found = partition(ring, 2, "contiguous")
      >>> found.edge_cut, found.live.tolist(), found.comm_words(3)
      (0.5, [2, 2], CommWords(operands=12, sent=12, live=12))
    """
    checks.require_count(1, parts=parts)
    rule = f"parts must be at most the {graph.vertices} vertices"
    checks.require(parts <= graph.vertices, rule, parts=parts)
    checks.require_choice("scheme", scheme, ("halo", "all_to_all", "allgather", "auto"))
    if isinstance(method, str):
        checks.require_choice("method", method, tuple(_METHODS))
        owner = _METHODS[method](graph, parts, np.random.default_rng(seed))
    else:
        owner = np.asarray(method)
    counts = _count(owner, graph.vertices, parts)
    if scheme != "auto":
        return _cut(graph, owner, counts, scheme)
    found = [_cut(graph, owner, counts, each) for each in ("halo", "allgather")]
    return min(found, key=lambda each: each.comm_words(1).sent)


def _count(owner: np.ndarray, vertices: int, parts: int) -> np.ndarray:
    """Returns the size of each part, of what is an assignment to all of them."""
    if owner.shape != (vertices,) or owner.dtype.kind not in "iu":
        got = f"{owner.dtype} {list(owner.shape)}"
        raise ConfigError(f"parts must be integers, one of {vertices} each: got {got}")
    good = np.array_equal(np.unique(owner), np.arange(parts))
    rule = f"each of the {parts} parts, and no other, must have a vertex"
    checks.require(good, rule, parts=np.unique(owner).tolist())
    return np.bincount(owner, minlength=parts)


def _cut(
    graph: Graph, owner: np.ndarray, counts: np.ndarray, scheme: BoundaryScheme
) -> PartitionedGraph:
    """Returns the parts of an assignment."""
    parts, rows = len(counts), int(counts.max()) + 1
    order = np.argsort(owner, kind="stable")
    place = np.empty(graph.vertices, np.int32)  # of a vertex among its part's
    place[order] = np.arange(graph.vertices) - np.repeat(
        np.cumsum(counts) - counts, counts
    )
    source, target = owner[graph.senders], owner[graph.receivers]
    remote = source != target
    wanted = np.unique(np.stack([target, source, graph.senders])[:, remote], axis=1)
    needs = {
        (int(s), int(t)): place[wanted[2, (wanted[0] == t) & (wanted[1] == s)]]
        for t, s in np.unique(wanted[:2], axis=1).T
    }
    boundary, arrivals = plan_boundary(needs, counts, scheme)
    first = boundary.arriving
    vertices = np.full((parts, first + rows), -1, np.int32)
    vertices[owner, first + place] = np.arange(graph.vertices)
    lists = [order[owner[order] == part] for part in range(parts)]
    row_of = np.full((parts, graph.vertices), -1, np.int32)
    row_of[owner, np.arange(graph.vertices)] = first + place
    for (s, t), at in arrivals.items():
        vertices[t, at] = lists[s][needs[s, t]]
        row_of[t, vertices[t, at]] = at
    width = max(1, int(np.bincount(target, minlength=parts).max(initial=0)))
    senders = np.full((parts, width), first + rows - 1, np.int32)
    receivers, edges = senders.copy(), np.full_like(senders, -1)
    for part in range(parts):
        own = np.flatnonzero(target == part)
        own = own[np.argsort(place[graph.receivers[own]], kind="stable")]
        edges[part, : len(own)] = own
        senders[part, : len(own)] = row_of[part, graph.senders[own]]
        receivers[part, : len(own)] = row_of[part, graph.receivers[own]]
    live = np.bincount(wanted[0], minlength=parts)
    return PartitionedGraph(
        owner, boundary, vertices, senders, receivers, edges, live, rows
    )


def _evenly(vertices: int, parts: int) -> np.ndarray:
    return np.arange(vertices) * parts // vertices


def _hash(graph: Graph, parts: int, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(graph.vertices) % parts


def _contiguous(graph: Graph, parts: int, rng: np.random.Generator) -> np.ndarray:
    return _evenly(graph.vertices, parts)


def _both_ways(graph: Graph) -> Any:
    """Returns other vertices that send to each or receive of it, a scipy matrix."""
    real = graph.senders != graph.receivers
    ends = graph.senders[real], graph.receivers[real]
    shape = graph.vertices, graph.vertices
    ones = np.ones(len(ends[0]), np.int32)
    a = scipy.sparse.csr_matrix((ones, ends), shape=shape)
    return (a + a.T).tocsr()


def _rcm(graph: Graph, parts: int, rng: np.random.Generator) -> np.ndarray:
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    order = reverse_cuthill_mckee(_both_ways(graph), symmetric_mode=True)
    owner = np.empty(graph.vertices, np.int64)
    owner[order] = _evenly(graph.vertices, parts)
    return owner


def _propagate_labels(graph: Graph, parts: int, rng: np.random.Generator) -> np.ndarray:
    owner, a = _rcm(graph, parts, rng), _both_ways(graph)
    sizes = np.bincount(owner, minlength=parts)
    most = int(_SLACK * graph.vertices / parts) + 1
    for _ in range(_ROUNDS):
        for vertex in rng.permutation(graph.vertices):
            near = a.indices[a.indptr[vertex] : a.indptr[vertex + 1]]
            votes, old = np.bincount(owner[near], minlength=parts), owner[vertex]
            new = votes.argmax()
            if votes[new] > votes[old] and sizes[new] < most and sizes[old] > 1:
                owner[vertex] = new
                sizes[old] -= 1
                sizes[new] += 1
    return owner


_METHODS: dict[str, Callable[[Graph, int, np.random.Generator], np.ndarray]] = {
    "hash": _hash,
    "contiguous": _contiguous,
    "rcm": _rcm,
    "label_propagation": _propagate_labels,
}
