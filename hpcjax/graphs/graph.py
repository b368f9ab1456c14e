"""The graph as arrays of edges, made on the host; messages go from sender to receiver.

Edges are sorted by receiver, of equals in the order given, so that sums over receivers
are sums over sorted segments. Multi-edges and self-loops are kept.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.core.structs import pytree, static
from hpcjax.graphs.features import Features, SparseRows

SelfLoops = Literal["one", "plus_i"]


@pytree
class Graph:
    """A directed graph; `make_graph` makes it of any edges.

    Attributes:
      senders: int32 [edges], where a message comes from.
      receivers: int32 [edges], where it goes; does not decrease.
      features: of vertices, [vertices, features] or `SparseRows`; None without.
      edge_type: int32 [edges]; None without.
      edge_features: [edges, features]; None without.
      vertices: how many there are.

    Raises:
      ConfigError: ends of edges that are no such graph, as far as they are numbers here
        and not traced; those of a device are copied to look at them.
    """

    senders: Any
    receivers: Any
    features: Features = None
    edge_type: Any = None
    edge_features: Any = None
    vertices: int = static()

    def __post_init__(self) -> None:
        senders, receivers = look_at(self.senders), look_at(self.receivers)
        if senders is None or receivers is None:
            return
        for name, array in (("senders", senders), ("receivers", receivers)):
            _check_range(name, array, self.vertices)
        if len(senders) != len(receivers):
            raise ConfigError(
                "senders and receivers must be equally many: got "
                f"{len(senders)} and {len(receivers)}"
            )
        if (receivers[1:] < receivers[:-1]).any():
            raise ConfigError("receivers must not decrease: make_graph sorts edges")


def look_at(array: Any) -> np.ndarray | None:
    """Returns integers; None of what is traced, a shape, or of a tree of that form."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.integer):
        traced = isinstance(array, jax.core.Tracer)
        here = not traced and not array.is_deleted() and array.is_fully_addressable
        array = np.asarray(array) if here else None
    known = isinstance(array, np.ndarray) and array.ndim == 1
    return array if known and array.dtype.kind in "iu" else None


def make_graph(
    senders: Any,
    receivers: Any,
    vertices: int,
    *,
    features: Features | None = None,
    edge_type: Any = None,
    edge_features: Any = None,
) -> Graph:
    """Returns a graph of numpy arrays, edges sorted by receiver.

    Args:
      senders: integers [edges].
      receivers: integers [edges].
      vertices: how many there are.
      features: of vertices, as for `Graph`.
      edge_type: integers [edges].
      edge_features: [edges, features].

    Raises:
      ConfigError: an index that is no vertex, arrays of other lengths or no integers,
        or features that are not finite.

    Examples:
      >>> graph = make_graph([0, 2, 1], [1, 0, 1], vertices=3)
      >>> graph.receivers.tolist(), graph.senders.tolist()
      ([0, 1, 1], [2, 0, 1])
    """
    vertices = _as_count(vertices)
    ends = {
        "senders": _as_integers("senders", senders, vertices),
        "receivers": _as_integers("receivers", receivers, vertices),
    }
    edges = len(ends["senders"])
    if edge_type is not None:
        ends["edge_type"] = _as_integers("edge_type", edge_type, 2**31 - 1)
    if edge_features is not None:
        ends["edge_features"] = _as_finite("edge_features", edge_features)
    for name, array in ends.items():
        if len(array) != edges:
            raise ConfigError(
                f"{name} must have an entry for each of the {edges} edges: got "
                f"{len(array)}"
            )
    if features is not None and not isinstance(features, SparseRows):
        features = _as_finite("features", features)
    if features is not None and features.shape[0] != vertices:
        raise ConfigError(
            f"features must have a row for each of the {vertices} vertices: got "
            f"{features.shape[0]}"
        )
    order = np.argsort(ends["receivers"], kind="stable")
    sorted_ends = {name: array[order] for name, array in ends.items()}
    return Graph(vertices=vertices, features=features, **sorted_ends)


