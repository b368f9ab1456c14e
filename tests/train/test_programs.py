"""Programs are kept with a task: trained again, it compiles nothing."""

import chex
import jax
import optax
import pytest

from hpcjax import sharding, train
from hpcjax.core import RunSeed
from tests.train import tiny


def fit(task, seed, mesh=None, **changes):
    records = tiny.Records()
    options = {"steps": 4, "batch_size": 16, "eval_every": 2} | changes
    state = train.fit(
        task,
        train.TrainConfig(**options),
        seed=seed,
        mesh=mesh or sharding.data_mesh(1),
        recorder=records,
    )
    return jax.device_get(state.params), records.values()


def test_another_seed_compiles_nothing_and_is_as_of_a_task_of_its_own(compilations):
    task = tiny.task(optax.adam(0.1))
    fit(task, 0)
    compilations.clear()
    again = fit(task, 1)
    assert compilations == []
    chex.assert_trees_all_equal(again, fit(tiny.task(optax.adam(0.1)), 1))


@pytest.mark.slow
def test_what_programs_depend_on_makes_others(compilations):
    task = tiny.task()
    fit(task, 0)
    for changes in (
        {"batch_size": 32},
        {"accumulate": 2},
        {"mesh": sharding.data_mesh(2)},
    ):
        compilations.clear()
        found = fit(task, 0, **changes)
        assert compilations, changes
        chex.assert_trees_all_equal(found, fit(tiny.task(), 0, **changes))


def test_a_task_with_another_part_has_programs_of_its_own():
    task = tiny.task(optax.sgd(0.1))
    fit(task, 0)
    other = task.replace(method=tiny.task(optax.sgd(0.5)).method)
    chex.assert_trees_all_equal(fit(other, 0), fit(tiny.task(optax.sgd(0.5)), 0))


def test_nobody_may_ask_for_the_seed_when_programs_serve_all():
    seed = RunSeed(5)
    assert seed() == 5
    assert seed.close()
    assert not RunSeed(5).close()
    with pytest.raises(RuntimeError, match="when it is built"):
        seed()
