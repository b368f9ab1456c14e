"""Workers that take steps of their own and average their models, on hosts or a mesh."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks
from hpcjax.core.per_device import unwrap, wrap
from hpcjax.core.varying import vary
from hpcjax.hostcomm import Tag, Transport, allreduce, barrier
from hpcjax.optim.flat_model import agree, flat, like
from hpcjax.optim.full_precision import (
    check_real,
    raise_precision,
    statistics_dtype,
)

Order = Literal["update_then_average", "average_then_update", "average_gradients"]
MODEL_ORDERS = ("update_then_average", "average_then_update")


class AveragingState(NamedTuple):
    """What a worker has besides its parameters.

    Attributes:
      step: the next one; the same for all workers.
      own: an `Own`; on a mesh in a `PerDevice`.
    """

    step: Any
    own: Any


class Averaging(NamedTuple):
    """One worker's optimizer: for a loop on the host, or for use inside `shard_map`.

    Attributes:
      init: `init(params)` returns the state; on hosts all workers must begin with the
        same parameters.
      step: `step(grads, state, params)` takes this worker's own gradients at `params`
        and returns `(params, state)`.
      finish: `finish(state, params)` is called once, after the last step: on hosts it
        waits until nobody needs this worker any more.
      trace: what this worker has done, where that can be replayed.
    """

    init: Callable[[optax.Params], AveragingState]
    step: Callable[
        [optax.Updates, AveragingState, optax.Params],
        tuple[optax.Params, AveragingState],
    ]
    finish: Callable[
        [AveragingState, optax.Params], tuple[optax.Params, AveragingState]
    ]
    trace: Callable[[], Any] | None = None


class ModelExchange(NamedTuple):
    """How vectors of float32 are averaged.

    Attributes:
      start: `start(vector, params, **settings)` is given the first vector, the
        parameters that it is made of and what must be the same in all workers.
      average: `average(step, vector)` returns the average; on hosts of numpy arrays.
      finish: waits for the others.
      axis: the mesh axis; None on hosts.
    """

    start: Callable[..., None]
    average: Callable[[Any, Any], Any]
    finish: Callable[[], None]
    axis: str | None = None


class Own(NamedTuple):
    """What differs from worker to worker.

    Attributes:
      inner: state of the optimizer.
      master: float32 copies of parameters of lower precision, in order.
      weight: of push-sum.
    """

    inner: Any
    master: tuple[jax.Array, ...]
    weight: Any = ()


def begin(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Own]:
    """Returns parameters in full precision, and what a worker has at first.

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
    found = [next(copies) if _low(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, found)


def lowered(precise: Any, params: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns what `full` has made in the dtypes of `params`, and the copies."""
    pairs = zip(jax.tree.leaves(precise), jax.tree.leaves(params), strict=True)
    copies = tuple(made for made, given in pairs if _low(given))
    cast = jax.tree.map(lambda made, given: made.astype(given.dtype), precise, params)
    return cast, copies


def _low(leaf: Any) -> bool:
    return leaf.dtype != statistics_dtype(leaf.dtype)


def local_update(
    tx: optax.GradientTransformation, grads: Any, inner: Any, precise: Any
) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after a worker's own update."""
    updates, inner = tx.update(raise_precision(grads), inner, precise)
    return optax.apply_updates(precise, updates), inner


def averaging(
    tx: optax.GradientTransformation,
    exchange: ModelExchange,
    *,
    order: Order = "update_then_average",
    average_state: tuple[str, ...] = (),
    trace: Callable[[], Any] | None = None,
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
    return Averaging(worker.init, worker.step, worker.finish, trace)


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
        self._enter, self._leave = jax.jit(full), jax.jit(lowered)
        self._update = jax.jit(lambda *given: local_update(tx, *given))
        self._pack = jax.jit(self._packed)
        self._unpack = jax.jit(self._unpacked)

    def init(self, params: Any) -> AveragingState:
        precise, own = begin(self._tx, params)
        axis = self._exchange.axis
        check_real(self._slots(own.inner))
        vector = self._pack(precise, own.inner)
        settings = {"order": self._order, "average_state": list(self._names)}
        given = vector if axis else np.asarray(vector)
        self._exchange.start(given, params, **settings)
        start = 0 if axis is None else jnp.zeros((), jnp.int32)
        return AveragingState(start, wrap(own, axis))

    def step(
        self, grads: Any, state: AveragingState, params: Any
    ) -> tuple[Any, AveragingState]:
        own, now = unwrap(state.own), state.step
        precise, inner = self._enter(params, own.master), own.inner
        if self._order == "average_gradients":
            mean = self._average(now, flat(grads))
            grads = like(mean, raise_precision(grads))
        if self._order == "average_then_update":
            precise, inner = self._average_models(now, precise, inner)
        precise, inner = self._update(grads, inner, precise)
        if self._order == "update_then_average":
            precise, inner = self._average_models(now, precise, inner)
        params, master = self._leave(precise, params)
        own = own._replace(inner=inner, master=master)
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

    def _average(self, step: Any, vector: jax.Array) -> jax.Array:
        axis = self._exchange.axis
        if axis is None:
            return jnp.asarray(self._exchange.average(step, np.asarray(vector)))
        return vary(self._exchange.average(step, vector), axis)

    def _average_models(self, step: Any, precise: Any, inner: Any) -> tuple[Any, Any]:
        mean = self._average(step, self._pack(precise, inner))
        return self._unpack(mean, precise, inner)


def host_exchange(
    transport: Transport, kind: str, average: Callable[[Any, Any], Any], **settings: Any
) -> ModelExchange:
    """Returns an exchange between hosts that compare how they begin and end together.

    Args:
      transport: ours.
      kind: of the messages; a new one.
      average: as of `ModelExchange`.
      settings: what must be the same in all workers.
    """
    return ModelExchange(
        lambda *given, **more: agree(transport, *given, **settings, **more),
        average,
        lambda: barrier(transport, tag=Tag(f"{kind} end")),
    )


def mesh_exchange(axis: str, average: Callable[[Any, Any], Any]) -> ModelExchange:
    """Returns an exchange over a mesh axis, for use inside `shard_map`."""
    return ModelExchange(lambda *_, **__: None, average, lambda: None, axis)


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
