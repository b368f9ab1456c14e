"""Graph convolutions: pure functions of a graph, features and parameters.

Each takes the features of all vertices, dense or sparse rows, and returns outputs of
all, float32 at least; what comes behind, such as an activation, is the caller's. Edges
u → v count as often as they are there. With `targets` only so many vertices are
computed, the last ones, which must be all that receive: a layer of `Blocks`. Of
`Columns`, inside `shard_map`, a device computes its columns of the outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core.errors import ConfigError
from hpcjax.graphs.columns import Columns, like, own_columns, sum_columns
from hpcjax.graphs.features import Features, SparseRows, drop_entries, project
from hpcjax.graphs.graph import Graph
from hpcjax.graphs.segments import (
    add_axes,
    segment_max,
    segment_mean,
    segment_softmax,
    segment_sum,
)

Params = Mapping[str, jax.Array]
_SLOPE = 0.2  # of GAT's leaky rectifier
_REDUCE: dict[str, Callable[..., jax.Array]] = {
    "sum": segment_sum,
    "mean": segment_mean,
    "max": segment_max,
}


def spread(
    graph: Graph,
    x: Float[Array, "vertices ..."],
    weights: Float[Array, "edges ..."] | None = None,
    reduce: Literal["sum", "mean", "max"] = "sum",
    targets: int | None = None,
) -> Float[Array, "targets ..."]:
    """Returns what each vertex receives: y_v = reduce_{e: u → v} weights_e x_u.

    Args:
      graph: has the edges.
      x: of vertices.
      weights: of edges, in the order of `graph.senders`, with as many axes as x or
        fewer; None for 1.
      reduce: "sum", "mean" or "max"; a vertex without edges receives 0.
      targets: how many vertices, the last ones, receive; None for all.

    Raises:
      ConfigError: an unknown `reduce`, or x of another number of vertices.
    """
    if reduce not in _REDUCE:
        raise ConfigError(f"reduce must be 'sum', 'mean' or 'max': got {reduce!r}")
    if len(x) != graph.vertices:
        raise ConfigError(
            f"x must have a row for each of the {graph.vertices} vertices: got {len(x)}"
        )
    taken = x[graph.senders]
    if weights is not None:
        taken = taken * add_axes(weights, taken)
    lists, count = _lists(graph, targets)
    return _REDUCE[reduce](taken, lists, count, is_sorted=True)


def _lists(graph: Graph, targets: int | None) -> tuple[Any, int]:
    """Returns each edge's receiver, counted from the first target, and the targets."""
    count = graph.vertices if targets is None else targets
    return graph.receivers - (graph.vertices - count), count


def gcn_weights(
    graph: Graph,
    weights: Float[Array, " edges"] | None = None,
    degrees: Float[Array, " vertices"] | None = None,
) -> Float[Array, " edges"]:
    """Returns each edge's w_uv / √(d_u d_v), of D^(−1/2) A D^(−1/2).

    d is what a vertex receives, with the self-loops that are there; 0^(−1/2) is 0.

    Args:
      graph: with self-loops, see `add_self_loops`; symmetric, or d_u is no degree.
      weights: w, floats, not negative, in the order of `graph.senders`; None for 1.
      degrees: d, where `graph` is a part of another; None to count.
    """
    if weights is None:
        weights = jnp.ones(len(graph.senders))
    degree = degrees
    if degree is None:
        degree = segment_sum(weights, graph.receivers, graph.vertices, is_sorted=True)
    root = jnp.where(degree > 0, jax.lax.rsqrt(jnp.where(degree > 0, degree, 1)), 0)
    return root[graph.senders] * weights * root[graph.receivers]


def gcn(
    graph: Graph,
    x: Features,
    params: Params,
    *,
    weights: Float[Array, " edges"] | None = None,
    degrees: Float[Array, " vertices"] | None = None,
    targets: int | None = None,
) -> Float[Array, "targets outputs"]:
    """Returns D^(−1/2) A D^(−1/2) X W + b.

    Args:
      graph: with self-loops.
      x: X `[vertices, inputs]`.
      params: "kernel" W `[inputs, outputs]`, "bias" b `[outputs]`.
      weights: of edges, floats, not negative, in the order of `graph.senders`; None for
        1. `make_graph` sorts edges, and `add_self_loops` gives loops no weight.
      degrees: as for `gcn_weights`.
      targets: how many vertices are computed, the last ones; None for all.

    References:
      Kipf and Welling, ICLR 2017, equation 2.
    """
    own = gcn_weights(graph, weights, degrees)
    y = spread(graph, _project(x, params), own, targets=targets)
    return y + own_columns(params["bias"], x)


