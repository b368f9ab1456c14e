"""Eager SGD in the training loop: rounds of sums in which some workers are late.

A step of the loop is one round. A worker that is late has no gradient in it, and brings
the gradients of several steps to a later one; it takes their examples from a ring of
batches. Who is late when is given, as the trace of a run or of the event model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging._eager_replay import Replay, Worker, plan_rounds
from hpcjax.averaging.vectors import like
from hpcjax.core import checks
from hpcjax.core.method import (
    WORKER_AXIS,
    Method,
    Optimization,
    PassResult,
    RunShape,
    StepInput,
)
from hpcjax.core.per_device import PerDevice, unwrap
from hpcjax.core.scored import count_scored, share_out
from hpcjax.core.varying import vary
from hpcjax.hostcomm import PartialTrace
from hpcjax.optim.full_precision import check_real
from hpcjax.optim.methods import whole_backward


class EagerRounds(NamedTuple):
    """What training by rounds has besides parameters.

    Attributes:
      worker: what a worker has, without its parameters; `PerDevice`.
      results: sums of the last rounds, [ring, n] float32; the same for all.
      batches: a worker's last batches, by name [ring, rows, ...]; `PerDevice`.
    """

    worker: Any
    results: jax.Array
    batches: Any


def eager_rounds(
    trace: PartialTrace, optimizer: Optimization, setup: RunShape
) -> Method:
    """Returns the method by which workers train as those of a trace did.

    In round r a worker computes the gradients whose steps the trace puts into r, each
    at the parameters that it had then and on the batch of that step. The sum over
    workers of what is pending is the round's result, of which each makes its updates
    after the step that the trace says. Running statistics of a model are not taken. If
    the loop leaves a round out as not finite, its steps are made up for in the next,
    on batches that were there before.

    Args:
      trace: of all workers, of more steps than the run has rounds: of its last rounds,
        which tell what is left to do at the end, nothing is repeated.
      optimizer: a transform of mean gradients without a backward pass of its own.
      setup: of workers with one device each.

    Raises:
      ConfigError: the trace is of other workers, or too short.
    """
    _check(trace, setup)
    plan = plan_rounds(trace)
    depth = _reach(plan.computed) + 1
    tx = optax.with_extra_args_support(optimizer.tx)

    def init(params: Any) -> tuple[Any, EagerRounds]:
        check_real(params)
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        zero = jnp.zeros((), jnp.int32)
        values = jnp.zeros(trace.steps)
        own = Worker((), tx.init(params), jnp.zeros(count), values, zero, zero)
        rows = jax.tree.map(
            lambda each: jnp.zeros((depth, *each.shape), each.dtype), dict(setup.batch)
        )
        state = EagerRounds(_own(own), jnp.zeros((plan.ring, count)), _own(rows))
        return _own(params), state

    def gradients(one_pass: StepInput, params: Any, state: EagerRounds) -> PassResult:
        number, bare = one_pass.step, unwrap(params)
        rule = "eager SGD repeats gradients alone: the model must have no statistics"
        checks.require(not jax.tree.leaves(one_pass.model_state), rule, norm="batch")
        batches = jax.tree.map(
            lambda ring, rows: ring.at[number % depth].set(rows),
            unwrap(state.batches),
            dict(one_pass.batch),
        )
        here = jax.lax.axis_index(WORKER_AXIS)

        def gradient(params: Any, step: Any) -> tuple[Any, Any]:
            rows = jax.tree.map(lambda ring: ring[step % depth], batches)
            count = count_scored(
                one_pass.model, one_pass.objective, params, one_pass.model_state, rows
            )
            each = one_pass._replace(batch=rows, axes=(), share=share_out(count, ()))
            found = whole_backward(each, params, None)
            return found.means["loss"], found.grads

        applied = jnp.asarray(trace.applied)[:, here]
        replay = Replay(
            tx, gradient, WORKER_AXIS, applied, plan.ring, trace.stale == "accumulate"
        )
        own = vary(unwrap(state.worker)._replace(params=bare), WORKER_AXIS)
        until = jnp.asarray(plan.computed)[number, here]
        own = replay.compute(own, state.results, until)
        total = jax.lax.psum(own.pending, WORKER_AXIS)
        results = state.results.at[number % plan.ring].set(total)
        # Of the newest step of each worker that has taken one; somebody always has, who
        # began the first round.
        newest = own.values[jnp.maximum(own.step - 1, 0)], own.step > 0
        loss, known = jax.lax.psum(newest, WORKER_AXIS)
        kept = own._replace(pending=jnp.zeros_like(own.pending))
        kept = replay.apply(kept, results, kept.step, summed=number + 1)
        new = EagerRounds(_own(kept._replace(params=())), results, _own(batches))
        grads, made = like(own.pending, bare), {"made": (kept.params, new)}
        return PassResult(grads, {"loss": loss / known}, one_pass.model_state, made)

    def update(found: PassResult, state: Any, params: Any) -> tuple[Any, EagerRounds]:
        del state, params
        new, state = found.extras["made"]
        return _own(new), state

    return Method(lambda devices: {WORKER_AXIS: devices}, init, gradients, update)


def _check(trace: PartialTrace, setup: RunShape) -> None:
    rule = f"the run has {setup.workers} workers"
    checks.require(trace.size == setup.workers, rule, P=trace.size)
    rule = "eager SGD has a worker on each device: give averaging.workers none"
    checks.require(setup.devices == 1, rule, devices_of_a_worker=setup.devices)
    rule = f"the trace must be longer than the run's {setup.steps} steps"
    checks.require(trace.steps > setup.steps, rule, steps=trace.steps)


def _reach(computed: np.ndarray) -> int:
    """Returns by how many steps the oldest one is behind the round that takes it.

    After round r a worker has computed `computed[r]` steps; the first that round r can
    take is `computed[r - 1]`.
    """
    before = np.vstack([np.zeros_like(computed[:1]), computed[:-1]])
    return int(np.max(np.arange(len(computed))[:, None] - before))


def _own(value: Any) -> PerDevice:
    # Another number of workers is another trace.
    return PerDevice(value=vary(value, WORKER_AXIS), axis=WORKER_AXIS, resize="refuse")
