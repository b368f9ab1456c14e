"""SGD with partial sums of gradients, for loops on the host.

"Taming Unbalanced Training Workloads in Deep Learning with Partial Collective
Operations", Li, Ben-Nun, Di Girolamo, Alistarh, Hoefler, PPoPP 2020.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks
from hpcjax.hostcomm import PartialAllreduce, PartialTrace, Tag, allreduce
from hpcjax.optim.flat_model import agree, flat, like
from hpcjax.optim.full_precision import check_real


class EagerState(NamedTuple):
    """What a worker has besides its parameters.

    Attributes:
      step: the next one of this `partial`.
      inner: state of the optimizer.
    """

    step: int
    inner: optax.OptState


class EagerSgd(NamedTuple):
    """One worker's optimizer, for a loop on the host.

    Attributes:
      init: `init(params)` returns the state; all workers call it with the same
        parameters.
      step: `step(grads, state, params)` posts this worker's gradients, waits unless it
        is late and returns `(params, state)` after all updates that are due, of which
        there may be none.
      finish: `finish(state, params)` waits for all, once, after the last step. What it
        returns can be saved, and goes on with another `partial`; what a worker has in
        between others may not have yet.
      trace: what this worker has done, for `eager_sgd_replay`.
    """

    init: Callable[[optax.Params], EagerState]
    step: Callable[
        [optax.Updates, EagerState, optax.Params], tuple[optax.Params, EagerState]
    ]
    finish: Callable[[EagerState, optax.Params], tuple[optax.Params, EagerState]]
    trace: Callable[[], PartialTrace]


def eager_sgd(
    partial: PartialAllreduce,
    tx: optax.GradientTransformation,
    *,
    sync_models_every: int = 0,
) -> EagerSgd:
    """Returns an optimizer whose gradients are the partial sums over all workers.

    Each result of a round is an update of its own, w <- tx(w, R / P): the divisor is
    always the number of workers, whoever has contributed. Gradients are copied to the
    host, and summed there in float32.

    Args:
      partial: sums vectors of as many numbers as there are parameters.
      tx: makes updates of mean gradients; the same in all workers.
      sync_models_every: after so many steps all wait for each other and take the mean
        of their parameters, not of the state of `tx`; 0: never. Needed where late
        workers take only the newest result, without which their parameters drift.

    Raises:
      ConfigError: `partial` is of another size than the parameters, or workers begin
        with different ones or differ in `sync_models_every` (by `init`); gradients of
        other shapes (by `step`).
      TypeError: parameters that are not real floating arrays (by `init`).

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> partial = PartialAllreduce(connected(1)[0], 2, mode="solo")
      >>> worker = eager_sgd(partial, optax.sgd(0.1))
      >>> params = {"w": jnp.ones(2)}
      >>> params, state = worker.step({"w": jnp.ones(2)}, worker.init(params), params)
      >>> params, state = worker.finish(state, params)
      >>> params["w"].tolist()
      [0.8999999761581421, 0.8999999761581421]
    """
    checks.require_count(0, sync_models_every=sync_models_every)
    if partial.missed == "newest" and not sync_models_every:
        warnings.warn(
            "late workers that take only the newest result drift apart: "
            "give sync_models_every, or use missed='apply_all'",
            stacklevel=2,
        )
    size = partial.transport.size

    @jax.jit
    def flatten(grads, params):
        jax.tree.map(_require_shape, params, grads)
        return flat(grads)

    update = jax.jit(
        lambda total, params, inner: update_by_mean(tx, total / size, params, inner)
    )

    def init(params):
        check_real(params)
        found = int(sum(leaf.size for leaf in jax.tree.leaves(params)))
        rule = f"partial must be of the size of the parameters, {found}"
        checks.require(partial.size == found, rule, size=partial.size)
        every = {"sync_models_every": sync_models_every}
        agree(partial.transport, flat(params), params, **every)
        return EagerState(0, tx.init(params))

    def apply_all(results, inner, params):
        for result in results:
            params, inner = update(result.total, params, inner)
        return params, inner

    def step(grads, state, params):
        partial.post(state.step, np.asarray(flatten(grads, params)))
        results = partial.result(state.step)
        params, inner = apply_all(results, state.inner, params)
        state = EagerState(state.step + 1, inner)
        if sync_models_every and state.step % sync_models_every == 0:
            mine, tag = np.asarray(flatten(params, params)), Tag("models", state.step)
            total = allreduce(partial.transport, mine, tag=tag)
            params = like(jnp.asarray(total) / size, params)
        return params, state

    def finish(state, params):
        params, inner = apply_all(partial.finish(), state.inner, params)
        return params, EagerState(0, inner)

    def trace():
        return partial.trace()._replace(sync_models_every=sync_models_every)

    return EagerSgd(init, step, finish, trace)


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
