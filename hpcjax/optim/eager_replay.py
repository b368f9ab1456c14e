"""A run of eager SGD repeated on a mesh from its trace, with ordinary sums."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.hostcomm import PartialTrace
from hpcjax.optim.eager import update_by_mean
from hpcjax.optim.flat_model import flat, like


def eager_sgd_replay(
    trace: PartialTrace,
    params: optax.Params,
    tx: optax.GradientTransformation,
    gradient: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    *,
    axis_name: str,
) -> tuple[optax.Params, jax.Array]:
    """Repeats a run of `eager_sgd` on a mesh, worker by worker, with ordinary sums.

    For use inside `jax.shard_map`, over an axis with a device for each worker. Every
    round is one `psum`; before it a device computes the gradients whose steps the trace
    puts into that round, at the parameters that its worker had then. It says how
    training converges and nothing of its time.

    Args:
      trace: of all workers, recorded or simulated.
      params: at the start, the same on all devices.
      tx: as of the run.
      gradient: `gradient(params, step)` returns any number, such as the loss, and the
        gradients of this device's worker.
      axis_name: the mesh axis.

    Returns:
      This device's parameters at the end, and the numbers of each step, `[T]`.

    Raises:
      ConfigError: the axis has another size than the trace, or the trace cannot be: a
        worker has applied what was not there yet.
    """
    size = jax.lax.axis_size(axis_name)
    checks.require(size == trace.size, f"the axis has {size} devices", P=trace.size)
    plan = _plan(trace)
    own = jax.lax.axis_index(axis_name)
    replay = _Replay(
        tx,
        gradient,
        axis_name,
        jnp.asarray(trace.applied)[:, own],
        plan.ring,
        trace.stale == "accumulate",
    )
    computed = jnp.asarray(plan.computed)[:, own]
    averaged = jnp.asarray(plan.averaged)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))

    def round_of(carry, number):
        worker, results = carry
        worker = replay.compute(worker, results, computed[number])
        total = jax.lax.psum(worker.pending, axis_name)
        results = results.at[number % plan.ring].set(total)
        worker = worker._replace(pending=vary(jnp.zeros(count), axis_name))
        if trace.sync_models_every:
            worker = jax.lax.cond(
                averaged[number],
                lambda worker: replay.average(worker, results, number + 1),
                lambda worker: worker,
                worker,
            )
        return (worker, results), None

    zero = jnp.zeros((), jnp.int32)
    start = _Worker(
        params, tx.init(params), jnp.zeros(count), jnp.zeros(trace.steps), zero, zero
    )
    carry = vary(start, axis_name), jnp.zeros((plan.ring, count))
    (worker, results), _ = jax.lax.scan(round_of, carry, jnp.arange(trace.steps + 1))
    worker = replay.apply(worker, results, trace.steps + 1)
    return worker.params, worker.values


class _Worker(NamedTuple):
    """What a device has in a replay; differs from device to device.

    Attributes:
      params: its parameters.
      inner: state of its optimizer.
      pending: sum of its gradients that no round has taken yet, float32.
      values: what `gradient` has returned besides, by step.
      step: the next one.
      row: the next row of `PartialTrace.applied`.
    """

    params: Any
    inner: Any
    pending: jax.Array
    values: jax.Array
    step: jax.Array
    row: jax.Array


class _Replay(NamedTuple):
    """What a device does: like its worker, but for the waiting.

    Attributes:
      tx: makes updates of mean gradients.
      gradient: as of `eager_sgd_replay`.
      axis: the mesh axis.
      applied: this worker's rows of `PartialTrace.applied`.
      ring: how many results are kept.
      accumulate: whether late gradients are added up.
    """

    tx: optax.GradientTransformation
    gradient: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    axis: str
    applied: jax.Array
    ring: int
    accumulate: bool

    def apply(self, worker: _Worker, results: jax.Array, until: Any) -> _Worker:
        """Makes the updates that followed the steps before `until`."""

        def update(number, state):
            mean = results[number % self.ring] / jax.lax.axis_size(self.axis)
            return vary(update_by_mean(self.tx, mean, *state), self.axis)

        def row(worker):
            first, end = self.applied[worker.row]
            state = worker.params, worker.inner
            params, inner = jax.lax.fori_loop(first, end, update, state)
            return worker._replace(params=params, inner=inner, row=worker.row + 1)

        return jax.lax.while_loop(lambda worker: worker.row < until, row, worker)

    def compute(self, worker: _Worker, results: jax.Array, until: Any) -> _Worker:
        """Computes the gradients of the steps before `until`."""

        def one(worker):
            step = worker.step
            worker = self.apply(worker, results, step)
            # By itself, as `update_by_mean` is.
            given = jax.lax.optimization_barrier((worker.params, step))
            value, grads = jax.lax.optimization_barrier(self.gradient(*given))
            kept = worker.pending if self.accumulate else 0.0
            worker = worker._replace(
                pending=kept + flat(grads),
                values=worker.values.at[step].set(value),
                step=step + 1,
            )
            return vary(worker, self.axis)

        return jax.lax.while_loop(lambda worker: worker.step < until, one, worker)

    def average(self, worker: _Worker, results: jax.Array, until: Any) -> _Worker:
        """Does what is left of the steps before `until`, then averages parameters."""
        worker = self.compute(worker, results, until)
        worker = self.apply(worker, results, until)
        total = jax.lax.psum(flat(worker.params), self.axis)
        mean = like(total / jax.lax.axis_size(self.axis), worker.params)
        return worker._replace(params=vary(mean, self.axis))


class _Plan(NamedTuple):
    """What a replay does when; of numbers that are known beforehand.

    Attributes:
      computed: how many steps a worker has computed when a round is summed, `[T+1, P]`.
      averaged: whether parameters are averaged after a round, `[T+1]`.
      ring: how many results must be kept.
    """

    computed: np.ndarray
    averaged: np.ndarray
    ring: int


def _plan(trace: PartialTrace) -> _Plan:
    steps, rounds = trace.steps, np.arange(trace.steps + 1)
    # A dropped gradient is computed with the one that has replaced it.
    taken = np.where(trace.contributed < 0, steps, trace.contributed)
    taken = np.minimum.accumulate(taken[::-1])[::-1]
    computed = np.sum(taken[None] <= rounds[:, None, None], axis=1)
    every = trace.sync_models_every
    averaged = (rounds + 1) % every == 0 if every else np.zeros(steps + 1, bool)
    averaged[-1] = False  # of the last round, which follows the last step
    # Updates after a step are made when the next step's gradient is computed, or before
    # an average: so many rounds have been summed by then.
    summed = np.vstack([taken[1:], np.full((2, trace.size), steps + 1)])
    if every:
        before = (rounds // every + 1) * every
        summed = np.minimum(summed, np.minimum(before, steps + 1)[:, None])
    first, end = trace.applied[..., 0], trace.applied[..., 1]
    checks.require(
        bool(np.all((end <= summed) | (first == end))),
        "a trace must not apply a result before its round is summed",
        steps=steps,
    )
    ring = np.max(np.where(first < end, summed - first, 1))
    return _Plan(computed.astype(np.int32), averaged, int(ring))
