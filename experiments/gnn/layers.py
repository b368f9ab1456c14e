"""Layers of graph networks to count, and controls that cost what they should not."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gnn.names import (
    ALONE,
    BY_EDGE,
    DENSE,
    HEADS,
    HOPS,
    KERNELS,
    LAYERS,
    MATRICES,
    ONCE,
    ONE_BY_ONE,
    POOLED,
    STEPS,
    UNMOVED,
)
from hpcjax import graphs, perf

Params = Mapping[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


class Layer(NamedTuple):
    """A layer, and the shapes of its parameters by a width."""

    compute: Callable[..., jax.Array]
    shapes: Callable[[int], Shapes]


def _matrices(*names: str) -> Callable[[int], Shapes]:
    return lambda k: {**dict.fromkeys(names, (k, k)), "bias": (k,)}


def _gat(k: int, heads: int = 1) -> Shapes:
    ends = dict.fromkeys(("receiver", "sender"), (heads, k))
    return {"kernel": (k, heads, k), **ends, "bias": (heads * k,)}


def _monet(k: int, kernels: int = 1) -> Shapes:
    found: Shapes = {"kernel": (k, kernels, k), "bias": (k,)}
    found |= {"places": (2, 2), "places_bias": (2,)}
    return found | dict.fromkeys(("mean", "precision"), (kernels, 2))


def _edge_conv(k: int) -> Shapes:
    found: Shapes = {"kernel_0": (2 * k, k), "bias_0": (k,)}
    return found | {"kernel_1": (k, k), "bias_1": (k,)}


def _by_edge(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    """Attention whose ends are projected for each edge: the control."""
    sent, own = (
        jnp.tensordot(x[ends], params["kernel"][:, 0], 1)
        for ends in (graph.senders, graph.receivers)
    )
    logits = own @ params["receiver"][0] + sent @ params["sender"][0]
    shares = graphs.segment_softmax(
        jax.nn.leaky_relu(logits, 0.2), graph.receivers, graph.vertices, is_sorted=True
    )
    sent = shares[:, None] * sent
    return graphs.segment_sum(sent, graph.receivers, graph.vertices, is_sorted=True)


def _pooled(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    """GraphSAGE whose pool projects what each edge sends, not what vertices have."""
    sent = jax.nn.relu(x[graph.senders] @ params["pool"] + params["pool_bias"])
    ends = graph.receivers, graph.vertices
    largest = graphs.segment_max(sent, *ends, is_sorted=True)
    own = graphs.project(x, params["self"]) + params["bias"]
    return own + largest @ params["neighbors"]


def _layers(graph: graphs.Graph, x: jax.Array, params: Params, *, t: int) -> jax.Array:
    for _ in range(t):
        x = jax.nn.relu(graphs.gcn(graph, x, params))
    return x


def _dense(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    """A sum over neighbours by a whole matrix: the control of the terms of work."""
    shape = graph.vertices, graph.vertices
    matrix = jnp.zeros(shape).at[graph.receivers, graph.senders].add(1.0)
    return matrix @ graphs.project(x, params["kernel"]) + params["bias"]


def _one_by_one(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    """A GCN whose product is a loop over the features: the control of depth."""
    rows = jax.lax.map(lambda pair: pair[0][:, None] * pair[1], (x.T, params["kernel"]))
    return graphs.spread(graph, rows.sum(0), graphs.gcn_weights(graph))


def _stacks(k: int) -> Shapes:
    shapes: Shapes = {"first": (k, 1, k), "root": (k, 1, k)}
    return shapes | {"kernel": (1, k, k), "bias": (k,)}


_SHAPES: Mapping[str, Callable[[int], Shapes]] = {
    **dict.fromkeys(("gcn", "sgc", "ppnp", "appnp", "s2gc"), _matrices("kernel")),
    "sage": _matrices("self"),
    "commnet": _matrices("self", "neighbors"),
    "gin": lambda k: (
        _matrices("kernel_0", "kernel_1")(k)
        | {"bias_0": (k,), "bias_1": (k,), "epsilon": ()}
    ),
    "vanilla_attention": _matrices("kernel"),
    "agnn": lambda k: _matrices("kernel")(k) | {"beta": ()},
    "gat": _gat,
    "monet": _monet,
    "g_gcn": _matrices("self", "neighbors", "receiver", "sender"),
    "edge_conv": _edge_conv,
    "chebnet": lambda k: {"kernel": (3, k, k), "bias": (k,)},
    "arma": _stacks,
}
_CONTROLS: Mapping[str, Layer] = {
    BY_EDGE: Layer(_by_edge, _gat),
    DENSE: Layer(_dense, _matrices("kernel")),
    ONE_BY_ONE: Layer(_one_by_one, _matrices("kernel")),
    UNMOVED: Layer(graphs.gnn_layer("sage"), _matrices("self")),
    POOLED: Layer(
        _pooled,
        lambda k: _matrices("self", "neighbors", "pool")(k) | {"pool_bias": (k,)},
    ),
}
_APPNP = graphs.gnn_layer("appnp", "global")
_REPEATED: Mapping[str, Callable[[int], Layer]] = {
    HOPS: lambda t: Layer(functools.partial(graphs.sgc, powers=t), _SHAPES["sgc"]),
    STEPS: lambda t: Layer(functools.partial(_APPNP, steps=t), _SHAPES["appnp"]),
    # A control: whatever t, the loop is counted as if it ran once.
    ONCE: lambda _: Layer(functools.partial(_APPNP, steps=1), _SHAPES["appnp"]),
    LAYERS: lambda t: Layer(functools.partial(_layers, t=t), _SHAPES["gcn"]),
    KERNELS: lambda t: Layer(graphs.monet, lambda k: _monet(k, t)),
    HEADS: lambda t: Layer(graphs.gat, lambda k: _gat(k, t)),
}


def layer_of(name: str, t: int = 1) -> Layer:
    """Returns a layer or control by the name of its row, of t repetitions if it has."""
    if name in _REPEATED:
        return _REPEATED[name](t)
    if name in _CONTROLS:
        return _CONTROLS[name]
    kind = name.removesuffix(MATRICES)
    form = "global" if kind != name or kind in ALONE else "local"
    return Layer(graphs.gnn_layer(kind, form), _SHAPES[kind])


def count(
    layer: Layer, n: int, m: int, k: int, degree: int, *, backward: bool = False
) -> perf.Cost:
    """Returns work and depth of a layer as wide as its features."""
    function = functools.partial(_apply, layer.compute, n)
    if backward:
        forward = function

        def function(senders: Any, receivers: Any, x: Any, params: Any) -> Any:
            ends = functools.partial(forward, senders, receivers)
            outputs, back = jax.vjp(ends, x, params)
            return outputs, back(outputs)

    return perf.work_depth(function, *_shapes(layer, n, m, k), degree=degree)


def _apply(
    compute: Callable[..., jax.Array],
    vertices: int,
    senders: jax.Array,
    receivers: jax.Array,
    x: jax.Array,
    params: Mapping[str, jax.Array],
) -> jax.Array:
    graph = graphs.Graph(senders=senders, receivers=receivers, vertices=vertices)
    return compute(graph, x, params)


def _shapes(layer: Layer, n: int, m: int, k: int) -> tuple[Any, ...]:
    """Returns shapes of the ends of edges, of features and of parameters."""
    ends = jax.ShapeDtypeStruct((m,), "int32")
    shapes = {"": (n, k)} | layer.shapes(k)
    found = {name: jax.ShapeDtypeStruct(s, "float32") for name, s in shapes.items()}
    return ends, ends, found.pop(""), found


def over_compiled(layer: Layer) -> float:
    """Returns the work of one shape over the operations that XLA counts in it."""
    shapes = 256, 2048, 32
    function = functools.partial(_apply, layer.compute, shapes[0])
    compiled = jax.jit(function).lower(*_shapes(layer, *shapes)).compile()
    return count(layer, *shapes, degree=32).work / perf.flops(compiled)


def distances(seed: int, alpha: float, steps: int) -> tuple[float, float]:
    """Returns how far APPNP is from PPNP over (1 − α)^t, at most over 1 ≤ t ≤ steps.

    And the same of steps that do not return to where they began, the control. Distances
    are relative to that of the start.
    """
    rng = np.random.default_rng(seed)
    senders, receivers = rng.integers(0, 64, (2, 256))
    drawn = graphs.make_graph(senders, receivers, 64)
    graph = graphs.add_self_loops(graphs.symmetrize(drawn))
    x = rng.normal(size=(64, 8)).astype(np.float32)
    params = {"kernel": np.eye(8, dtype=np.float32), "bias": np.zeros(8, np.float32)}
    end = graphs.gnn_layer("ppnp", "global")(graph, x, params, alpha=alpha)

    def worst(states: list[jax.Array]) -> float:
        far = np.array([np.linalg.norm(z - end) for z in states])
        bound = (1 - alpha) ** np.arange(len(states))
        return float((far / far[0] / bound)[1:].max())

    appnp = graphs.gnn_layer("appnp", "global")
    turns = [jnp.asarray(x)]
    for _ in range(steps):
        turns.append(graphs.propagate_powers(graph, turns[-1], 1))
    every = [appnp(graph, x, params, alpha=alpha, steps=t) for t in range(steps + 1)]
    return worst(every), worst(turns)