def _as_count(vertices: Any) -> int:
    if isinstance(vertices, bool | np.bool_) or not hasattr(vertices, "__index__"):
        raise ConfigError(f"vertices must be an integer: got {vertices!r}")
    if vertices < 0:
        raise ConfigError(f"vertices must be at least 0: got {vertices}")
    return int(vertices)


def _as_integers(name: str, given: Any, above: int) -> np.ndarray:
    array = np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} must be a list of integers: got {array.dtype} {list(array.shape)}"
        )
    _check_range(name, array, above)
    return array.astype(np.int32)


def _check_range(name: str, array: np.ndarray, above: int) -> None:
    bad = array[(array < 0) | (array >= above)]
    if not bad.size:
        return
    if name == "edge_type":
        raise ConfigError(f"edge_type must be in [0, {above}): got {bad[0]}")
    raise ConfigError(f"{name} contains {bad[0]}, but the graph has {above} vertices")


def _as_finite(name: str, given: Any) -> np.ndarray:
    array = np.asarray(given)
    if array.ndim != 2 or array.dtype.kind not in "iuf":
        raise ConfigError(
            f"{name} must be numbers with two axes: got {array.dtype} "
            f"{list(array.shape)}"
        )
    if not np.isfinite(array).all():
        raise ConfigError(f"{name} must be finite: there is NaN or inf")
    return array


def _with_edges(graph: Graph, **ends: Any) -> Graph:
    """Returns a graph with the vertices of another and other edges."""
    return make_graph(vertices=graph.vertices, features=graph.features, **ends)


def _edge_arrays(graph: Graph) -> dict[str, np.ndarray]:
    """Returns what a graph has for each edge."""
    names = ("senders", "receivers", "edge_type", "edge_features")
    found = {name: getattr(graph, name) for name in names}
    return {name: array for name, array in found.items() if array is not None}


def add_self_loops(graph: Graph, how: SelfLoops = "one") -> Graph:
    """Returns the graph with an edge from each vertex to itself.

    A loop has the mean of the features of the edges that its vertex receives, loops
    left out, zero if it receives none; and a type of its own, one above the largest.

    Args:
      graph: any.
      how: "one" removes the loops that are there first, as PyTorch Geometric does;
        "plus_i" keeps them, A + I as papers write it.

    Examples:
      >>> graph = make_graph([0, 0], [0, 1], vertices=2)
      >>> [add_self_loops(graph, how).senders.tolist() for how in ("one", "plus_i")]
      [[0, 0, 1], [0, 0, 0, 1]]
    """
    if how not in ("one", "plus_i"):
        raise ConfigError(f"how must be 'one' or 'plus_i': got {how!r}")
    ends = _edge_arrays(graph)
    real = graph.senders != graph.receivers
    kept = real if how == "one" else np.ones_like(real)
    every = np.arange(graph.vertices, dtype=np.int32)
    added = {"senders": every, "receivers": every}
    if graph.edge_type is not None:
        own = np.max(graph.edge_type, initial=-1) + 1
        added["edge_type"] = np.full(graph.vertices, own, np.int32)
    if graph.edge_features is not None:
        added["edge_features"] = _mean_received(graph, real)
    return _with_edges(
        graph,
        **{name: np.concatenate([ends[name][kept], added[name]]) for name in ends},
    )


def _mean_received(graph: Graph, real: np.ndarray) -> np.ndarray:
    """Returns each vertex's mean of the features of some edges."""
    total = np.zeros((graph.vertices, graph.edge_features.shape[1]))
    np.add.at(total, graph.receivers[real], graph.edge_features[real].astype(float))
    count = np.bincount(graph.receivers[real], minlength=graph.vertices)
    mean = total / np.maximum(count, 1)[:, None]
    return mean.astype(np.result_type(graph.edge_features, np.float16))


