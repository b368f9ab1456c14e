"""Graph networks: each layer of `graphs`, stacked, of one graph that is known."""

import functools
import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import graphs, layers
from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key, derive, whole_batch
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.gnn_config import GnnConfig, Layer
from hpcjax.models.modules import FLOAT32, ONES, ZEROS, Initializer, loss, param

log = logging.getLogger(__name__)

Shapes = dict[str, tuple[tuple[int, ...], Initializer]]
# What multiplies features, and is in the dtype of products; penalties are of these and
# of what scores edges.
_MATRICES = ("kernel", "kernel_0", "kernel_1", "self", "neighbors")
_SCORES = ("receiver", "sender", "edge", "edge_attention")
_LOOPED = ("gcn", "gat", "sgc")
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
      heads: of "gat".
      edges: features of an edge; None without.
    """
    found: Shapes
    matrix = ((inputs, width), _glorot(inputs, width))
    bias = ((width,), ZEROS)
    if layer == "sage":
        return {"self": matrix, "neighbors": matrix, "bias": bias}
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
    return {"kernel": matrix, "bias": bias}


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
        for index, shapes in enumerate(sizes):
            setattr(self, f"layer_{index}", _Convolution(shapes, policy))
        self.penalty = loss() if config.penalty else None

    def __call__(
        self, graph: graphs.Graph, *, train: bool, key: jax.Array | None
    ) -> jax.Array:
        """Returns logits of all vertices [vertices, outputs]."""
        config, h = self.config, graph.features
        rate = config.dropout if train else 0.0
        if rate and key is None:
            raise ConfigError(f"a pass with dropout={rate} needs a key")
        for index in range(self.count):
            own = derive(key, f"layer_{index}") if key is not None and rate else None
            if own is not None:
                h = graphs.drop_entries(h, rate, derive(own, "inputs"))
            h = self._convolve(graph, h, index, rate, own)
            if index < self.count - 1:
                h = layers.activation(config.activation, h)
        if self.penalty is not None:
            self.penalty.set_value(config.penalty / 2 * self._square())
        return h.astype(self.policy.output)

    def _square(self) -> jax.Array:
        count = self.count if self.config.layer == "gat" else 1
        every = [getattr(self, f"layer_{index}") for index in range(count)]
        return sum((layer.square() for layer in every), jnp.zeros(()))

    def _convolve(
        self,
        graph: graphs.Graph,
        h: Any,
        index: int,
        rate: float,
        key: jax.Array | None,
    ) -> jax.Array:
        params = getattr(self, f"layer_{index}").params()
        layer = self.config.layer
        if layer == "gat":
            combine = "concat" if index < self.count - 1 else "mean"
            return graphs.gat(graph, h, params, combine=combine, dropout=rate, key=key)
        if layer in ("gcn", "sage", "gin"):
            return getattr(graphs, layer)(graph, h, params)
        z = graphs.project(h, params["kernel"]).astype(jnp.float32)
        if layer == "sgc":
            z = graphs.propagate_powers(graph, z, self.config.depth)
        return z + params["bias"]


def gnn(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    graph: graphs.Graph,
    policy: Policy = FLOAT32,
    **options: Any,
) -> Model:
    """Returns a network of the vertices of a graph; x are their numbers, int [batch].

    A pass computes all vertices, whatever the batch, on each device.

    Args:
      inputs: ().
      outputs: number of classes.
      graph: of numpy arrays, with features of its vertices.
      policy: dtypes.
      **options: the fields of `GnnConfig`.

    Raises:
      ConfigError: no graph, one without features, features of edges with sparse ones of
        vertices for "gin", or fields that `GnnConfig` refuses.

    Examples:
      >>> import numpy as np
      >>> graph = graphs.make_graph([0, 1], [1, 0], 2, features=np.ones((2, 3)))
      >>> model = gnn((), 4, graph=graph, layer="sage")
      >>> params, state = model.init(jax.random.key(0))
      >>> model.apply(params, state, np.array([1]), train=False)[0].shape
      (1, 4)
    """
    config = GnnConfig.of(options, gnn)
    _check(config, inputs, outputs, graph)
    if graph.edge_features is not None and config.layer not in _SEE_EDGES:
        _log_blind(config.layer)
    if config.layer in _LOOPED and config.self_loops is not None:
        graph = graphs.add_self_loops(graph, config.self_loops)
    sizes = _sizes(config, graph, outputs)

    def call(module: _Gnn, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        # All vertices are drawn for, whichever of them a device scores.
        shared = None if key is None else whole_batch(key)
        logits = module(graph, train=train, key=shared)
        # A number that is no vertex gives NaN, not another vertex's logits.
        how = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
        return logits.at[x].get(**how)

    return from_nnx(functools.partial(_Gnn, config, sizes, policy), call=call)


@functools.cache
def _log_blind(layer: Layer) -> None:
    log.warning(
        "model.layer=%s does not see the features that edges have: %s do, and "
        "dataset.edge_to_vertex=true of a property graph adds them up at vertices",
        layer,
        " and ".join(_SEE_EDGES),
    )


def _check(
    config: GnnConfig, inputs: tuple[int, ...], outputs: int, graph: Any
) -> None:
    """Raises ConfigError for what no network can be made of."""
    if tuple(inputs) != () or outputs < 1:
        raise ConfigError(
            "a vertex is a number, so inputs must be (), and outputs at least 1: got "
            f"inputs={inputs}, outputs={outputs}"
        )
    if not isinstance(graph, graphs.Graph) or graph.features is None:
        found = "none of them" if isinstance(graph, graphs.Graph) else f"graph={graph}"
        raise ConfigError(
            "a graph network needs a graphs.Graph with features of its vertices: got "
            f"{found}"
        )
    sparse = isinstance(graph.features, graphs.SparseRows)
    if config.layer == "gin" and sparse and graph.edge_features is not None:
        raise ConfigError(
            "model.layer=gin with features of edges adds these to the vertices', which "
            "must be dense: got SparseRows"
        )


def _sizes(config: GnnConfig, graph: graphs.Graph, outputs: int) -> list[Shapes]:
    """Returns the shapes of each layer's parameters."""
    edges = None if graph.edge_features is None else graph.edge_features.shape[1]
    count = 1 if config.layer == "sgc" else config.depth
    found, width = [], graph.features.shape[1]
    for index in range(count):
        last = index == count - 1
        heads = 1 if last else config.heads
        own = outputs if last else config.hidden
        found.append(_shapes(config.layer, width, own, heads, edges))
        width = own * heads if config.layer == "gat" else own
    return found
