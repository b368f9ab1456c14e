"""Graph networks whose edges have weights of both ends: attention, kernels, gates.

Conventions are those of `graphs.convolutions`. Features of "agnn", "vanilla_attention"
and "edge_conv" must be dense, or `Columns`: edges compare what their ends have.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.graphs.columns import Columns, like, own_columns, sum_columns, values_of
from hpcjax.graphs.convolutions import Params, spread
from hpcjax.graphs.features import Features, project
from hpcjax.graphs.graph import Graph
from hpcjax.graphs.segments import segment_max, segment_softmax, segment_sum

_LEAST = 1e-12  # norm of features by which a cosine is divided


def commnet(
    graph: Graph, x: Features, params: Params
) -> Float[Array, "vertices outputs"]:
    """Returns h_v W₁ + Σ_{u ∈ N(v)} h_u W₂ + b.

    Args:
      graph: without self-loops, which would count as neighbours.
      x: h.
      params: "self" W₁, "neighbors" W₂ `[inputs, outputs]`, "bias" b.

    References:
      Sukhbaatar et al., Learning Multiagent Communication, NeurIPS 2016.
    """
    matrix = params["self"].shape
    check_params(graph, x, params, neighbors=matrix, bias=matrix[1:])
    sent = spread(graph, _project(x, params, "neighbors"))
    return _project(x, params, "self") + sent + own_columns(params["bias"], x)


def vanilla_attention(
    graph: Graph, x: Float[Array, "vertices inputs"], params: Params
) -> Float[Array, "vertices outputs"]:
    """Returns Σ_{e: u → v} (h_v · h_u) h_u W + b, without a softmax.

    Args:
      graph: without self-loops.
      x: h.
      params: "kernel" W `[inputs, outputs]`, "bias" b.

    References:
      Besta and Hoefler, Parallel and Distributed Graph Neural Networks, 2022, table 2.
    """
    check_params(graph, x, params, bias=params["kernel"].shape[1:])
    z = _project(x, params)
    y = spread(graph, z, _products(graph, values_of(x), x))
    return y + own_columns(params["bias"], x)


def agnn(
    graph: Graph, x: Float[Array, "vertices inputs"], params: Params
) -> Float[Array, "vertices outputs"]:
    """Returns Σ_e α_e h_u W + b, α the softmax of β cos(h_v, h_u) over what v receives.

    Norms are at least 1e-12.

    Args:
      graph: with self-loops.
      x: h.
      params: "kernel" W `[inputs, outputs]`, "beta" β, a number, "bias" b.

    References:
      Thekumparampil et al., Attention-based Graph Neural Network, 2018, equation 4.
    """
    check_params(graph, x, params, beta=(), bias=params["kernel"].shape[1:])
    cosines = params["beta"] * _products(graph, unit_rows(x), x)
    shares = segment_softmax(cosines, graph.receivers, graph.vertices, is_sorted=True)
    y = spread(graph, _project(x, params), shares)
    return y + own_columns(params["bias"], x)


def monet(
    graph: Graph,
    x: Features,
    params: Params,
    *,
    degrees: Float[Array, " vertices"] | None = None,
) -> Float[Array, "vertices outputs"]:
    """Returns Σ_g Σ_e exp(−½ Σ_i p_gi² (u_ei − μ_gi)²) h_u W_g + b.

    u_e = tanh((d_v^(−1/2), d_u^(−1/2)) U + c) of the numbers of edges that both ends
    receive; p are roots of the precisions of Gaussian kernels g.

    Args:
      graph: with self-loops, so that no degree is 0.
      x: h.
      params: "kernel" W `[inputs, kernels, outputs]`, "places" U `[2, dims]`,
        "places_bias" c, "mean" μ and "precision" p `[kernels, dims]`, "bias" b.
      degrees: d, where `graph` is a part of another; None to count.

    References:
      Monti et al., Geometric Deep Learning using Mixture Model CNNs, CVPR 2017.
    """
    _, kernels, outputs = params["kernel"].shape
    dims = params["places"].shape[-1]
    shapes = {"places": (2, dims), "places_bias": (dims,), "mean": (kernels, dims)}
    check_params(graph, x, params, **shapes, precision=(kernels, dims), bias=(outputs,))
    weights = monet_weights(graph, params, degrees)
    y = spread(graph, _project(x, params), weights).sum(1)
    return y + own_columns(params["bias"], x)


def monet_weights(
    graph: Graph, params: Params, degrees: Float[Array, " vertices"] | None = None
) -> Float[Array, "edges kernels"]:
    """Returns the kernels' values of each edge; arguments as for `monet`."""
    if degrees is None:
        ones = jnp.ones(len(graph.receivers))
        degrees = segment_sum(ones, graph.receivers, graph.vertices, is_sorted=True)
    roots = jax.lax.rsqrt(jnp.maximum(degrees, 1))
    ends = jnp.stack([roots[graph.receivers], roots[graph.senders]], -1)
    u = jnp.tanh(ends @ params["places"] + params["places_bias"])
    far = params["precision"] * (u[:, None] - params["mean"])
    return jnp.exp(-0.5 * jnp.sum(far**2, -1))


