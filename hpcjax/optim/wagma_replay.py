"""A run of WAGMA-SGD repeated on a mesh from its trace, old models and all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.hostcomm import GroupTrace
from hpcjax.hostcomm.groups import LateRule
from hpcjax.optim.model_averaging import (
    MODEL_ORDERS,
    ModelExchange,
    Order,
    averaging,
)
from hpcjax.optim.wagma import group_average


def wagma_replay(
    trace: GroupTrace,
    params: optax.Params,
    tx: optax.GradientTransformation,
    gradient: Callable[[Any, jax.Array], tuple[jax.Array, Any]],
    *,
    axis_name: str,
    late_rule: LateRule = "conditional",
    order: Order = "update_then_average",
    average_state: tuple[str, ...] = (),
) -> tuple[optax.Params, jax.Array]:
    """Repeats a run of `wagma` on a mesh, worker by worker.

    For use inside `jax.shard_map`, over an axis with a device for each worker. Every
    device keeps its last models, as many as the trace's largest staleness needs, and
    contributes that of the step which the trace says. It says how training converges
    and nothing of its time.

    Args:
      trace: of all workers, recorded or simulated.
      params: at the start, the same on all devices.
      tx: as of the run.
      gradient: `gradient(params, step)` returns any number, such as the loss, and the
        gradients of this device's worker.
      axis_name: the mesh axis.
      late_rule: as of the run.
      order: as of the run.
      average_state: as of the run.

    Returns:
      This device's parameters at the end, and the numbers of each step, `[T]`.

    Raises:
      ConfigError: the axis has another size than the trace, or the trace cannot be: a
        model is averaged that was not written yet, or an old one in a round of all.
      TypeError: parameters of integers, with their paths.
    """
    size = jax.lax.axis_size(axis_name)
    checks.require(size == trace.size, f"the axis has {size} devices", P=trace.size)
    checks.require_choice("order", order, MODEL_ORDERS)
    _check(trace)
    ring = int(trace.staleness().max()) + 1
    written = jnp.asarray(trace.written)[:, jax.lax.axis_index(axis_name)]
    models = jnp.zeros(0)

    def start(vector, params, **settings):
        nonlocal models  # that of step -1 is in the last place of the ring
        models = jnp.broadcast_to(vector, (ring, *vector.shape))

    def average(step, vector):
        nonlocal models
        models = models.at[step % ring].set(vector)
        return group_average(
            vector,
            step,
            group_size=trace.group_size,
            tau=trace.tau or None,
            axis_name=axis_name,
            groups="fixed" if trace.groups == "fixed" else "butterfly",
            late_rule=late_rule,
            sent=models[written[step] % ring],
            late=written[step] < step,
        )

    exchange = ModelExchange(start, average, lambda: None, axis_name)
    worker = averaging(tx, exchange, order=order, average_state=average_state)

    def one(carry, step):
        nonlocal models
        params, state, models = carry
        value, grads = gradient(params, step)
        params, state = worker.step(grads, state, params)
        return (params, state, models), vary(value, axis_name)

    state = worker.init(params)
    params, own, models = vary((params, state.own, models), axis_name)
    carry = params, state._replace(own=own), models
    (params, *_), values = jax.lax.scan(one, carry, jnp.arange(trace.steps))
    return params, values


def _check(trace: GroupTrace) -> None:
    checks.require_choice("groups", trace.groups, ("butterfly", "fixed"))
    steps = np.arange(trace.steps)
    known = bool(np.all((trace.written >= -1) & (trace.staleness() >= 0)))
    rule = "a trace must not average a model before it is written"
    checks.require(known, rule, steps=trace.steps)
    if trace.tau:
        late = bool(trace.late()[steps % trace.tau == trace.tau - 1].any())
        rule = "nobody can be late in a round of all"
        checks.require(not late, rule, tau=trace.tau)
