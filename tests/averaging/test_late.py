"""Late workers of a training config: who they are, and that their models are old."""

import jax
import numpy as np
import optax
import pytest

from hpcjax import sharding, train
from hpcjax.averaging import LateConfig, WagmaConfig, wagma
from hpcjax.averaging.workers_config import Run
from hpcjax.core import ConfigError
from hpcjax.optim import SgdConfig
from tests.train import tiny

SETTINGS = {"group_size": 2, "tau": 4, "groups": "butterfly"}


def simulate(steps, workers=4):
    late = LateConfig(base=0.01, delay=0.1, seconds=0.001)
    return WagmaConfig(**SETTINGS)._trace(late, Run(workers, steps, seed=3), 2)


def test_a_longer_run_begins_as_a_shorter_one():
    """So that a resumed run of more steps goes on with the workers that were late."""
    short, long = simulate(10), simulate(25)
    np.testing.assert_array_equal(long.written[:10], short.written)
    assert long.late()[10:].any()


def test_a_trace_of_other_settings_is_refused():
    for other in ({"group_size": 4}, {"tau": 2}, {"groups": "fixed"}):
        with pytest.raises(ConfigError, match="must be of these settings"):
            wagma("worker", optax.sgd(0.1), trace=simulate(4), **SETTINGS | other)


def trained(late, steps=6):
    """Models of four workers after some steps, in the training loop."""
    plain = tiny.task()
    method = train.compose(
        plain.model,
        plain.dataset,
        SgdConfig(lr=0.3),
        averaged=WagmaConfig(group_size=2, tau=4, late=late),
        batch_size=16,
        steps=steps,
        devices=4,
    )
    task = train.supervised(plain.model, method, plain.dataset)
    mesh = task.mesh(4)
    state = train.init_state(task, 0, mesh)
    step = train.train_step(task, mesh, state)
    for number in range(steps):
        rows = plain.dataset.train.gather(np.arange(16) + number)
        state, _ = step(state, sharding.place_batch(rows, mesh))
    return np.asarray(jax.tree.leaves(state.params)[0])


def test_nobody_is_late_without_delays_and_somebody_is_with_them():
    nobody = trained(None)
    # Two steps after the mean of all of step 3: groups of two agree, not all four.
    assert len({model.tobytes() for model in nobody}) == 2
    late = trained(LateConfig(base=0.01, delay=0.1, seconds=0.001))
    assert np.abs(late - nobody).max() > 1e-3
