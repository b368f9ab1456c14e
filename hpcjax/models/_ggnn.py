"""Gated graph networks of programs: typed, positioned messages and a shared GRU."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hpcjax import graphs, layers
from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key, each_row
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.ggnn_config import GgnnConfig
from hpcjax.models.modules import FLOAT32, ZEROS, Initializer, param
from hpcjax.models.scan import recompute

POSITIONS = 1024  # higher ones are taken for the last
SELECTED = 50.0
_FLOWS = 3

Params = dict[str, jax.Array]


class _Edges(NamedTuple):
    """All messages of a step: ends, kinds and positions, and how many come [V, 1]."""

    senders: jax.Array
    receivers: jax.Array
    kinds: jax.Array
    positions: jax.Array
    counts: jax.Array


class _Ggnn(nnx.Module):
    """The parameters of `ggnn`."""

    def __init__(self, config: GgnnConfig, words: int, outputs: int, policy: Policy):
        width = config.width + 2
        kinds = _FLOWS * (1 + config.backward)
        shapes: dict[str, tuple[int, ...]] = {
            "embedding": (words, config.width),
            "messages": (kinds, width, width),
            "messages_bias": (kinds, width),
            "of_input": (width, 3 * width),
            "of_state": (width, 3 * width),
            "input_bias": (3 * width,),
            "state_bias": (3 * width,),
            "choose": (2 * width, outputs),
            "choose_bias": (outputs,),
            "read": (width, outputs),
            "read_bias": (outputs,),
        }
        if config.positions:
            shapes |= {"gate": (width, width), "gate_bias": (width,)}
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            draw = _initializer(name, shape, config)
            setattr(self, name, param(shape, draw, policy.param))

    def values(self) -> Params:
        """Returns the parameters by name."""
        return {name: getattr(self, name)[...] for name in self.names}


def _initializer(name: str, shape: tuple[int, ...], config: GgnnConfig) -> Initializer:
    """Returns variances of 1 for embeddings, and of a third over the inputs for maps.

    The latter is PyTorch's, hence the released network's: of larger maps the root's 50
    saturates the gates, and the network learns a third slower.
    """
    if name.endswith("bias"):
        return ZEROS
    scale = 1.0 if name == "embedding" else math.sqrt(1 / (3 * shape[-2]))
    draw = nnx.initializers.normal(scale)
    if name not in ("choose", "read") or config.root_rows == 1:
        return draw
    of_root = np.arange(shape[0]) % (config.width + 2) >= config.width
    shares = np.where(of_root, config.root_rows, 1.0)[:, None]
    return lambda *how: (draw(*how) * shares).astype(how[-1])


def ggnn(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    tables: tuple[int, ...],
    policy: Policy = FLOAT32,
    **options: Any,
) -> Model:
    """Returns a gated graph network of the vertices of programs.

    A state begins as [embedding of the text ‖ 50 at one of two places, the second for
    a root; 0 at both with readout="graph", which has none]. In each step a vertex w
    sends W_k (h_w ⊙ p) + b_k along each of its edges of kind k, one of three flows and
    two directions, with p = 2σ(W [sin ‖ cos ‖ 0](pos · 10000^(−2i/width)) + b) of the
    edge's position; a vertex takes the mean of all that it receives as the input of a
    GRU. With gate="post" it is (W_k h_w + b_k) ⊙ p.
    Logits are σ(Linear([h_0 ‖ h_T])) ⊙ Linear(h_T); with readout="graph" they are added
    over the vertices of each graph.

    x are unions of graphs: `texts` and `selected` int [batch, vertices]; `senders`,
    `receivers`, `flows` and `positions` int [batch, edges]; and for readout="graph"
    `graphs` int [batch, vertices], the number of each vertex's graph, or that of none.
    Logits are [batch, vertices, outputs], or [batch, graphs, outputs].

    Args:
      inputs: graphs of a union.
      outputs: number of classes.
      tables: the one number of texts, an unknown one included.
      policy: dtypes.
      **options: the fields of `GgnnConfig`.

    Raises:
      ConfigError: other tables, or fields that `GgnnConfig` refuses.

    References:
      Cummins et al.: ProGraML, ICML 2021, section 4; Li et al.: Gated graph sequence
      neural networks, ICLR 2016.

    Examples:
      >>> model = ggnn((16,), 2, tables=(2231,))
      >>> params, _ = model.init(jax.random.key(0))
      >>> sum(each.size for each in jax.tree.leaves(params))
      87070
    """
    config = GgnnConfig.of(options, ggnn)
    rule = "a network of programs needs one table, of their texts, and classes"
    good = len(tables) == 1 and tables[0] > 0 and outputs > 0
    checks.require(good, rule, tables=tables, outputs=outputs)
    build = functools.partial(_Ggnn, config, tables[0], outputs, policy)
    return from_nnx(build, call=functools.partial(_compute, config, policy, inputs[0]))


def _compute(
    config: GgnnConfig,
    policy: Policy,
    block: int,
    module: _Ggnn,
    x: dict[str, jax.Array],
    *,
    train: bool,
    key: Key | None,
) -> jax.Array:
    """Returns logits [batch, vertices, outputs] of unions, as one union of all."""
    rows, size = x["texts"].shape
    whole = config.readout == "graph"
    rule = "x's graphs, one number of each vertex, are for readout=graph"
    checks.require(whole == ("graphs" in x), rule, readout=config.readout, x=sorted(x))
    rate = config.dropout if train else 0.0
    if rate and key is None:
        raise ConfigError(f"a pass with dropout={rate} needs a key")
    keys = each_row(key, rows) if rate and key is not None else None
    params = module.values()
    start = _embed(params, x["texts"].ravel(), x["selected"].ravel(), rooted=not whole)
    shared = params, _list_edges(x, config.backward), _gates(config, params)

    def step(shared: Any, carry: Any) -> Any:
        (params, edges, gates), (h, number) = shared, carry
        received = _receive(config, policy, params, edges, gates, h)
        new = layers.gru_cell(received, h, params, compute=policy.compute)
        if keys is not None:
            own = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
            new = _drop(new.reshape(rows, size, -1), rate, own).reshape(new.shape)
        return new, number + 1

    again = recompute(step, "full")
    (last, _), _ = jax.lax.scan(
        lambda carry, _: (again(shared, carry), None),
        (start, jnp.int32(0)),
        length=config.steps,
    )
    how = {"compute": policy.compute, "output": "float32"}
    both = jnp.concatenate([start, last], axis=-1)
    chosen = layers.dense(both, params["choose"], params["choose_bias"], **how)
    read = layers.dense(last, params["read"], params["read_bias"], **how)
    logits = (jax.nn.sigmoid(chosen) * read).reshape(rows, size, -1)
    if whole:
        add = functools.partial(graphs.segment_sum, count=block)
        logits = jax.vmap(add)(logits, x["graphs"])
    return logits.astype(policy.output)


def _embed(
    params: Params, texts: jax.Array, selected: jax.Array, *, rooted: bool
) -> jax.Array:
    """Returns the first states, [vertices, width + 2] float32.

    Of a whole graph no vertex is the root, and 50 in all of them would only saturate
    the gates.
    """
    embedded = layers.embedding(params["embedding"], texts).astype(jnp.float32)
    places = (SELECTED if rooted else 0.0) * jax.nn.one_hot(selected, 2)
    return jnp.concatenate([embedded, places], axis=-1)


def _list_edges(x: dict[str, jax.Array], backward: bool) -> _Edges:
    """Returns the messages of all unions, whose vertices are numbered on."""
    rows, size = x["texts"].shape
    first = size * jnp.arange(rows)[:, None]
    senders, receivers = ((first + x[n]).ravel() for n in ("senders", "receivers"))
    kinds, positions = x["flows"].ravel(), x["positions"].ravel()
    if backward:
        both = jnp.concatenate([senders, receivers])
        senders, receivers = both, jnp.roll(both, len(senders))
        kinds = jnp.concatenate([kinds, kinds + _FLOWS])
        positions = jnp.tile(positions, 2)
    ones = jnp.ones(len(receivers), jnp.float32)
    counts = graphs.segment_sum(ones, receivers, rows * size)
    positions = jnp.clip(positions, 0, POSITIONS - 1)
    return _Edges(senders, receivers, kinds, positions, counts[:, None])


def _gates(config: GgnnConfig, params: Params) -> jax.Array | None:
    """Returns the gate of each position, [positions, width + 2]; None without."""
    if not config.positions:
        return None
    places = jnp.arange(POSITIONS, dtype=jnp.float32)[:, None]
    angles = places * layers.rope_frequencies(config.width)
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    waves = jnp.pad(waves, ((0, 0), (0, 2)))
    return 2 * jax.nn.sigmoid(layers.dense(waves, params["gate"], params["gate_bias"]))


def _receive(
    config: GgnnConfig,
    policy: Policy,
    params: Params,
    edges: _Edges,
    gates: jax.Array | None,
    h: jax.Array,
) -> jax.Array:
    """Returns the mean of what vertices receive, [vertices, width + 2]."""
    maps, bias = params["messages"], params["messages_bias"]
    (kinds, width, _), vertices = maps.shape, len(h)
    how = {"compute": policy.compute, "output": "float32"}
    gate = 1.0 if gates is None else gates[edges.positions]
    if config.gate == "post":
        side_by_side = maps.transpose(1, 0, 2).reshape(width, kinds * width)
        sent = layers.dense(h, side_by_side, bias.ravel(), **how)
        sent = sent.reshape(vertices * kinds, width)
        sent = sent[edges.senders * kinds + edges.kinds] * gate
        total = graphs.segment_sum(sent, edges.receivers, vertices)
        return total / jnp.maximum(edges.counts, 1)
    # Sums of each kind come first: the map is linear, and vertices are fewer than
    # edges. With a column of ones they bring how many messages have its bias.
    gated = h[edges.senders] * gate
    gated = jnp.pad(gated, ((0, 0), (0, 1)), constant_values=1.0)
    of_kind = edges.receivers * kinds + edges.kinds
    sums = graphs.segment_sum(gated, of_kind, vertices * kinds)
    with_bias = jnp.concatenate([maps, bias[:, None]], axis=1)
    total = layers.dense(
        sums.reshape(vertices, -1), with_bias.reshape(-1, width), **how
    )
    return total / jnp.maximum(edges.counts, 1)


def _drop(h: jax.Array, rate: float, keys: jax.Array) -> jax.Array:
    """Returns states with a share of zeros, drawn for each row by its own key."""
    shape = h.shape[1:]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, shape))(keys)
    return jnp.where(kept, h / (1 - rate), 0)
