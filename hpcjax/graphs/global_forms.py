"""Graph layers in global form: products of matrices, of which the adjacency is sparse.

A[v, u] is the number of edges u → v: a `BCOO` matrix with an entry for each edge, whose
equal entries add up. It is never made dense.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.graphs import convolutions, edge_weights
from hpcjax.graphs.columns import Columns
from hpcjax.graphs.convolutions import Params, gcn_weights
from hpcjax.graphs.edge_weights import check_params
from hpcjax.graphs.features import project
from hpcjax.graphs.graph import Graph, look_at
from hpcjax.graphs.segments import segment_softmax

Layer = Callable[..., jax.Array]
_EXACT = 1e-6  # of PPNP's solution, relative


def gnn_layer(name: str, form: Literal["local", "global"] = "local") -> Layer:
    """Returns a layer, a function of a graph, features and parameters.

    "local" is message passing, as `graphs.gcn`; "global" products with the adjacency,
    of dense features and the same parameters. "sage" has the aggregator "gcn". Without
    a local form are polynomials and rational functions of the adjacency:

    - "chebnet" Σ_{t < T} T_t(−S) X Θ_t + b, of "kernel" Θ `[terms, inputs, outputs]`.
    - "ppnp" α (I − (1 − α) S)^(−1) Z, Z = X W + b, by conjugate gradients whose number
      of steps follows from `alpha`; edges must be there in both directions.
    - "appnp" Z_{t+1} = (1 − α) S Z_t + α Z_0, `steps` of them, within (1 − α)^steps of
      PPNP, relative to where it begins.
    - "arma" X_{t+1} = relu(S X_t W + X V + b), the mean of stacks, of "root" V and
      "first" `[inputs, stacks, outputs]` and "kernel" W `[stacks, outputs, outputs]`;
      the first of `steps` has "first" for W.
    - "s2gc" (1/T) Σ_{t=1..T} ((1 − α) S^t X + α X) W + b.

    S is D^(−1/2) A D^(−1/2); self-loops are those that the graph has: "chebnet" wants
    none, the others one.

    Args:
      name: of the layer, such as "gat".
      form: see above.

    Raises:
      ConfigError: another name, or a layer without this form; of the layer, shapes that
        do not fit, with its name.

    References:
      Besta and Hoefler, Parallel and Distributed Graph Neural Networks, 2022, tables 2
      and 3; Defferrard et al., 2016; Klicpera et al., 2019; Bianchi et al., 2021; Zhu
      and Koniusz, 2021.
    """
    forms: dict[str, Mapping[str, Layer]] = {"local": LOCAL, "global": GLOBAL}
    if form not in forms:
        raise ConfigError(f"form must be 'local' or 'global': got {form!r}")
    if name not in LOCAL.keys() | GLOBAL.keys():
        every = sorted(LOCAL.keys() | GLOBAL.keys())
        raise ConfigError(f"there is no layer {name!r}{nearest(name, every)}")
    if name not in forms[form]:
        what = "matrix form" if form == "global" else "local form"
        found = ", ".join(sorted(forms[form]))
        raise ConfigError(f"{name} has no {what}; one have: {found}")
    layer = forms[form][name]

    @functools.wraps(layer)
    def named(*args: Any, **options: Any) -> jax.Array:
        try:
            return layer(*args, **options)
        except jax.errors.JAXTypeError:  # of values that are not known: no shapes
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: {error}") from error

    return named


def multiply(
    graph: Graph,
    x: Float[Array, "vertices ..."],
    entries: Float[Array, "edges ..."] | None = None,
) -> Float[Array, "vertices ..."]:
    """Returns (A ⊙ V) X, of entries V; of heads, the second axes, each one's."""
    if entries is None:
        entries = jnp.ones(len(graph.receivers), x.dtype)
    if entries.ndim == 2:
        heads = range(entries.shape[1])
        found = [multiply(graph, x[:, each], entries[:, each]) for each in heads]
        return jnp.stack(found, 1)
    places = jnp.stack([graph.receivers, graph.senders], 1)
    shape = graph.vertices, graph.vertices
    return sparse.BCOO((entries, places), shape=shape) @ x


