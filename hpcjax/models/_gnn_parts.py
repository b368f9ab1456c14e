"""Graph networks whose vertices are shared out over devices, which exchange rows."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hpcjax import collectives, graphs
from hpcjax.core import checks, per_device
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import Key, derive, whole_batch
from hpcjax.core.method import DATA_AXIS
from hpcjax.core.model import Model
from hpcjax.core.varying import require_axes
from hpcjax.models.gnn_config import GnnConfig

log = logging.getLogger(__name__)

STALE = "stale"
Ring = dict[str, jax.Array]


class Parts:
    """The tables of a graph in parts: all devices', each of which takes its own.

    Several parts on one device are one: their rows lie one after the other in a batch,
    in the order of their numbers on the device.

    Args:
      config: of the network.
      graph: with the self-loops that its layers need.
      owner: the part of each vertex.
      devices: of the run; they divide the parts.
      widths: of the inputs of all layers, and of the outputs.

    Raises:
      ConfigError: devices that do not divide the parts, or a layer without parts.
    """

    def __init__(
        self,
        config: GnnConfig,
        graph: graphs.Graph,
        owner: np.ndarray,
        devices: int,
        widths: list[int],
    ) -> None:
        parts = int(owner.max()) + 1
        rule = f"devices must divide the {parts} parts of the graph"
        checks.require(parts % devices == 0, rule, devices=devices)
        if config.layer == "sgc":
            raise ConfigError(
                "model.layer=sgc propagates without a layer between, where parts would "
                "exchange rows: take another one, such as gcn"
            )
        local = parts // devices
        at = owner // local
        own = graphs.partition(graph, parts, owner)  # pyrefly: ignore
        # Rows are not exchanged where columns are shared out.
        scheme = "allgather" if config.scheme == "features" else config.scheme
        cut = graphs.partition(graph, devices, at, scheme)  # pyrefly: ignore
        self.by_column = config.scheme == "features" and devices > 1
        if config.scheme == "auto":
            log.info("model.scheme=auto is %s", cut.boundary.scheme)
        self.config, self.cut, self.devices, self.local = config, cut, devices, local
        self.hidden, self.outputs = dict(enumerate(widths[1:-1], 1)), widths[-1]
        # Where a vertex is in its device's batch, and among its device's rows.
        flat = own.join(np.arange(parts * own.rows).reshape(parts, -1))
        place = cut.join(np.tile(np.arange(cut.rows), (devices, 1)))
        self.taken = cut.take(flat % (local * own.rows))
        self.given = own.take(place).reshape(devices, local, -1)
        degrees = np.bincount(graph.receivers, minlength=graph.vertices)
        self.degrees = cut.take(degrees.astype(np.float32), halo=True)
        self.edge_features = graph.edge_features
        senders = cut.vertices[:, : cut.boundary.arriving]
        self.sources = np.where(senders < 0, 0, at[senders])

    def ring(self) -> Ring:
        """Returns what has arrived of earlier steps, before the first: zeros."""
        # One row where none arrives, for an empty array has no bytes to be saved.
        lead = self.config.stale, max(1, self.cut.boundary.arriving)
        if not self.config.stale:
            return {}
        return {
            f"layer_{index}": jnp.zeros((*lead, width))
            for index, width in self.hidden.items()
        }

    def call(
        self, module: Any, x: tuple[Any, Ring], *, train: bool, key: Key | None
    ) -> tuple[jax.Array, Ring]:
        """Returns logits of the rows of a device's parts, and its next ring."""
        (batch, ring), config = x, self.config
        features = batch["features"]
        self._check_place(features)
        place = lax.axis_index(DATA_AXIS) if self.devices > 1 else 0
        new = dict(ring)

        def exchange(index: int, h: jax.Array) -> jax.Array:
            arriving = self.cut.boundary.arriving
            if not arriving or config.layer == "mlp":
                return h
            name = f"layer_{index}"
            if not (train and name in ring):
                return collectives.gather_rows(h, self.cut.boundary, DATA_AXIS)
            sent = lax.stop_gradient(h)
            every = collectives.gather_rows(sent, self.cut.boundary, DATA_AXIS)
            mean = config.stale_mean
            fresh = (1 - mean) * every[:arriving].astype(jnp.float32)
            known = jnp.concatenate([(fresh + mean * ring[name][0])[None], ring[name]])
            new[name] = known[:-1]
            used = known[-1]
            if config.delay == "random":
                used = known[self._ages(place, key), jnp.arange(arriving)]
            elif config.delay == "never":
                used = jnp.zeros_like(used)
            return jnp.concatenate([used.astype(h.dtype), h])

        own = None if key is None else whole_batch(key)
        h = features.reshape(-1, features.shape[-1])[_row(self.taken, place)]
        if self.by_column:
            logits = self._call_by_column(module, h, train=train, key=own)
        else:
            part = self._part(place)
            own = None if own is None else jax.random.fold_in(own, place)
            logits = module(h, lambda _: part, train=train, key=own, exchange=exchange)
        module.add_penalty()
        return logits[_row(self.given, place)], new

    def _call_by_column(self, module: Any, h: jax.Array, **options: Any) -> jax.Array:
        """Returns logits of a device's rows, from its columns of all vertices."""
        part = graphs.Part(self.cut.graph_of_columns(self.edge_features))
        x = graphs.rows_to_columns(h[:-1], DATA_AXIS)  # the last row is nobody's
        logits = graphs.like(x, module(x, lambda _: part, **options), self.outputs)
        return graphs.columns_to_rows(logits)

    def _check_place(self, features: jax.Array) -> None:
        """Raises ConfigError where a device would take another one's tables."""
        given = {"parts": len(features), "devices": 1}
        if self.devices > 1:
            require_axes(DATA_AXIS, "a pass of a graph in parts")
            given["devices"] = lax.axis_size(DATA_AXIS)
        rule = (
            f"a graph in parts that is made for {self.devices} devices along "
            f"{DATA_AXIS!r} needs them all, and {self.local} parts on each"
        )
        checks.require((*given.values(),) == (self.local, self.devices), rule, **given)

    def _part(self, place: Any) -> graphs.Part:
        """Returns what a device's layers compute."""
        graph = self.cut.graph(place)
        if self.edge_features is not None:
            # Edges of padding have some edge's, and end in the row that is nobody's.
            own = jnp.asarray(self.edge_features)[_row(self.cut.edges, place)]
            graph = dataclasses.replace(graph, edge_features=own)
        return graphs.Part(graph, None, _row(self.degrees, place), self.cut.rows)

    def _ages(self, place: Any, key: Key | None) -> jax.Array:
        """Returns how old each row that arrives is: as old as all of its sender's."""
        if key is None:
            raise ConfigError("a pass with delay=random needs a key")
        shape, most = (self.devices, self.devices), self.config.stale
        own = derive(whole_batch(key), "delay")
        drawn = jax.random.randint(own, shape, 0, most + 1)
        return drawn[_row(self.sources, place), place]

    def wrap(self, inner: Model) -> Model:
        """Returns a model whose state has the ring besides what is in that of `inner`.

        Args:
          inner: made with `call`.
        """

        def kept(ring: Ring) -> dict[str, Any]:
            part = per_device.PerDevice(value=ring, axis=DATA_AXIS, resize="reset")
            return {STALE: part} if ring else {}

        def init(key: jax.Array) -> tuple[Any, Any]:
            params, state = inner.init(key)
            return params, {**state, **kept(self.ring())}

        def apply(params: Any, state: Any, x: Any, **options: Any) -> tuple[Any, Any]:
            rest = {name: each for name, each in state.items() if name != STALE}
            ring = per_device.unwrap(state.get(STALE, {}))
            (y, ring), new = inner.apply(params, rest, (x, ring), **options)
            return y, {**new, **kept(ring)}

        return inner._replace(init=init, apply=apply)


def _row(table: np.ndarray, place: Any) -> Any:
    return (table if isinstance(place, int) else jnp.asarray(table))[place]
