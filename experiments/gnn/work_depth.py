"""Work and depth of graph layers, counted from their programs at many shapes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import graphs, perf, runs
from hpcjax.core import config

TERMS = ("mk", "mk²", "nk", "nk²", "m", "n")
LOGS = ("log k", "log d", "1")
HOPS = 2  # of sgc
BY_EDGE, DENSE = "gat, projected by edge", "sum by a dense matrix"
ONE_BY_ONE = "gcn, feature by feature"
CONTROLS = BY_EDGE, DENSE, ONE_BY_ONE
Params = Mapping[str, jax.Array]


class Layer(NamedTuple):
    """A layer, and the shapes of its parameters by a width."""

    compute: Callable[..., jax.Array]
    shapes: Callable[[int], dict[str, tuple[int, ...]]]


def _matrices(*names: str) -> Callable[[int], dict[str, tuple[int, ...]]]:
    return lambda k: {**dict.fromkeys(names, (k, k)), "bias": (k,)}


def _gat(k: int) -> dict[str, tuple[int, ...]]:
    return {"kernel": (k, 1, k), "receiver": (1, k), "sender": (1, k), "bias": (k,)}


def _monet(k: int) -> dict[str, tuple[int, ...]]:
    return {"kernel": (k, 1, k), "places": (2, 2), "places_bias": (2,)} | {
        "mean": (1, 2),
        "precision": (1, 2),
        "bias": (k,),
    }


def _sgc(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    z = graphs.project(x, params["kernel"])
    return graphs.propagate_powers(graph, z, HOPS) + params["bias"]


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


def _dense(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    """A sum over neighbours by a whole matrix: the control of the terms of work."""
    shape = graph.vertices, graph.vertices
    matrix = jnp.zeros(shape).at[graph.receivers, graph.senders].add(1.0)
    return matrix @ graphs.project(x, params["kernel"]) + params["bias"]


def _one_by_one(graph: graphs.Graph, x: jax.Array, params: Params) -> jax.Array:
    """A GCN whose product is a loop over the features: the control of depth."""
    rows = jax.lax.map(lambda pair: pair[0][:, None] * pair[1], (x.T, params["kernel"]))
    return graphs.spread(graph, rows.sum(0), graphs.gcn_weights(graph))


LAYERS: dict[str, Layer] = {
    "gcn": Layer(graphs.gcn, _matrices("kernel")),
    "sage": Layer(graphs.sage, _matrices("self", "neighbors")),
    "sgc": Layer(_sgc, _matrices("kernel")),
    "commnet": Layer(graphs.commnet, _matrices("self", "neighbors")),
    "gin": Layer(
        graphs.gin,
        lambda k: (
            _matrices("kernel_0", "kernel_1")(k)
            | {"bias_0": (k,), "bias_1": (k,), "epsilon": ()}
        ),
    ),
    "vanilla_attention": Layer(graphs.vanilla_attention, _matrices("kernel")),
    "agnn": Layer(graphs.agnn, lambda k: _matrices("kernel")(k) | {"beta": ()}),
    "gat": Layer(graphs.gat, _gat),
    "monet": Layer(graphs.monet, _monet),
    "g_gcn": Layer(graphs.g_gcn, _matrices("self", "neighbors", "receiver", "sender")),
    "edge_conv": Layer(
        graphs.edge_conv,
        lambda k: (
            {"kernel_0": (2 * k, k), "bias_0": (k,)}
            | {"kernel_1": (k, k), "bias_1": (k,)}
        ),
    ),
    BY_EDGE: Layer(_by_edge, _gat),
    DENSE: Layer(_dense, _matrices("kernel")),
    ONE_BY_ONE: Layer(_one_by_one, _matrices("kernel")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Shapes at which programs are counted.

    Attributes:
      points: of vertices, edges, widths and degrees, drawn.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {"points": "8"}
    figures: ClassVar[Mapping[str, str]] = {
        "work": "model term: coefficients of a forward pass's work",
        "work_off": "model: of the work, the farthest that the fit is from it",
        "depth": "model log: coefficients of a forward pass's depth",
        "depth_off": "model: steps that the fit is from it, the farthest",
        "backward": "model: work with gradients over a forward pass's, the mean",
        "compiled": "model: work over XLA's operations of one shape, compiled",
    }

    points: config.Several = 30
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"model": tuple(LAYERS), "term": TERMS, "log": LOGS}


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> Mapping[str, Any]:
    """Counts all layers at all points, and fits the formulas' terms; nothing runs."""
    del ctx
    rng = np.random.default_rng(cfg.seed)
    n = 2 ** rng.integers(6, 13, cfg.points)
    points = np.stack(
        [
            n,
            n * 2 ** rng.integers(1, 6, cfg.points),
            2 ** rng.integers(2, 9, cfg.points),
            2 ** rng.integers(1, 7, cfg.points),
        ]
    )
    rows = [_measure(layer, points) for layer in LAYERS.values()]
    names = tuple(cfg.figures)
    return {
        name: np.array(own)
        for name, own in zip(names, zip(*rows, strict=True), strict=True)
    }


def _measure(layer: Layer, points: np.ndarray) -> tuple[Any, ...]:
    """Returns the figures of a layer."""
    forward = [_count(layer, *map(int, point)) for point in points.T]
    both = [_count(layer, *map(int, point), backward=True) for point in points.T]
    work, depth = (np.array([each[at] for each in forward], float) for at in (0, 1))
    terms, off = fit_work(points, work)
    logs, steps = fit_depth(points, depth)
    more = np.mean([b.work / f.work for b, f in zip(both, forward, strict=True)])
    return terms, off, logs, steps, more, _over_compiled(layer)


def fit_work(points: np.ndarray, work: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coefficients of TERMS, none below 0, and the farthest relative residual.

    Args:
      points: n, m, k and d, [4, points].
      work: counted, [points].
    """
    from scipy.optimize import nnls

    n, m, k, _ = points.astype(float)
    terms = np.stack([m * k, m * k**2, n * k, n * k**2, m, n], axis=1)
    fitted, _ = nnls(terms / work[:, None], np.ones(len(work)))
    return fitted, float(np.abs(terms @ fitted / work - 1).max())


def fit_depth(points: np.ndarray, depth: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns coefficients of LOGS, and by how many steps the farthest is off."""
    logs = np.log2(points[2:].astype(float))
    terms = np.stack([*logs, np.ones(len(depth))], axis=1)
    fitted = np.linalg.lstsq(terms, depth, rcond=None)[0]
    return fitted, float(np.abs(terms @ fitted - depth).max())


def _count(
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


def _over_compiled(layer: Layer) -> float:
    """Returns the work of one shape over the operations that XLA counts in it."""
    shapes = 256, 2048, 32
    function = functools.partial(_apply, layer.compute, shapes[0])
    compiled = jax.jit(function).lower(*_shapes(layer, *shapes)).compile()
    return _count(layer, *shapes, degree=32).work / perf.flops(compiled)