def symmetrize(graph: Graph) -> Graph:
    """Returns the graph with each edge in both directions, once.

    Edges between the same vertices become one, in each direction. A graph whose edges
    have types or features has no such reading.

    Raises:
      ConfigError: edges have types or features.

    Examples:
      >>> graph = symmetrize(make_graph([0, 1, 2], [1, 0, 2], vertices=3))
      >>> list(zip(graph.senders.tolist(), graph.receivers.tolist()))
      [(1, 0), (0, 1), (2, 2)]
    """
    if graph.edge_type is not None or graph.edge_features is not None:
        raise ConfigError(
            "symmetrize joins edges, which must have no edge_type and no edge_features"
        )
    both = np.stack([graph.senders, graph.receivers])
    pairs = np.unique(np.concatenate([both, both[::-1]], axis=1), axis=1)
    return _with_edges(graph, senders=pairs[0], receivers=pairs[1])


def pad_graph(graph: Graph, vertices: int, edges: int) -> Graph:
    """Returns the graph with so many vertices and edges.

    What is added has zeros for features. Edges are added at the last vertex, which is
    a new one, so that no vertex of the graph gets a message from them.

    Args:
      graph: any.
      vertices: of the result; if edges are added, more than the graph has.
      edges: of the result.

    Raises:
      ConfigError: fewer than there are, or edges without a vertex for them.
    """
    more = edges - len(graph.senders)
    room = vertices - graph.vertices
    if min(more, room) < 0 or (more and not room):
        raise ConfigError(
            f"a graph of {graph.vertices} vertices and {len(graph.senders)} edges "
            f"cannot be padded to vertices={vertices}, edges={edges}: neither may be "
            "fewer, and more edges need a vertex more"
        )
    ends = _edge_arrays(graph)
    filled = {
        name: np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)])
        for name, array in ends.items()
    }
    for name in ("senders", "receivers"):
        filled[name][len(ends[name]) :] = vertices - 1
    features = _pad_rows(graph.features, room)
    return make_graph(vertices=vertices, features=features, **filled)


def _pad_rows(features: Features | None, more: int) -> Features | None:
    if features is None:
        return None
    if isinstance(features, SparseRows):
        offsets = np.pad(features.offsets, (0, more), mode="edge")
        return dataclasses.replace(features, offsets=offsets)
    return np.pad(features, ((0, more), (0, 0)))


def join_graphs(graphs: Iterable[Graph]) -> tuple[Graph, np.ndarray]:
    """Returns the disjoint union of graphs, and the number of each vertex's graph.

    Raises:
      ConfigError: no graph, or some have what others have not.

    Examples:
      >>> one, two = make_graph([0], [1], 2), make_graph([0], [0], 1)
      >>> graph, number = join_graphs([one, two])
      >>> graph.receivers.tolist(), number.tolist()
      ([1, 2], [0, 0, 1])
    """
    graphs = list(graphs)
    forms = {(*_edge_arrays(graph), type(graph.features)) for graph in graphs}
    if len(forms) != 1:
        raise ConfigError(
            "graphs to be joined must be one or more, alike in having features, "
            f"edge_type and edge_features: got {len(graphs)} graphs of {len(forms)} "
            "forms"
        )
    sizes = [graph.vertices for graph in graphs]
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
    parts = [_edge_arrays(graph) for graph in graphs]
    _check_widths([part.get("edge_features") for part in parts])
    ends = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    shift = np.repeat(starts, [len(graph.senders) for graph in graphs])
    for name in ("senders", "receivers"):
        ends[name] = ends[name] + shift
    features = _join_rows([graph.features for graph in graphs])
    joined = make_graph(vertices=sum(sizes), features=features, **ends)
    return joined, np.repeat(np.arange(len(graphs), dtype=np.int32), sizes)


def _check_widths(features: Sequence[Any]) -> None:
    widths = [each.shape[1] for each in features if each is not None]
    if len(set(widths)) > 1:
        raise ConfigError(
            f"graphs to be joined must have equally many features: got {widths}"
        )


def _join_rows(features: Sequence[Any]) -> Features | None:
    first = features[0]
    if first is None:
        return None
    _check_widths(features)
    if not isinstance(first, SparseRows):
        return np.concatenate(features)
    counts = np.concatenate([np.diff(each.offsets) for each in features])
    return SparseRows(
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        columns=np.concatenate([each.columns for each in features]),
        values=np.concatenate([each.values for each in features]),
        width=first.width,
    )