def g_gcn(
    graph: Graph, x: Features, params: Params
) -> Float[Array, "vertices outputs"]:
    """Returns h_v W₁ + Σ_e σ(h_v A + h_u B) ⊙ h_u W₂ + b, a gate of each number.

    Args:
      graph: without self-loops.
      x: h.
      params: "self" W₁, "neighbors" W₂, "receiver" A and "sender" B `[inputs,
        outputs]`, "bias" b.

    References:
      Bresson and Laurent, Residual Gated Graph ConvNets, 2017, equation 11.
    """
    matrix = params["self"].shape
    shapes = dict.fromkeys(("neighbors", "receiver", "sender"), matrix)
    check_params(graph, x, params, **shapes, bias=matrix[1:])
    own = _project(x, params, "receiver")[graph.receivers]
    gates = jax.nn.sigmoid(own + _project(x, params, "sender")[graph.senders])
    received = spread(graph, _project(x, params, "neighbors"), gates)
    return _project(x, params, "self") + received + own_columns(params["bias"], x)


def edge_conv(
    graph: Graph, x: Float[Array, "vertices inputs"], params: Params
) -> Float[Array, "vertices outputs"]:
    """Returns max_e relu([h_v ‖ h_u − h_v] W₀ + b₀) W₁ + b₁; 0 for no edge.

    Its products are of edges, not of vertices: O(m k²) operations.

    Args:
      graph: without self-loops.
      x: h.
      params: "kernel_0" W₀ `[2 inputs, width]`, "bias_0", "kernel_1" W₁ `[width,
        outputs]`, "bias_1".

    References:
      Wang et al., Dynamic Graph CNN for Learning on Point Clouds, 2019, equation 8.
    """
    width = params["kernel_0"].shape[-1]
    outputs = params["kernel_1"].shape[-1]
    shapes = {"bias_0": (width,), "kernel_1": (width, outputs), "bias_1": (outputs,)}
    check_params(graph, x, params, **shapes)
    h, twice = values_of(x), len(params["kernel_0"])
    own = h[graph.receivers]
    groups = 2 * x.groups if isinstance(x, Columns) else 1
    both = like(x, jnp.concatenate([own, h[graph.senders] - own], -1), twice, groups)
    shift, bias = (own_columns(params[name], x) for name in ("bias_0", "bias_1"))
    hidden = jax.nn.relu(_project(both, params, "kernel_0") + shift)
    each = _project(like(x, hidden, width), params, "kernel_1") + bias
    return segment_max(each, graph.receivers, graph.vertices, is_sorted=True)


def check_params(
    graph: Graph, x: Features, params: Params, **shapes: tuple[int, ...]
) -> None:
    """Raises ConfigError for other vertices' features, or shapes that would spread."""
    rule = f"x must have a row for each of the {graph.vertices} vertices"
    checks.require(x.shape[0] == graph.vertices, rule, rows=x.shape[0])
    for name, wanted in shapes.items():
        found = jnp.shape(params[name])
        checks.require(found == wanted, f"{name} must be {wanted}", shape=found)


def unit_rows(x: Features) -> jax.Array:
    """Returns rows over their norm; a row of zeros stays, and has a slope."""
    h = values_of(x)
    squares = jnp.maximum(sum_columns(h**2, x, keepdims=True), _LEAST**2)
    return h * jax.lax.rsqrt(squares)


def _project(x: Features, params: Params, name: str = "kernel") -> jax.Array:
    """Returns x times a kernel, float32 at least."""
    y = project(x, params[name])
    return y.astype(jnp.promote_types(y.dtype, jnp.float32))


def _products(graph: Graph, h: jax.Array, x: Features) -> Float[Array, " edges"]:
    """Returns h_v · h_u of each edge, of all columns that features x have."""
    return sum_columns(h[graph.receivers] * h[graph.senders], x)
