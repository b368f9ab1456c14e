"""Eager SGD in the training loop, against its replay by itself."""

import jax
import numpy as np
import optax
import pytest

from hpcjax import averaging, cost, sharding, train
from hpcjax.averaging import EagerConfig, LateConfig
from hpcjax.averaging.workers_config import Run
from hpcjax.collectives import OkTopkConfig
from hpcjax.core import ConfigError, Optimization
from hpcjax.core.method import RunSeed, RunShape
from hpcjax.models import ResNetConfig
from hpcjax.optim import PartialBackwardConfig, SgdConfig
from tests.train import tiny

WORKERS, STEPS, ROWS = 4, 12, 16
LATE = LateConfig(base=0.01, delay=0.05, seconds=0.002)
SGD = optax.sgd(0.1, 0.9)


def trace_of(steps):
    seconds = LATE.step_seconds(Run(WORKERS, steps, seed=1))
    return cost.simulate_rounds(seconds, mode="solo", seconds=0.002).trace()


def rows_of(dataset, step):
    return dataset.train.gather((np.arange(ROWS) + ROWS * step) % len(dataset.train))


def in_the_loop(trace, steps):
    """What workers have, their parameters, and the task, after so many rounds."""
    plain = tiny.task()
    own = ROWS // WORKERS
    shapes = {
        name: jax.ShapeDtypeStruct((own, *rows.shape[1:]), rows.dtype)
        for name, rows in rows_of(plain.dataset, 0).items()
    }
    seed = RunSeed(0)
    setup = RunShape(plain.model, shapes, steps, WORKERS, 1, seed, lambda rows: ())
    method = averaging.eager_rounds(trace, Optimization(SGD), setup)
    task = train.supervised(plain.model, method, plain.dataset)
    mesh = task.mesh(WORKERS)
    state = train.init_state(task, 0, mesh)
    step = train.train_step(task, mesh, state)
    for number in range(steps):
        batch = sharding.place_batch(rows_of(plain.dataset, number), mesh)
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])
    return state.opt_state.worker.value, state.params.value, task


def replayed(trace, task):
    """The losses of each worker's steps, by `replay` without the loop."""
    start = train.init_state(task, 0, task.mesh(WORKERS)).params.value
    start = jax.tree.map(lambda leaf: leaf[0], jax.device_get(start))
    steps = [rows_of(task.dataset, number) for number in range(trace.steps)]
    x, y = (
        np.stack([np.stack(np.split(rows[name], WORKERS)) for rows in steps])
        for name in "xy"
    )

    def worker(x, y):
        def gradient(params, step):
            def loss(params):
                logits, _ = task.model.apply(params, {}, x[step], train=True)
                totals = task.objective(logits, {"x": x[step], "y": y[step]})
                return totals.means()["loss"]

            return jax.value_and_grad(loss)(params)

        return averaging.replay(trace, start, SGD, gradient, axis_name="w")

    return jax.jit(jax.vmap(worker, in_axes=1, axis_name="w"))(x, y)[1]


@pytest.mark.slow
def test_late_workers_compute_what_the_replay_says():
    trace = trace_of(STEPS + 1)
    assert (trace.staleness() > 1).any()  # who brings several gradients at once
    worker, _, task = in_the_loop(trace, STEPS)
    losses = np.asarray(replayed(trace, task))
    assert len(set(np.asarray(worker.step).tolist())) > 1  # some are still behind
    for rank, taken in enumerate(np.asarray(worker.step)):
        ours = np.asarray(worker.values)[rank, :taken]
        np.testing.assert_allclose(ours, losses[rank, :taken], rtol=1e-5)


@pytest.mark.slow
def test_a_run_of_more_steps_begins_in_the_same_way():
    first = in_the_loop(trace_of(STEPS + 8), 6)[1]
    again = in_the_loop(trace_of(STEPS + 20), 6)[1]
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(left, right)


def composed(model, workers=WORKERS, **parts):
    given = {"batch_size": ROWS, "steps": 2, "devices": WORKERS, **parts}
    averaged = EagerConfig(workers=workers)
    return train.compose(model, tiny.dataset(), SgdConfig(), averaged=averaged, **given)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="a worker on each device"):
        composed(tiny.linear(), workers=2)
    with pytest.raises(ConfigError, match="longer than the run's"):
        in_the_loop(trace_of(3), 3)
    for part in (
        {"exchange": OkTopkConfig(), "workers": 2},
        {"backward": PartialBackwardConfig(k=1)},
    ):
        with pytest.raises(ConfigError, match="sums whole gradients itself"):
            composed(tiny.linear(), **part)
    images = ResNetConfig(depth=8, width=2).make((8, 8, 1), 3)
    task = train.supervised(images, composed(images), tiny.dataset())
    mesh = task.mesh(WORKERS)
    like = train.state_shapes(task, mesh)
    batch = train.batch_shapes(task, ROWS, mesh)
    points = batch["x"]
    batch["x"] = points.update(shape=(ROWS, 8, 8, 1))
    with pytest.raises(ConfigError, match="must have no statistics"):
        train.train_step(task, mesh, like).lower(like, batch)
