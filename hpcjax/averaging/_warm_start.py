"""Workers that begin by allreduce SGD and go on with averages of models."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from hpcjax.averaging.workers import Averaging, allreduce_sgd
from hpcjax.core import checks
from hpcjax.hostcomm import Transport


def warm_start(
    over: Transport | str,
    tx: optax.GradientTransformation,
    then: Averaging,
    *,
    steps: int,
) -> Averaging:
    """Returns workers that go on by `then` after so many steps of allreduce SGD.

    All are equal by then, so that the first old model of a late worker is that of the
    switch. The optimizer's state is kept; `then` counts its steps from the switch.

    Args:
      over: the transport of a host, or the name of a mesh axis; as of `then`.
      tx: makes updates; as of `then`.
      then: such as `wagma(over, tx, group_size=4)`.
      steps: of allreduce SGD; 0: none.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> from hpcjax.averaging import wagma
      >>> import jax.numpy as jnp
      >>> alone, tx = connected(1)[0], optax.sgd(0.5)
      >>> worker = warm_start(alone, tx, wagma(alone, tx, group_size=1), steps=1)
      >>> params, state = jnp.ones(2), worker.init(jnp.ones(2))
      >>> for _ in range(2):
      ...     params, state = worker.step(jnp.ones(2), state, params)
      >>> params, state = worker.finish(state, params)
      >>> params.tolist(), state.step
      ([0.0, 0.0], 2)
    """
    checks.require_count(0, steps=steps)
    if not steps:
        return then
    first = allreduce_sgd(over, tx)

    go_on = functools.partial(_counted_from, steps, then.step)
    if isinstance(over, str):

        def on_mesh(grads, state, params, **extras):
            return jax.lax.cond(
                state.step < steps,
                functools.partial(first.step, **extras),
                functools.partial(go_on, **extras),
                grads,
                state,
                params,
            )

        return Averaging(then.begin, then.start, on_mesh, then.finish, then.trace)

    def start(state, params):
        if state.step <= steps:
            first.start(state, params)
        else:
            then.start(state._replace(step=state.step - steps), params)

    def step(grads, state, params, **extras):
        if state.step < steps:
            return first.step(grads, state, params, **extras)
        if state.step == steps:
            first.finish(state, params)
            own = then.init(params).own
            own = own._replace(inner=state.own.inner, master=state.own.master)
            state = state._replace(own=own)
        return go_on(grads, state, params, **extras)

    def finish(state, params):
        if state.step <= steps:
            return first.finish(state, params)
        return _counted_from(
            steps, lambda _, *own: then.finish(*own), (), state, params
        )

    return Averaging(then.begin, start, step, finish, then.trace)


def _counted_from(
    switch: int,
    act: Callable[..., Any],
    grads: Any,
    state: Any,
    params: Any,
    **extras: Any,
) -> tuple[Any, Any]:
    """Acts as if steps were counted from the switch; returns `(params, state)`."""
    state = state._replace(step=state.step - switch)
    params, state = act(grads, state, params, **extras)
    return params, state._replace(step=state.step + switch)
