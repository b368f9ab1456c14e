"""Workers that take steps of their own and average their models, on hosts or a mesh."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging.vectors import flat, like, require_same_start
from hpcjax.core import checks
from hpcjax.core.per_device import unwrap, wrap
from hpcjax.core.varying import after, vary
from hpcjax.hostcomm import Tag, Trace, Transport, allreduce, barrier
from hpcjax.optim.full_precision import (
    check_real,
    raise_precision,
    statistics_dtype,
)

Order = Literal["update_then_average", "average_then_update", "average_gradients"]
MODEL_ORDERS = ("update_then_average", "average_then_update")


class AveragingState(NamedTuple):
    """The state of a worker, besides its parameters.

    Attributes:
      step: number of the next step; the same for all workers.
      own: an `Own`; on a mesh in a `PerDevice`.
    """

    step: Any
    own: Any


class Averaging(NamedTuple):
    """One worker's optimizer: for a loop on the host, or for use inside `shard_map`.

    On hosts a run is `init`, steps and `finish`. What `finish` returns can be saved;
    after `start` it goes on, in the same process or in another one.

    Attributes:
      begin: `begin(params)` returns the state before the first step; can be traced.
      start: `start(state, params)`, on hosts: all workers meet, and from then on take
        part in each other's averages. Before the first step they must have the same
        parameters. On a mesh it does nothing.
      step: `step(grads, state, params, **extras)` takes this worker's own gradients at
        `params`, and what the optimizer gets besides; returns `(params, state)`.
      finish: `finish(state, params)` is called after the last step: on hosts it waits
        until nobody needs this worker any more. Returns `(params, state)`.
      trace: what this worker has done since `start`, where that can be replayed; None
        where there is nothing yet.
    """

    begin: Callable[[optax.Params], AveragingState]
    start: Callable[[AveragingState, optax.Params], None]
    step: Callable[..., tuple[optax.Params, AveragingState]]
    finish: Callable[
        [AveragingState, optax.Params], tuple[optax.Params, AveragingState]
    ]
    trace: Callable[[], Trace | None] = lambda: None

    def init(self, params: optax.Params) -> AveragingState:
        """Returns the state before the first step, and starts."""
        state = self.begin(params)
        self.start(state, params)
        return state


class ModelExchange(NamedTuple):
    """How vectors of float32 are averaged.

    Attributes:
      average: `average(step, vector, memory)` returns the average and the new memory;
        on hosts of numpy arrays.
      start: `start(step, vector, params, **settings)`, on hosts, is given the next
        step, the vector before it, the parameters that it is made of and what must be
        the same in all workers.
      finish: waits for the others.
      axis: the mesh axis; None on hosts.
      remember: `remember(vector)` returns the first memory, on a mesh.
    """

    average: Callable[[Any, Any, Any], tuple[Any, Any]]
    start: Callable[..., None] = lambda *_, **__: None
    finish: Callable[[], None] = lambda: None
    axis: str | None = None
    remember: Callable[[Any], Any] = lambda _: ()


class Own(NamedTuple):
    """The part of a worker's state that differs from worker to worker.

    Attributes:
      inner: state of the optimizer.
      master: float32 copies of the parameters of lower precision, in their order.
      weight: weight of push-sum; on hosts its bits in double precision, uint32 [2].
      memory: what the exchange remembers, on a mesh.
    """

    inner: Any
    master: tuple[jax.Array, ...]
    weight: Any = ()
    memory: Any = ()


def first_step(axis: str | None) -> Any:
    """Returns the number of the first step: on a mesh an array."""
    return 0 if axis is None else jnp.zeros((), jnp.int32)


def begin(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Own]:
    """Returns parameters in full precision, and a worker's state before a step.

    Raises:
      ConfigError: there are no parameters.
      TypeError: parameters of integers, with their paths.
    """
    check_real(params)
    found = jax.tree.leaves(params)
    checks.require(bool(found), "there must be parameters to average", params=params)
    precise = raise_precision(params)
    return precise, Own(tx.init(precise), lowered(precise, params)[1])


def full(params: Any, master: tuple[jax.Array, ...]) -> Any:
    """Returns parameters with those of low precision replaced by their copies."""
    leaves, structure = jax.tree.flatten(params)
    copies = iter(master)
    precise = [next(copies) if _is_low(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, precise)


def lowered(precise: Any, params: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns full-precision parameters in the dtypes of `params`, and float32 copies.

    The inverse of `full`.
    """
    pairs = zip(jax.tree.leaves(precise), jax.tree.leaves(params), strict=True)
    copies = tuple(made for made, given in pairs if _is_low(given))
    cast = jax.tree.map(lambda made, given: made.astype(given.dtype), precise, params)
    return cast, copies


