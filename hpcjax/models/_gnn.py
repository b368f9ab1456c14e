"""Graph networks: each layer of `graphs`, stacked, of one graph that is known."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hpcjax import graphs, layers
from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key, derive, each_row, whole_batch
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._gnn_parts import Parts
from hpcjax.models.gnn_config import GnnConfig, Layer
from hpcjax.models.modules import FLOAT32, ONES, ZEROS, Initializer, loss, param

log = logging.getLogger(__name__)

Shapes = dict[str, tuple[tuple[int, ...], Initializer]]
# What multiplies features, and is in the dtype of products; penalties are of these and
# of what scores edges.
_MATRICES = ("kernel", "kernel_0", "kernel_1", "self", "neighbors")
_SCORES = ("receiver", "sender", "edge", "edge_attention")
_SUMS = {
    "sage": ("self", "neighbors"),
    "commnet": ("self", "neighbors"),
    "g_gcn": ("self", "neighbors", "receiver", "sender"),
}
_LOOPED = ("gcn", "gat", "sgc", "agnn", "monet")
# Whose edges compare the features of both ends.
_COMPARE = ("agnn", "vanilla_attention", "edge_conv")
_WHOLE: dict[str, Callable[..., jax.Array]] = {
    "commnet": graphs.commnet,
    "agnn": graphs.agnn,
    "monet": graphs.monet,
    "vanilla_attention": graphs.vanilla_attention,
    "g_gcn": graphs.g_gcn,
    "edge_conv": graphs.edge_conv,
}
_SEE_EDGES = ("gat", "gin")


def _glorot(inputs: int, outputs: int) -> Initializer:
    """Returns the initializer of normal numbers of variance 2 / (inputs + outputs)."""
    return nnx.initializers.normal(math.sqrt(2 / (inputs + outputs)))


def _shapes(
    layer: Layer, inputs: int, width: int, heads: int, edges: int | None
) -> Shapes:
    """Returns shapes and initializers of a layer's parameters by name.

    Args:
      layer: which.
      inputs: features of a vertex.
      width: outputs, of each head.
      heads: of "gat"; kernels of "monet".
      edges: features of an edge; None without.
    """
    found: Shapes
    matrix = ((inputs, width), _glorot(inputs, width))
    bias = ((width,), ZEROS)
    if layer in _SUMS:
        return {**dict.fromkeys(_SUMS[layer], matrix), "bias": bias}
    if layer == "gat":
        every = heads * width
        score = ((heads, width), _glorot(width, 1))
        kernel = ((inputs, heads, width), _glorot(inputs, every))
        found = {
            "kernel": kernel,
            "receiver": score,
            "sender": score,
            "bias": ((every,), ZEROS),
        }
        if edges:
            found["edge"] = ((edges, heads, width), _glorot(edges, every))
            found["edge_attention"] = score
        return found
    if layer == "gin":
        found = {
            "kernel_0": matrix,
            "bias_0": bias,
            "scale": ((width,), ONES),
            "shift": bias,
            "kernel_1": ((width, width), _glorot(width, width)),
            "bias_1": bias,
            "epsilon": ((), ZEROS),
        }
        if edges:
            found["edge"] = ((edges, inputs), _glorot(edges, inputs))
        return found
    if layer == "edge_conv":
        both = ((2 * inputs, width), _glorot(2 * inputs, width))
        second = ((width, width), _glorot(width, width))
        return {"kernel_0": both, "bias_0": bias, "kernel_1": second, "bias_1": bias}
    if layer == "monet":
        # Of places in (−1, 1)².
        place = ((heads, 2), nnx.initializers.uniform(1))
        return {
            "kernel": ((inputs, heads, width), _glorot(inputs, heads * width)),
            "places": ((2, 2), _glorot(2, 2)),
            "places_bias": ((2,), ZEROS),
            "mean": place,
            "precision": ((heads, 2), ONES),
            "bias": bias,
        }
    beta = {"beta": ((), ONES)} if layer == "agnn" else {}
    return {"kernel": matrix, **beta, "bias": bias}


class _Convolution(nnx.Module):
    """The parameters of a layer."""

    def __init__(self, shapes: Shapes, policy: Policy):
        self.names, self.compute = tuple(shapes), policy.compute
        for name, (shape, initializer) in shapes.items():
            setattr(self, name, param(shape, initializer, policy.param))

    def params(self) -> dict[str, jax.Array]:
        """Returns them as a layer takes them, matrices in the dtype of products."""
        return {
            name: getattr(self, name)[...].astype(
                self.compute if name in _MATRICES else "float32"
            )
            for name in self.names
        }

    def square(self) -> jax.Array:
        """Returns the sum of the squares of what multiplies."""
        chosen = [name for name in self.names if name in (*_MATRICES, *_SCORES)]
        values = [getattr(self, name)[...].astype(jnp.float32) for name in chosen]
        return sum((jnp.sum(value**2) for value in values), jnp.zeros(()))


class _Gnn(nnx.Module):
    """The network of `gnn`."""

    def __init__(self, config: GnnConfig, sizes: list[Shapes], policy: Policy):
        self.config, self.policy, self.count = config, policy, len(sizes)
        self.width = next(iter(sizes[0].values()))[0][0]  # features of a vertex
        for index, shapes in enumerate(sizes):
            setattr(self, f"layer_{index}", _Convolution(shapes, policy))
        self.penalty = loss() if config.penalty else None

    def __call__(
        self,
        h: Any,
        part: Callable[[int], graphs.Part],
        *,
        train: bool,
        key: jax.Array | None,
        exchange: Callable[[int, Any], Any] = lambda _, h: h,
    ) -> jax.Array:
        """Returns logits [targets, outputs] of features, by the part of each layer.

        Of a part `exchange(layer, h)` puts the rows of other devices before its own.
        """
        config = self.config
        rate = config.dropout if train else 0.0
        if rate and key is None:
            raise ConfigError(f"a pass with dropout={rate} needs a key")
        for index in range(self.count):
            own = derive(key, f"layer_{index}") if key is not None and rate else None
            if own is not None:
                h = graphs.drop_entries(h, rate, derive(own, "inputs"))
            y = self._convolve(part(index), exchange(index, h), index, rate, own)
            if index < self.count - 1:
                y = layers.activation(config.activation, y)
                heads = config.heads if config.layer == "gat" else 1
                y = graphs.like(h, y, config.hidden * heads, heads)
            h = y
        return h.astype(self.policy.output)

    def add_penalty(self) -> None:
        """Adds the penalty of this pass to the objective."""
        if self.penalty is not None:
            self.penalty.set_value(self.config.penalty / 2 * self._square())

    def _square(self) -> jax.Array:
        count = self.count if self.config.layer == "gat" else 1
        every = [getattr(self, f"layer_{index}") for index in range(count)]
        return sum((layer.square() for layer in every), jnp.zeros(()))

    def _convolve(
        self,
        part: graphs.Part,
        h: Any,
        index: int,
        rate: float,
        key: jax.Array | None,
    ) -> jax.Array:
        params = getattr(self, f"layer_{index}").params()
        layer, (graph, weights, degrees, targets) = self.config.layer, part
        if layer in _WHOLE:
            known = {"degrees": degrees} if layer == "monet" else {}
            y = _WHOLE[layer](graph, h, params, **known)
            return y if targets is None else y[graph.vertices - targets :]
        if layer == "gat":
            return graphs.gat(
                graph,
                h,
                params,
                combine="concat" if index < self.count - 1 else "mean",
                dropout=rate,
                key=key,
                weights=weights,
                targets=targets,
            )
        if layer == "gcn":
            return graphs.gcn(
                graph, h, params, weights=weights, degrees=degrees, targets=targets
            )
        if layer == "gin":
            return graphs.gin(graph, h, params, weights=weights, targets=targets)
        if layer == "sage":
            # Of a list that is cut, the mean is that of what is listed.
            return graphs.sage(graph, h, params, targets=targets)
        z = graphs.project(h, params["kernel"]).astype(jnp.float32)
        if layer == "sgc":
            z = graphs.propagate_powers(graph, z, self.config.depth)
        first = 0 if targets is None else len(z) - targets
        return z[first:] + graphs.own_columns(params["bias"], h)


def gnn(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    graph: graphs.Graph,
    owner: np.ndarray | None = None,
    devices: int = 1,
    policy: Policy = FLOAT32,
    **options: Any,
) -> Model:
    """Returns a network of the vertices of a graph.

    x are their numbers, int [batch], and a pass computes all vertices, whatever the
    batch, on each device; or x are `graphs.Blocks` [batch, ...], of which it computes
    the targets, [batch, targets, outputs]; or x are "features" of all parts in order,
    [batch, rows, features], a device's in each. Parameters are the same.

    Args:
      inputs: (); for blocks `(hops, targets)`, for parts `(rows, features)`.
      outputs: number of classes.
      graph: of numpy arrays, with features of its vertices; for blocks these need have
        no row.
      owner: the part of each vertex, where examples are parts.
      devices: that have them, along the mesh axis "data".
      policy: dtypes.
      **options: the fields of `GnnConfig`.

    Raises:
      ConfigError: no graph, one without features, features of edges with sparse ones of
        vertices for "gin", blocks of other hops than layers or of what sees none,
        "sgc" in parts, or as many as devices do not divide, or fields that `GnnConfig`
        refuses.

    Examples:
      >>> import numpy as np
      >>> graph = graphs.make_graph([0, 1], [1, 0], 2, features=np.ones((2, 3)))
      >>> model = gnn((), 4, graph=graph, layer="sage")
      >>> params, state = model.init(jax.random.key(0))
      >>> model.apply(params, state, np.array([1]), train=False)[0].shape
      (1, 4)
    """
    config = GnnConfig.of(options, gnn)
    _check(config, inputs, outputs, graph, owner)
    if graph.edge_features is not None and config.layer not in _SEE_EDGES:
        _log_blind(config.layer)
    sizes = _sizes(config, graph, outputs)
    build = functools.partial(_Gnn, config, sizes, policy)
    loops = config.self_loops if config.layer in _LOOPED else None
    if owner is not None:
        whole = graph if loops is None else graphs.add_self_loops(graph, loops)
        widths = [*_widths(config, graph), outputs]
        parts = Parts(config, whole, owner, devices, widths)
        return parts.wrap(from_nnx(build, call=parts.call))
    if inputs:
        return from_nnx(
            build, call=functools.partial(_compute_blocks, inputs[1], loops)
        )
    if loops is not None:
        graph = graphs.add_self_loops(graph, loops)

    def call(module: _Gnn, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        # All vertices are drawn for, whichever of them a device scores.
        shared = None if key is None else whole_batch(key)
        whole = graphs.Part(graph)
        logits = module(graph.features, lambda _: whole, train=train, key=shared)
        module.add_penalty()
        # A number that is no vertex gives NaN, not another vertex's logits.
        how = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
        return logits.at[x].get(**how)

    return from_nnx(build, call=call)


def _compute_blocks(
    targets: int,
    loops: graphs.SelfLoops | None,
    module: _Gnn,
    x: graphs.Blocks,
    *,
    train: bool,
    key: Key | None,
) -> jax.Array:
    """Returns logits of the targets of blocks, [batch, targets, outputs]."""

    def compute(block: graphs.Blocks, own: jax.Array | None) -> jax.Array:
        features = block.features
        if isinstance(features, dict):
            features = graphs.SparseRows(**features, width=module.width)
        part = functools.partial(block.part, self_loops=loops)
        return module(features, part, train=train, key=own)[:targets]

    keys = None if key is None else each_row(key, len(x.senders))
    logits = jax.vmap(compute)(x, keys)
    module.add_penalty()
    return logits


@functools.cache
def _log_blind(layer: Layer) -> None:
    log.warning(
        "model.layer=%s does not see the features that edges have: %s do, and "
        "dataset.edge_to_vertex=true of a property graph adds them up at vertices",
        layer,
        " and ".join(_SEE_EDGES),
    )


def _check(
    config: GnnConfig, inputs: tuple[int, ...], outputs: int, graph: Any, owner: Any
) -> None:
    """Raises ConfigError for what no network can be made of."""
    if len(inputs) not in (0, 2) or outputs < 1:
        raise ConfigError(
            "inputs must be (), as a vertex is a number, (hops, targets) of blocks, or "
            f"(rows, features) of parts, and outputs at least 1: got inputs={inputs}, "
            f"outputs={outputs}"
        )
    if not isinstance(graph, graphs.Graph) or graph.features is None:
        found = "none of them" if isinstance(graph, graphs.Graph) else f"graph={graph}"
        raise ConfigError(
            "a graph network needs a graphs.Graph with features of its vertices: got "
            f"{found}"
        )
    sparse = isinstance(graph.features, graphs.SparseRows)
    if config.layer in _COMPARE and sparse:
        raise ConfigError(
            f"model.layer={config.layer} compares the features of both ends of edges, "
            "which must be dense: got SparseRows; graphs.make_dense makes them so"
        )
    if config.layer == "gin" and sparse and graph.edge_features is not None:
        raise ConfigError(
            "model.layer=gin with features of edges adds these to the vertices', which "
            "must be dense: got SparseRows"
        )
    if config.scheme == "features" and sparse:
        raise ConfigError(
            "model.scheme=features shares out columns of features, which must be "
            "dense: got SparseRows; graphs.make_dense makes them so"
        )
    if owner is None and (config.stale or config.scheme != "halo"):
        raise ConfigError(
            "model.scheme and model.stale are of a graph in parts, "
            f"dataset=partitioned_vertices: got scheme={config.scheme}, "
            f"stale={config.stale}"
        )
    if not inputs:
        return
    of_edges = config.layer == "gin" and graph.edge_features is not None
    if owner is not None:
        if of_edges:
            raise ConfigError(
                "model.layer=gin does not see features of edges of a graph in parts: "
                "take gat, which does, or a graph without them"
            )
        return
    if config.layer in ("sgc", *_WHOLE) or of_edges:
        raise ConfigError(
            "of sampled blocks, allowed are model.layer=gcn, sage, gat, mlp, and gin "
            f"without features of edges: got {config.layer}"
            + " with features of edges"
            * of_edges
        )
    if inputs[0] != config.depth:
        raise ConfigError(
            "dataset.fanouts must be one for each layer: got "
            f"{inputs[0]} fanouts, model.depth={config.depth}"
        )


def _widths(config: GnnConfig, graph: graphs.Graph) -> list[int]:
    """Returns the features that each layer takes."""
    heads = config.heads if config.layer == "gat" else 1
    return [graph.features.shape[1], *[config.hidden * heads] * (config.depth - 1)]


def _sizes(config: GnnConfig, graph: graphs.Graph, outputs: int) -> list[Shapes]:
    """Returns the shapes of each layer's parameters."""
    edges = None if graph.edge_features is None else graph.edge_features.shape[1]
    count = 1 if config.layer == "sgc" else config.depth
    found, width = [], graph.features.shape[1]
    for index in range(count):
        last = index == count - 1
        heads = 1 if last and config.layer == "gat" else config.heads
        own = outputs if last else config.hidden
        found.append(_shapes(config.layer, width, own, heads, edges))
        width = own * heads if config.layer == "gat" else own
    return found
