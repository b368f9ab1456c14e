"""A run of workers that did not wait, repeated on a mesh from its trace."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hpcjax.averaging._eager_replay import repeat_rounds
from hpcjax.averaging._wagma import wagma
from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.hostcomm import GroupTrace, PartialTrace, Trace

Gradient = Callable[[Any, jax.Array], tuple[jax.Array, Any]]


def replay(
    trace: Trace,
    params: optax.Params,
    tx: optax.GradientTransformation,
    gradient: Gradient,
    *,
    axis_name: str,
    **options: Any,
) -> tuple[optax.Params, jax.Array]:
    """Repeats a run of `eager_sgd` or `wagma` on a mesh, worker by worker.

    For use inside `jax.shard_map`, over an axis with a device for each worker. Who was
    late when is as the trace says; nobody is by itself. It shows how training
    converges, and nothing of its time.

    Args:
      trace: of all workers, recorded or simulated.
      params: at the start, the same on all devices.
      tx: as of the run.
      gradient: `gradient(params, step)` returns any number, such as the loss, and the
        gradients of this device's worker.
      axis_name: the mesh axis.
      **options: of `wagma`: `late_rule`, `order` and `average_state`, as of the run.

    Returns:
      This device's parameters at the end, and the numbers of each step, `[T]`.

    Raises:
      ConfigError: the axis has another size than the trace, or the trace cannot be: a
        worker has used what was not there yet.
      TypeError: parameters of integers, with their paths.
    """
    if isinstance(trace, PartialTrace):
        checks.require(not options, "options are of wagma", options=sorted(options))
        return repeat_rounds(trace, params, tx, gradient, axis_name=axis_name)
    worker = _worker_of(trace, axis_name, tx, **options)

    def one(carry, step):
        params, state = carry
        value, grads = gradient(params, step)
        params, state = worker.step(grads, state, params)
        return (params, state), vary(value, axis_name)

    state = worker.begin(params)
    params, own = vary((params, state.own), axis_name)
    carry = params, state._replace(own=own)
    (params, _), values = jax.lax.scan(one, carry, jnp.arange(trace.steps))
    return params, values


def _worker_of(
    trace: GroupTrace, axis_name: str, tx: optax.GradientTransformation, **options: Any
) -> Any:
    return wagma(
        axis_name,
        tx,
        group_size=trace.group_size,
        tau=trace.tau or None,
        groups="fixed" if trace.groups == "fixed" else "butterfly",
        trace=trace,
        **options,
    )