def _is_low(leaf: Any) -> bool:
    return leaf.dtype != statistics_dtype(leaf.dtype)


def local_update(
    tx: optax.GradientTransformation,
    grads: Any,
    inner: Any,
    precise: Any,
    extras: Mapping[str, Any],
) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after a worker's own update."""
    tx = optax.with_extra_args_support(tx)
    updates, inner = tx.update(raise_precision(grads), inner, precise, **extras)
    return optax.apply_updates(precise, updates), inner


def averaging(
    tx: optax.GradientTransformation,
    exchange: ModelExchange,
    *,
    order: Order = "update_then_average",
    average_state: tuple[str, ...] = (),
    trace: Callable[[], Trace | None] = lambda: None,
) -> Averaging:
    """Returns workers that make their own updates and average by any exchange.

    Args:
      tx: makes updates of a worker's own gradients; computed in float32 or better.
      exchange: how.
      order: when; "average_gradients" averages these in place of the models.
      average_state: fields of the optimizer's state that are averaged too, such as
        "mu"; all others stay the worker's own.
      trace: what the exchange has done.
    """
    checks.require_choice("order", order, (*MODEL_ORDERS, "average_gradients"))
    worker = _Worker(tx, exchange, order, average_state)
    return Averaging(worker.begin, worker.start, worker.step, worker.finish, trace)


