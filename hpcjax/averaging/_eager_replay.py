"""A run of eager SGD repeated on a mesh from its trace, with ordinary sums.

On hosts every worker has a clock of its own. A mesh has none: all devices take part in
round r = 0, 1, ... T in turn, by one `psum`. So a device does between two rounds what
its worker did between them, which the trace tells: which gradients are in a round
(`contributed`), and after which step the results of which rounds were applied
(`applied`). Nothing else of a run matters for its numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging._eager import update_by_mean
from hpcjax.averaging.vectors import flat, like
from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.hostcomm import PartialTrace


def repeat_rounds(
    trace: PartialTrace,
    params: optax.Params,
    tx: optax.GradientTransformation,
    gradient: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    *,
    axis_name: str,
) -> tuple[optax.Params, jax.Array]:
    """Repeats a run of `eager_sgd`; arguments and results are those of `replay`.

    Every round is one `psum`; before it a device computes the gradients whose steps the
    trace puts into that round, at the parameters that its worker had then.
    """
    size = jax.lax.axis_size(axis_name)
    checks.require(size == trace.size, f"the axis has {size} devices", P=trace.size)
    plan = plan_rounds(trace)
    own = jax.lax.axis_index(axis_name)
    replay = Replay(
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

    def take_round(carry, number):
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
    start = Worker(
        params, tx.init(params), jnp.zeros(count), jnp.zeros(trace.steps), zero, zero
    )
    carry = vary(start, axis_name), jnp.zeros((plan.ring, count))
    (worker, results), _ = jax.lax.scan(take_round, carry, jnp.arange(trace.steps + 1))
    worker = replay.apply(worker, results, trace.steps + 1)
    return worker.params, worker.values


class Worker(NamedTuple):
    """The state of a worker in a replay; differs from device to device.

    Attributes:
      params: its parameters.
      inner: state of its optimizer.
      pending: sum of its gradients that are in no round yet, float32 [n].
      values: what `gradient` returned besides gradients, by step, `[T]`.
      step: number of the next step.
      row: the next row of `PartialTrace.applied`; row t follows step t.
    """

    params: Any
    inner: Any
    pending: jax.Array
    values: jax.Array
    step: jax.Array
    row: jax.Array


class Replay(NamedTuple):
    """What one device does in a replay: the same as its worker, without waiting.

    Attributes:
      tx: makes updates of mean gradients.
      gradient: `gradient(params, step)`, see `replay`.
      axis: name of the mesh axis.
      applied: this worker's part of `PartialTrace.applied`, int32 [T + 1, 2].
      ring: number of round results that are kept; round r is in place r mod ring.
      accumulate: whether gradients that missed a round are added to later ones.
    """

    tx: optax.GradientTransformation
    gradient: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    axis: str
    applied: jax.Array
    ring: int
    accumulate: bool

    def apply(
        self, worker: Worker, results: jax.Array, until: Any, summed: Any = None
    ) -> Worker:
        """Makes the updates that followed the steps before `until`.

        Args:
          worker: of this device.
          results: sums of the last rounds, [ring, n].
          until: number of a step.
          summed: number of rounds that were summed so far; updates that need later ones
            are left for another call. None: all that are needed are there.
        """

        def update(number, state):
            mean = results[number % self.ring] / jax.lax.axis_size(self.axis)
            return vary(update_by_mean(self.tx, mean, *state), self.axis)

        def row(worker):
            first, end = self.applied[worker.row]
            state = worker.params, worker.inner
            params, inner = jax.lax.fori_loop(first, end, update, state)
            return worker._replace(params=params, inner=inner, row=worker.row + 1)

        def due(worker):
            known = True if summed is None else self.applied[worker.row, 1] <= summed
            return (worker.row < until) & known

        return jax.lax.while_loop(due, row, worker)

    def compute(self, worker: Worker, results: jax.Array, until: Any) -> Worker:
        """Computes the gradients of the steps before `until`."""

        def one(worker):
            step = worker.step
            worker = self.apply(worker, results, step)
            # Kept apart from the code around it: XLA may compute the same expression to
            # other last bits where it is fused with something else.
            at = jax.lax.optimization_barrier((worker.params, step))
            value, grads = jax.lax.optimization_barrier(self.gradient(*at))
            kept = worker.pending if self.accumulate else 0.0
            worker = worker._replace(
                pending=kept + flat(grads),
                values=worker.values.at[step].set(value),
                step=step + 1,
            )
            return vary(worker, self.axis)

        return jax.lax.while_loop(lambda worker: worker.step < until, one, worker)

    def average(self, worker: Worker, results: jax.Array, until: Any) -> Worker:
        """Completes the steps before `until`, then averages parameters."""
        worker = self.compute(worker, results, until)
        worker = self.apply(worker, results, until)
        total = jax.lax.psum(flat(worker.params), self.axis)
        mean = like(total / jax.lax.axis_size(self.axis), worker.params)
        return worker._replace(params=vary(mean, self.axis))


class Rounds(NamedTuple):
    """The order of a replay, known before it is compiled.

    Attributes:
      computed: number of steps that each worker must have computed before a round is
        summed, int32 [T + 1, P].
      averaged: whether parameters are averaged after a round, [T + 1].
      ring: number of round results that must be kept.
    """

    computed: np.ndarray
    averaged: np.ndarray
    ring: int


def plan_rounds(trace: PartialTrace) -> Rounds:
    """Returns the order in which a mesh repeats a run.

    Raises:
      ConfigError: a worker applied the result of a round before it was summed.
    """
    steps, rounds = trace.steps, np.arange(trace.steps + 1)
    # taken[t, p]: the round before which worker p must have computed step t, which is
    # the round whose sum has its gradient; a dropped gradient (-1) is in none. Steps
    # are computed in order, so step t comes no later than any step after it: hence the
    # minimum from the end.
    taken = np.where(trace.contributed < 0, steps, trace.contributed)
    taken = np.minimum.accumulate(taken[::-1])[::-1]
    computed = np.sum(taken[None] <= rounds[:, None, None], axis=1)
    every = trace.sync_models_every
    averaged = (rounds + 1) % every == 0 if every else np.zeros(steps + 1, bool)
    averaged[-1] = False  # round T follows the last step, where nobody averages
    # summed[t, p]: how many rounds have been summed when worker p makes the updates
    # that follow step t. It makes them just before it computes step t + 1, in round
    # taken[t + 1], when exactly the rounds before that one have been summed; or before
    # the next average, if that comes first; those after the last step, at the end.
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
    # The oldest result that an update needs, counted back from the newest one.
    ring = np.max(np.where(first < end, summed - first, 1))
    return Rounds(computed.astype(np.int32), averaged, int(ring))