def propagate_powers(
    graph: Graph,
    x: Float[Array, "vertices ..."],
    powers: int,
    weights: Float[Array, " edges"] | None = None,
) -> Float[Array, "vertices ..."]:
    """Returns S^K X with S = D^(−1/2) A D^(−1/2).

    SGC is this of X W, which is S^K X times W: it propagates classes, not features.

    Args:
      graph: with self-loops.
      x: X.
      powers: K.
      weights: as for `gcn`.

    Raises:
      ConfigError: powers below 0.

    References:
      Wu et al., Simplifying Graph Convolutional Networks, ICML 2019.
    """
    if powers < 0:
        raise ConfigError(f"powers must be at least 0: got {powers}")
    own = gcn_weights(graph, weights)
    for _ in range(powers):
        x = spread(graph, x, own)
    return x


def sgc(
    graph: Graph, x: Features, params: Params, *, powers: int = 2
) -> Float[Array, "vertices outputs"]:
    """Returns S^K X W + b, see `propagate_powers`.

    Args:
      graph: with self-loops.
      x: X `[vertices, inputs]`.
      params: "kernel" W `[inputs, outputs]`, "bias" b.
      powers: K.
    """
    y = propagate_powers(graph, _project(x, params), powers)
    return y + own_columns(params["bias"], x)


def sage(
    graph: Graph,
    x: Features,
    params: Params,
    aggregate: Literal["mean", "gcn", "pool"] = "mean",
    *,
    targets: int | None = None,
) -> Float[Array, "targets outputs"]:
    """Returns GraphSAGE's outputs, of vertices v with neighbours N(v) that send to v.

    "mean": h_v W₁ + mean_{u ∈ N(v)} h_u W₂ + b, the mean of none being 0. "gcn":
    (h_v + Σ_u h_u) / (|N(v)| + 1) W₁ + b. "pool": h_v W₁ + max_u relu(h_u W_p + b_p) W₂
    + b.

    Args:
      graph: without self-loops, which would count as neighbours.
      x: h `[vertices, inputs]`.
      params: "self" W₁ `[inputs, outputs]`, "bias" b; unless "gcn" also "neighbors"
        W₂, of inputs or the pool's width; for "pool" "pool" W_p and "pool_bias" b_p.
      aggregate: see above.
      targets: how many vertices are computed, the last ones; None for all.

    References:
      Hamilton et al., NeurIPS 2017, section 3.3.
    """
    bias = own_columns(params["bias"], x)
    if aggregate == "gcn":
        z = _project(x, params, "self")
        ones = jnp.ones(graph.vertices, z.dtype)
        count = spread(graph, ones, targets=targets) + 1
        total = _last(z, targets) + spread(graph, z, targets=targets)
        return total / count[:, None] + bias
    own = _project_last(x, params, "self", targets)
    if aggregate == "mean":
        z = _project(x, params, "neighbors")
        return own + spread(graph, z, None, "mean", targets) + bias
    if aggregate == "pool":
        shift = own_columns(params["pool_bias"], x)
        pooled = jax.nn.relu(_project(x, params, "pool") + shift)
        largest = spread(graph, pooled, None, "max", targets)
        largest = like(x, largest, len(params["pool_bias"]))
        return own + _project(largest, params, "neighbors") + bias
    raise ConfigError(f"aggregate must be 'mean', 'gcn' or 'pool': got {aggregate!r}")


def gat(
    graph: Graph,
    x: Features,
    params: Params,
    *,
    combine: Literal["concat", "mean"] = "concat",
    dropout: float = 0.0,
    key: jax.Array | None = None,
    weights: Float[Array, " edges"] | None = None,
    targets: int | None = None,
) -> Float[Array, "targets outputs"]:
    """Returns the outputs of graph attention.

    With z = h W, the logit of an edge e = u → v is l_e = leaky_relu(a_r·z_v + a_s·z_u
    [+ a_e·(f_e W_e)]) with slope 0.2, its weight α_e the softmax over the edges that v
    receives, and v's output of a head Σ_e α_e z_u.

    Args:
      graph: with self-loops; its `edge_features` f are used if `params` has "edge".
      x: h `[vertices, inputs]`.
      params: "kernel" W `[inputs, heads, width]`, "receiver" a_r `[heads, width]`,
        "sender" a_s, "bias" of all outputs; of edges "edge" W_e `[features, heads,
        width]` and "edge_attention" a_e.
      combine: heads, "concat" to heads * width outputs or "mean" to width.
      dropout: share of the weights α that are zero in this pass.
      key: of the draw; needed if there is dropout.
      weights: how often each edge counts in the softmax, not negative; None for once.
      targets: how many vertices are computed, the last ones; None for all.

    Raises:
      ConfigError: another `combine`, dropout without a key, or parameters for edges of
        a graph that has no features of them.

    References:
      Veličković et al., ICLR 2018, equations 3 to 6.
    """
    if combine not in ("concat", "mean"):
        raise ConfigError(f"combine must be 'concat' or 'mean': got {combine!r}")
    if dropout and key is None:
        raise ConfigError(f"dropout={dropout} of attention needs a key")
    z = _project(x, params)
    logits = _score(z, params["receiver"], x)[graph.receivers]
    logits += _score(z, params["sender"], x)[graph.senders]
    if "edge" in params:
        if graph.edge_features is None:
            raise ConfigError("gat has parameters for edges: the graph has no features")
        of_edges = jnp.tensordot(graph.edge_features, params["edge"], 1)
        logits += _score(of_edges, params["edge_attention"])
    logits = jax.nn.leaky_relu(logits, _SLOPE)
    lists, count = _lists(graph, targets)
    mask = None
    if weights is not None:
        mask = weights > 0
        logits += jnp.log(jnp.where(mask, weights, 1))[:, None]
    shares = segment_softmax(logits, lists, count, mask=mask, is_sorted=True)
    if key is not None:
        shares = drop_entries(shares, dropout, key)
    y = spread(graph, z, shares, targets=targets)
    if combine == "mean":
        return y.mean(1) + own_columns(params["bias"], x)
    return y.reshape(len(y), -1) + own_columns(params["bias"], x, y.shape[1])