class _Worker:
    """The functions of an `Averaging`; keeps nothing but what it is made of."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        exchange: ModelExchange,
        order: Order,
        average_state: tuple[str, ...],
    ) -> None:
        self._tx, self._exchange, self._order = tx, exchange, order
        self._names = average_state
        # On a mesh the whole step is compiled; extras may then hold functions.
        compiled = jax.jit if exchange.axis is None else lambda function: function
        self._enter, self._leave = compiled(full), compiled(lowered)
        self._update = compiled(functools.partial(local_update, tx))
        self._pack = compiled(self._packed)
        self._unpack = compiled(self._unpacked)

    def begin(self, params: Any) -> AveragingState:
        precise, own = begin(self._tx, params)
        check_real(self._slots(own.inner))
        memory = self._exchange.remember(self._pack(precise, own.inner))
        axis = self._exchange.axis
        return AveragingState(first_step(axis), wrap(own._replace(memory=memory), axis))

    def start(self, state: AveragingState, params: Any) -> None:
        if self._exchange.axis is not None:
            return
        precise = self._enter(params, state.own.master)
        vector = np.asarray(self._pack(precise, state.own.inner))
        settings = {"order": self._order, "average_state": list(self._names)}
        self._exchange.start(int(state.step), vector, params, **settings)

    def step(
        self, grads: Any, state: AveragingState, params: Any, **extras: Any
    ) -> tuple[Any, AveragingState]:
        own, now = unwrap(state.own), state.step
        precise, inner, memory = self._enter(params, own.master), own.inner, own.memory
        if self._order == "average_gradients":
            mean, memory = self._average(now, flat(grads), memory)
            grads = like(mean, raise_precision(grads))
        if self._order == "average_then_update":
            precise, inner, memory = self._average_models(now, precise, inner, memory)
            # The optimizer may begin with an exchange, which needs gradients alone.
            grads = after(grads, precise) if self._exchange.axis else grads
        precise, inner = self._update(grads, inner, precise, extras)
        if self._order == "update_then_average":
            precise, inner, memory = self._average_models(now, precise, inner, memory)
        params, master = self._leave(precise, params)
        own = own._replace(inner=inner, master=master, memory=memory)
        return params, AveragingState(now + 1, wrap(own, self._exchange.axis))

    def finish(self, state: AveragingState, params: Any) -> tuple[Any, AveragingState]:
        self._exchange.finish()
        return params, state

    def _slots(self, inner: Any) -> dict[str, Any]:
        found = {name: optax.tree.get(inner, name) for name in self._names}
        for name, slot in found.items():
            checks.require(
                slot is not None,
                "average_state must name fields of the optimizer's state",
                average_state=name,
            )
        return found

    def _packed(self, precise: Any, inner: Any) -> jax.Array:
        return flat((precise, self._slots(inner)))

    def _unpacked(self, vector: Any, precise: Any, inner: Any) -> tuple[Any, Any]:
        precise, found = like(vector, (precise, self._slots(inner)))
        return precise, optax.tree.set(inner, **found) if found else inner

    def _average(
        self, step: Any, vector: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        axis = self._exchange.axis
        if axis is None:
            mean, memory = self._exchange.average(int(step), np.asarray(vector), memory)
            return jnp.asarray(mean), memory
        return vary(self._exchange.average(step, vector, memory), axis)

    def _average_models(
        self, step: Any, precise: Any, inner: Any, memory: Any
    ) -> tuple[Any, Any, Any]:
        mean, memory = self._average(step, self._pack(precise, inner), memory)
        return *self._unpack(mean, precise, inner), memory


def host_exchange(
    transport: Transport, kind: str, average: Callable[[Any, Any], Any], **settings: Any
) -> ModelExchange:
    """Returns an exchange between hosts that compare how they begin and end together.

    Args:
      transport: ours.
      kind: of the messages; a new one.
      average: `average(step, vector)` returns the average.
      settings: what must be the same in all workers.
    """

    def start(step: int, vector: Any, params: Any, **more: Any) -> None:
        require_same_start(transport, step, vector, params, **settings, **more)

    return ModelExchange(
        _forgetful(average), start, lambda: barrier(transport, tag=Tag(f"{kind} end"))
    )


def mesh_exchange(axis: str, average: Callable[[Any, Any], Any]) -> ModelExchange:
    """Returns an exchange over a mesh axis, for use inside `shard_map`.

    Args:
      axis: its name.
      average: `average(step, vector)` returns the average.
    """
    return ModelExchange(_forgetful(average), axis=axis)


def _forgetful(average: Callable[[Any, Any], Any]) -> Callable[..., tuple[Any, Any]]:
    """Returns an average that hands its memory on as it is."""
    return lambda step, vector, memory: (average(step, vector), memory)


def mean_every(over: Transport | str, period: int) -> ModelExchange:
    """Returns the mean of all workers after every so many steps, else what is given.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      period: from one mean to the next.
    """
    checks.require_count(1, period=period)
    if isinstance(over, str):

        def on_mesh(step, vector):
            def mean(vector):
                return vary(jax.lax.pmean(vector, over), over)

            if period == 1:
                return mean(vector)
            due = (step + 1) % period == 0
            return jax.lax.cond(due, mean, lambda vector: vector, vary(vector, over))

        return mesh_exchange(over, on_mesh)
    kind = over.new_kind("mean")

    def on_host(step, vector):
        if (step + 1) % period:
            return vector
        return allreduce(over, vector, tag=Tag(kind, step)) / np.float32(over.size)

    return host_exchange(over, kind, on_host, period=period)


def allreduce_sgd(over: Transport | str, tx: optax.GradientTransformation) -> Averaging:
    """Returns ordinary data-parallel training: updates of the mean of all gradients.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      tx: makes updates of mean gradients.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = allreduce_sgd(connected(1)[0], optax.sgd(0.5))
      >>> params = {"w": jnp.ones(2)}
      >>> params, _ = worker.step({"w": jnp.ones(2)}, worker.init(params), params)
      >>> params["w"].tolist()
      [0.5, 0.5]
    """
    return averaging(tx, mean_every(over, 1), order="average_gradients")


def local_sgd(
    over: Transport | str, tx: optax.GradientTransformation, *, period: int = 1
) -> Averaging:
    """Returns workers that take the mean of their models after every so many steps.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      tx: makes updates of a worker's own gradients.
      period: H, steps between means.

    References:
      Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = local_sgd(connected(1)[0], optax.sgd(0.5), period=4)
      >>> worker.init(jnp.ones(2)).step
      0
    """
    return averaging(tx, mean_every(over, period))
