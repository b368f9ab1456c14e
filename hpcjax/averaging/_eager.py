"""SGD with partial sums of gradients, for loops on the host.

"Taming Unbalanced Training Workloads in Deep Learning with Partial Collective
Operations", Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, PPoPP 2020.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging.vectors import flat, like, require_same_start
from hpcjax.averaging.workers import Averaging, AveragingState, Own
from hpcjax.core import checks
from hpcjax.hostcomm import (
    PartialAllreduce,
    PartialTrace,
    RoundResult,
    Tag,
    Transport,
    allreduce,
)
from hpcjax.hostcomm.partial import Mode
from hpcjax.optim.full_precision import check_real


def eager_sgd(
    transport: Transport,
    tx: optax.GradientTransformation,
    *,
    mode: Mode = "majority",
    limiter: int = 32,
    missed: Literal["apply_all", "newest"] = "apply_all",
    stale: Literal["accumulate", "drop"] = "accumulate",
    ring: int | None = None,
    seed: int = 0,
    sync_models_every: int = 0,
) -> Averaging:
    """Returns a worker whose gradients are the partial sums over all workers.

    Each result of a round is an update of its own, w <- tx(w, R / P): the divisor is
    always the number of workers, whoever has contributed. A late worker makes several
    updates in one step, others maybe none. Gradients are copied to the host, and summed
    there in float32. `finish` makes the updates that are left, after which all workers
    have the same parameters.

    Args:
      transport: ours.
      tx: makes updates of mean gradients; the same in all workers.
      mode: who starts a round; this and the next five as of
        `hostcomm.PartialAllreduce`.
      limiter: after so many partial rounds all wait for one; 0: never.
      missed: what a late worker applies.
      stale: what becomes of gradients that were in no round yet.
      ring: how many results a late worker may miss.
      seed: of the initiators that "majority" draws.
      sync_models_every: after so many steps all wait for each other and take the mean
        of their parameters, not of the state of `tx`; 0: never. Needed where late
        workers take only the newest result, without which their parameters drift.

    Raises:
      ConfigError: settings that cannot be; by `start`: workers begin with different
        parameters or settings; by `step`: gradients of other shapes.
      TypeError: parameters that are not real floating arrays (by `init`).

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = eager_sgd(connected(1)[0], optax.sgd(0.1), mode="solo")
      >>> params = {"w": jnp.ones(2)}
      >>> params, state = worker.step({"w": jnp.ones(2)}, worker.init(params), params)
      >>> params, state = worker.finish(state, params)
      >>> params["w"].tolist()
      [0.8999999761581421, 0.8999999761581421]
    """
    checks.require_count(0, sync_models_every=sync_models_every)
    if missed == "newest" and not sync_models_every:
        warnings.warn(
            "late workers that take only the newest result drift apart: "
            "give sync_models_every, or use missed='apply_all'",
            stacklevel=2,
        )
    settings = {
        "mode": mode, "limiter": limiter, "missed": missed, "stale": stale,
        "ring": ring, "seed": seed,
    }  # fmt: skip
    worker = _Worker(transport, tx, settings, sync_models_every)
    return Averaging(
        worker.begin, worker.start, worker.step, worker.finish, worker.trace
    )


class _Worker:
    """The functions of `eager_sgd`, and the sums of the present run."""

    def __init__(
        self,
        transport: Transport,
        tx: optax.GradientTransformation,
        settings: dict[str, Any],
        sync_models_every: int,
    ) -> None:
        self._transport, self._tx, self._settings = transport, tx, settings
        self._every, self._first = sync_models_every, 0
        self._partial: PartialAllreduce | None = None
        self._flatten = jax.jit(_flatten)
        size = transport.size
        self._update = jax.jit(
            lambda total, params, inner: update_by_mean(tx, total / size, params, inner)
        )

    def begin(self, params: Any) -> AveragingState:
        check_real(params)
        return AveragingState(0, Own(self._tx.init(params), ()))

    def start(self, state: AveragingState, params: Any) -> None:
        self._first = int(state.step)
        vector = np.asarray(flat(params))
        every = {"sync_models_every": self._every}
        require_same_start(self._transport, self._first, vector, params, **every)
        self._partial = PartialAllreduce(
            self._transport, vector.size, first=self._first, **self._settings
        )

    def step(
        self, grads: Any, state: AveragingState, params: Any, **extras: Any
    ) -> tuple[Any, AveragingState]:
        del extras  # of one step alone; a result is of several
        partial, number = self._started(), int(state.step) - self._first
        partial.post(number, np.asarray(self._flatten(grads, params)))
        params, inner = self._apply(partial.result(number), state.own.inner, params)
        done = state.step + 1
        if self._every and done % self._every == 0:
            mine, tag = np.asarray(flat(params)), Tag("models", int(done))
            total = allreduce(self._transport, mine, tag=tag)
            params = like(jnp.asarray(total) / self._transport.size, params)
        return params, AveragingState(done, Own(inner, ()))

    def finish(self, state: AveragingState, params: Any) -> tuple[Any, AveragingState]:
        results = self._started().finish()
        params, inner = self._apply(results, state.own.inner, params)
        return params, AveragingState(state.step, Own(inner, ()))

    def trace(self) -> PartialTrace | None:
        if self._partial is None:
            return None
        return self._partial.trace()._replace(sync_models_every=self._every)

    def _apply(
        self, results: Sequence[RoundResult], inner: Any, params: Any
    ) -> tuple[Any, Any]:
        for result in results:
            params, inner = self._update(result.total, params, inner)
        return params, inner

    def _started(self) -> PartialAllreduce:
        checks.require(self._partial is not None, "`init` comes first", sums=None)
        return self._partial  # pyrefly: ignore[bad-return]


def _flatten(grads: Any, params: Any) -> jax.Array:
    jax.tree.map(_require_shape, params, grads)
    return flat(grads)


def _require_shape(param: jax.Array, grad: jax.Array) -> None:
    rule = f"gradients must be of the parameters' shapes, here {param.shape}"
    checks.require(param.shape == grad.shape, rule, shape=grad.shape)


def update_by_mean(
    tx: optax.GradientTransformation, mean: jax.Array, params: Any, inner: Any
) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after one update.

    Compiled by itself: what it is fused with would change its last bits.
    """
    mean, params, inner = jax.lax.optimization_barrier((mean, params, inner))
    updates, inner = tx.update(like(mean, params), inner, params)
    return jax.lax.optimization_barrier((optax.apply_updates(params, updates), inner))