def gin(
    graph: Graph,
    x: Features,
    params: Params,
    *,
    weights: Float[Array, " edges"] | None = None,
    targets: int | None = None,
) -> Float[Array, "targets outputs"]:
    """Returns an MLP of the sum over a vertex and its neighbours, GIN; of edges GINE.

    relu(n(s_v W₀ + b₀)) W₁ + b₁, where s_v = (1 + ε) h_v + Σ_{u ∈ N(v)} m_u, m_u = h_u,
    with features f of edges relu(h_u + f_e W_e), and n a layer norm.

    Args:
      graph: without self-loops; its `edge_features` are used if `params` has "edge".
      x: h `[vertices, inputs]`, which must be dense if features of edges are used.
      params: "kernel_0" W₀, "bias_0", "kernel_1" W₁, "bias_1", "epsilon" ε, a number;
        if n is not the identity "scale" and "shift"; of edges "edge" W_e.
      weights: of edges in the sum; None for 1.
      targets: how many vertices are computed, the last ones; None for all.

    Raises:
      ConfigError: features of edges with sparse ones, `Columns`, weights or targets.

    References:
      Xu et al., ICLR 2019, equation 4.1; Hu et al., ICLR 2020, for GINE.
    """
    own = 1 + params["epsilon"]
    if "edge" in params:
        if graph.edge_features is None:
            raise ConfigError("gin has parameters for edges: the graph has no features")
        if isinstance(x, SparseRows | Columns):
            raise ConfigError(
                "gin adds features of edges to vertices' dense ones: got "
                f"{type(x).__name__}"
            )
        if weights is not None or targets is not None:
            raise ConfigError("gin of a part of a graph sees no features of edges")
        h = x.astype(params["edge"].dtype)
        of_edges = jnp.tensordot(graph.edge_features, params["edge"], 1)
        sent = jax.nn.relu(h[graph.senders] + of_edges)
        received = segment_sum(sent, graph.receivers, graph.vertices, is_sorted=True)
        hidden = _project(own * h + received, params, "kernel_0")
    else:
        # The first product is linear: it may come before the sum, and is narrower.
        z = _project(x, params, "kernel_0")
        received = spread(graph, z, weights, targets=targets)
        hidden = own * _last(z, targets) + received
    return finish_gin(hidden, params, x)


def finish_gin(hidden: jax.Array, params: Params, x: Features = None) -> jax.Array:
    """Returns what `gin` of features x makes of its sums times the first kernel."""
    own = {name: own_columns(params[name], x) for name in params if params[name].ndim}
    hidden, width = hidden + own["bias_0"], len(params["kernel_1"])
    if "scale" in params:
        hidden = _normalize(hidden, x, width) * own["scale"] + own["shift"]
    hidden = like(x, jax.nn.relu(hidden), width)
    return _project(hidden, params, "kernel_1") + own["bias_1"]


def _project(x: Features, params: Params, name: str = "kernel") -> jax.Array:
    """Returns x times a kernel, float32 at least."""
    y = project(x, params[name])
    return y.astype(jnp.promote_types(y.dtype, jnp.float32))


def _last(x: Any, targets: int | None) -> Any:
    """Returns the last rows of an array, or all."""
    return x if targets is None else x[len(x) - targets :]


def _project_last(
    x: Features, params: Params, name: str, targets: int | None
) -> jax.Array:
    """Returns the last rows of x times a kernel, or all."""
    if isinstance(x, SparseRows | Columns):
        return _last(_project(x, params, name), targets)
    return _project(_last(x, targets), params, name)


def _score(z: jax.Array, attention: jax.Array, x: Features = None) -> jax.Array:
    return sum_columns(z * own_columns(attention, x), x)


def _normalize(h: jax.Array, x: Features, width: int) -> jax.Array:
    centred = h - sum_columns(h, x, keepdims=True) / width
    if isinstance(x, Columns):  # what fills up slices is 0 in h, and here no more
        centred *= own_columns(jnp.ones(width), x)
    variance = sum_columns(centred**2, x, keepdims=True) / width
    return centred * jax.lax.rsqrt(variance + 1e-5)