def _sample(graph: Graph, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the entries of A ⊙ (L Rᵀ)."""
    # By gathers: slopes of `sparse.bcoo_dot_general_sampled` are dense matrices.
    return jnp.sum(left[graph.receivers] * right[graph.senders], -1)


def _softmax(graph: Graph, entries: jax.Array) -> jax.Array:
    """Returns exp of entries over the sums of their rows."""
    return segment_softmax(entries, graph.receivers, graph.vertices, is_sorted=True)


def _start(
    graph: Graph, x: jax.Array, params: Params, name: str = "kernel"
) -> jax.Array:
    """Returns X W, float32 at least; raises ConfigError for what does not fit."""
    own = {"bias": params[name].shape[-1:]} if "bias" in params else {}
    check_params(graph, x, params, **own)
    z = _project(x, params[name])
    return z.astype(jnp.promote_types(z.dtype, jnp.float32))


def _project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # A device's columns would be spread over biases of all.
    given = {"features": type(x).__name__}
    checks.require(not isinstance(x, Columns), "matrix forms take arrays", **given)
    return project(x, kernel)


def _gcn(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    return _sgc(graph, x, params, powers=1)


def _sgc(graph: Graph, x: jax.Array, params: Params, *, powers: int = 2) -> jax.Array:
    checks.require_count(0, powers=powers)
    z, s = _start(graph, x, params), gcn_weights(graph)
    for _ in range(powers):
        z = multiply(graph, z, s)
    return z + params["bias"]


def _sage(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    z = _start(graph, x, params, "self")
    count = multiply(graph, jnp.ones((graph.vertices, 1))) + 1
    return (z + multiply(graph, z)) / count + params["bias"]


def _gin(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    checks.require("edge" not in params, "no features of edges", params=[*params])
    z = _start(graph, x, params, "kernel_0")
    summed = (1 + params["epsilon"]) * z + multiply(graph, z)
    return convolutions.finish_gin(summed, params)


def _commnet(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    z = _start(graph, x, params, "self")
    return z + multiply(graph, _start(graph, x, params, "neighbors")) + params["bias"]


def _vanilla(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    z = _start(graph, x, params)
    return multiply(graph, z, _sample(graph, x, x)) + params["bias"]


def _agnn(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    z, unit = _start(graph, x, params), edge_weights.unit_rows(x)
    shares = _softmax(graph, params["beta"] * _sample(graph, unit, unit))
    return multiply(graph, z, shares) + params["bias"]


def _gat(
    graph: Graph,
    x: jax.Array,
    params: Params,
    *,
    combine: Literal["concat", "mean"] = "concat",
) -> jax.Array:
    checks.require_choice("combine", combine, ("concat", "mean"))
    checks.require("edge" not in params, "no features of edges", params=[*params])
    heads, width = params["receiver"].shape
    bias = heads * width if combine == "concat" else width
    check_params(graph, x, params, sender=(heads, width), bias=(bias,))
    z = _project(x, params["kernel"]).astype(jnp.float32)
    rows, columns = (jnp.sum(z * params[end], -1) for end in ("receiver", "sender"))
    logits = jax.nn.leaky_relu(rows[graph.receivers] + columns[graph.senders], 0.2)
    y = multiply(graph, z, _softmax(graph, logits))
    y = y.mean(1) if combine == "mean" else y.reshape(len(y), -1)
    return y + params["bias"]


def _monet(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    z = _start(graph, x, params)
    entries = edge_weights.monet_weights(graph, params)
    return multiply(graph, z, entries).sum(1) + params["bias"]


def _chebnet(graph: Graph, x: jax.Array, params: Params) -> jax.Array:
    kernels, s = params["kernel"], gcn_weights(graph)
    check_params(graph, x, params, bias=kernels.shape[-1:])
    # The Laplacian I − S, whose values are at most 2, is scaled to −S.
    before, power = x, x
    total = _project(x, kernels[0])
    for term, kernel in enumerate(kernels[1:], 1):
        new = -multiply(graph, power, s)
        before, power = power, new if term == 1 else 2 * new - before
        total += _project(power, kernel)
    return total + params["bias"]


def _ppnp(
    graph: Graph, x: jax.Array, params: Params, *, alpha: float = 0.1
) -> jax.Array:
    checks.require(0 < alpha <= 1, "alpha must be in (0, 1]", alpha=alpha)
    _check_symmetric(graph)
    s = gcn_weights(graph)

    def apply(z: jax.Array) -> jax.Array:
        return z - (1 - alpha) * multiply(graph, z, s)

    def step(carry: tuple[jax.Array, ...], _: None) -> tuple[Any, None]:
        z, rest, way, square = carry
        turned = apply(way)
        # Of a column that is solved, 0 / 0.
        curve = jnp.sum(way * turned, 0)
        length = square / jnp.where(curve > 0, curve, 1)
        rest = rest - length * turned
        new = jnp.sum(rest**2, 0)
        ratio = new / jnp.where(square > 0, square, 1)
        return (z + length * way, rest, rest + ratio * way, new), None

    given = alpha * (_start(graph, x, params) + params["bias"])
    start = jnp.zeros_like(given), given, given, jnp.sum(given**2, 0)
    # Values of the matrix are in [α, 2 − α]: the bound of Chebyshev.
    root = math.sqrt((2 - alpha) / alpha)
    ratio = max((root - 1) / (root + 1), _EXACT)
    steps = math.ceil(math.log(_EXACT / 2) / math.log(ratio))
    return jax.lax.scan(step, start, None, steps)[0][0]


def _check_symmetric(graph: Graph) -> None:
    """Raises ConfigError for edges without the opposite ones, as far as known."""
    u, v = look_at(graph.senders), look_at(graph.receivers)
    if u is None or v is None:
        return
    one, other = (a.astype(np.int64) * graph.vertices + b for a, b in ((u, v), (v, u)))
    alike = np.array_equal(np.sort(one), np.sort(other))
    rule = "ppnp needs all edges in both directions, see graphs.symmetrize"
    checks.require(alike, rule, edges=len(u))


def _appnp(
    graph: Graph,
    x: jax.Array,
    params: Params,
    *,
    alpha: float = 0.1,
    steps: int = 10,
) -> jax.Array:
    checks.require(0 < alpha <= 1, "alpha must be in (0, 1]", alpha=alpha)
    checks.require_count(0, steps=steps)
    start, s = _start(graph, x, params) + params["bias"], gcn_weights(graph)

    def step(z: jax.Array, _: None) -> tuple[jax.Array, None]:
        return (1 - alpha) * multiply(graph, z, s) + alpha * start, None

    return jax.lax.scan(step, start, None, steps)[0]


def _arma(graph: Graph, x: jax.Array, params: Params, *, steps: int = 2) -> jax.Array:
    checks.require_count(1, steps=steps)
    root = _start(graph, x, params, "root")
    z, s = _start(graph, x, params, "first"), gcn_weights(graph)
    for step in range(steps):
        if step:
            z = jnp.einsum("nsi,sio->nso", z, params["kernel"])
        wide = multiply(graph, z.reshape(len(z), -1), s).reshape(z.shape)
        z = jax.nn.relu(wide + root + params["bias"])
    return z.mean(1)


def _s2gc(
    graph: Graph,
    x: jax.Array,
    params: Params,
    *,
    alpha: float = 0.05,
    terms: int = 4,
) -> jax.Array:
    checks.require(0 <= alpha <= 1, "alpha must be in [0, 1]", alpha=alpha)
    checks.require_count(1, terms=terms)
    start, s = _start(graph, x, params), gcn_weights(graph)
    power, total = start, jnp.zeros_like(start)
    for _ in range(terms):
        power = multiply(graph, power, s)
        total += power
    mean = (1 - alpha) / terms * total + alpha * start
    return mean + params["bias"]


LOCAL: Mapping[str, Layer] = {
    "gcn": convolutions.gcn,
    "sage": functools.partial(convolutions.sage, aggregate="gcn"),
    "sgc": convolutions.sgc,
    "gin": convolutions.gin,
    "gat": convolutions.gat,
    "commnet": edge_weights.commnet,
    "vanilla_attention": edge_weights.vanilla_attention,
    "agnn": edge_weights.agnn,
    "monet": edge_weights.monet,
    "g_gcn": edge_weights.g_gcn,
    "edge_conv": edge_weights.edge_conv,
}
GLOBAL: Mapping[str, Layer] = {
    "gcn": _gcn,
    "sage": _sage,
    "sgc": _sgc,
    "gin": _gin,
    "gat": _gat,
    "commnet": _commnet,
    "vanilla_attention": _vanilla,
    "agnn": _agnn,
    "monet": _monet,
    "chebnet": _chebnet,
    "ppnp": _ppnp,
    "appnp": _appnp,
    "arma": _arma,
    "s2gc": _s2gc,
}
