"""Averaging workers in processes of their own, as a training method."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging.workers import Averaging
from hpcjax.core.method import DATA_AXIS, Around, Method, PassResult
from hpcjax.hostcomm import Tag, Trace, Transport, allreduce
from hpcjax.optim.methods import whole_backward


class LeaveOutState(NamedTuple):
    """State of `leave_out_nonfinite`.

    Attributes:
      inner: state of the optimizer.
      metrics: "left_out", how many updates were, which a run's records keep.
    """

    inner: Any
    metrics: dict[str, jax.Array]


def leave_out_nonfinite(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer without the updates that spoil something.

    Parameters and state stay as they are if a gradient or an updated parameter is not
    finite, or a finite number of the state would become so: what a worker has is sent
    to the others.
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> LeaveOutState:
        return LeaveOutState(tx.init(params), {"left_out": jnp.zeros((), jnp.int32)})

    def update(updates, state, params=None, **extras):
        made, inner = tx.update(updates, state.inner, params, **extras)
        moved = made if params is None else optax.apply_updates(params, made)
        new = jax.tree.leaves((updates, moved))
        pairs = zip(*map(jax.tree.leaves, (state.inner, inner)), strict=True)
        lost = [~jnp.isfinite(each) for each in new]
        lost += [
            jnp.isfinite(before) & ~jnp.isfinite(after)
            for before, after in pairs
            if jnp.issubdtype(after.dtype, jnp.inexact)
        ]
        bad = jnp.stack([jnp.any(each) for each in lost]).any()
        made, inner = jax.tree.map(
            lambda old, new: jnp.where(bad, old, new),
            (jax.tree.map(jnp.zeros_like, made), state.inner),
            (made, inner),
        )
        count = state.metrics["left_out"] + bad.astype(jnp.int32)
        return made, LeaveOutState(inner, {"left_out": count})

    return optax.GradientTransformationExtraArgs(init, update)


def train_on_hosts(
    worker: Averaging,
    transport: Transport,
    *,
    delays: Sequence[float] = (),
) -> Method:
    """Returns the method by which this process trains, as one of several workers.

    Nobody waits for the others longer than `worker` does. A gradient that is not finite
    is for the worker's own optimizer to leave out, see `leave_out_nonfinite`.

    Args:
      worker: made for `transport`.
      transport: ours.
      delays: seconds that this worker sleeps in each step, before its update.
    """
    kind, traces = transport.new_kind("agree"), list[tuple[int, Trace]]()

    def update(found: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        number = int(state.step)
        if number < len(delays):
            time.sleep(delays[number])
        return worker.step(found.grads, state, params, **found.extras)

    def start(state: Any, batches: Any) -> Any:
        del batches
        worker.start(state.opt_state, state.params)
        return state

    def pause(state: Any) -> Any:
        params, own = worker.finish(state.opt_state, state.params)
        trace = worker.trace()
        if trace is not None:
            traces.append((int(state.opt_state.step) - trace.steps, trace))
        return dataclasses.replace(state, params=params, opt_state=own)

    def least(number: int) -> int:
        own = np.array([number])
        found = allreduce(transport, own, operation=np.minimum, tag=Tag(kind))
        return int(found[0])

    return Method(
        lambda devices: {DATA_AXIS: devices},
        lambda params: (params, worker.begin(params)),
        whole_backward,
        update,
        around=Around(
            traced=False,
            start=start,
            pause=pause,
            rank=transport.rank,
            size=transport.size,
            least=least,
            traces=traces,
        ),
    )
