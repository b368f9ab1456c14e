"""Workers that begin by allreduce SGD and go on with averages of models."""

import jax
import optax

from hpcjax.core import checks
from hpcjax.hostcomm import Transport
from hpcjax.optim.model_averaging import Averaging, allreduce_sgd


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
      >>> from hpcjax.optim import wagma
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

    def counted(act, state):
        """Counts from the switch for `then`, and from the begin for others."""
        params, state = act(state._replace(step=state.step - steps))
        return params, state._replace(step=state.step + steps)

    def going_on(grads, state, params):
        return counted(lambda state: then.step(grads, state, params), state)

    if isinstance(over, str):

        def on_mesh(grads, state, params):
            given = grads, state, params
            return jax.lax.cond(state.step < steps, first.step, going_on, *given)

        return Averaging(then.init, on_mesh, then.finish, then.trace)

    def step(grads, state, params):
        if state.step < steps:
            return first.step(grads, state, params)
        if state.step == steps:
            first.finish(state, params)
            own = then.init(params).own
            own = own._replace(inner=state.own.inner, master=state.own.master)
            state = state._replace(own=own)
        return going_on(grads, state, params)

    def finish(state, params):
        if state.step <= steps:
            return first.finish(state, params)
        return counted(lambda state: then.finish(state, params), state)

    return Averaging(first.init, step, finish, then.trace)
