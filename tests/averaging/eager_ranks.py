"""What the processes of `test_eager` do."""

import time

import numpy as np

from experiments.eager.hyperplane import Hyperplane

TASK = Hyperplane(dims=64, points=512, batch=64)
LR = 0.05


def train(transport, steps, runs):
    """Trains by each of the settings; returns final weights and traces."""
    from hpcjax.averaging import eager_sgd

    def workers(tx):
        for every, given in runs:
            yield eager_sgd(transport, tx, sync_models_every=every, **given)

    return follow(transport, steps, workers)


def follow(transport, steps, workers):
    """Trains with one worker after the other, some steps late.

    `workers(tx)` makes them, each when the one before has ended.
    """
    import jax
    import jax.numpy as jnp
    import optax

    x, y = map(jnp.asarray, TASK.shard(0, transport.rank, transport.size))
    gradient = jax.jit(TASK.gradient(transport.size))
    rng = np.random.default_rng(transport.rank)
    made = []
    for worker in workers(optax.sgd(LR, momentum=0.5)):
        params = jnp.zeros(TASK.dims + 1)
        state = worker.init(params)
        for step in range(steps):
            _, grads = gradient(params, x, y, step)
            late = rng.integers(8) == 0
            time.sleep(0.01 * late)
            params, state = worker.step(grads, state, params)
        params, state = worker.finish(state, params)
        made.append((np.asarray(params), tuple(worker.trace())))
    return made
