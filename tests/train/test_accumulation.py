"""Gradients of a batch in several passes against those of one pass."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import data, models, optim, sharding, train
from hpcjax.core import ConfigError
from hpcjax.optim.kfac import KfacConfig
from hpcjax.optim.kfac._transform import states
from hpcjax.runs import overrides
from hpcjax.runs.training import TrainingConfig
from tests.train import tiny


def fit(task, passes, *, devices=1, steps=4, batch_size=16):
    config = train.TrainConfig(
        steps=steps, batch_size=batch_size, eval_every=4, accumulate=passes
    )
    records = tiny.Records()
    state = train.fit(
        task, config, seed=0, mesh=sharding.data_mesh(devices), recorder=records
    )
    return state, records.values()


def same(found, expected, atol=1e-6):
    (state, records), (wanted, told) = found, expected
    chex.assert_trees_all_close(state.params, wanted.params, atol=atol, rtol=0)
    for mine, other in zip(records, told, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            assert mine[name] == pytest.approx(value, abs=10 * atol), name


@pytest.mark.quick("4-1")
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("passes", [2, 4])
def test_several_passes_give_what_one_gives(passes, devices):
    task = tiny.task(optax.adam(0.05))
    same(fit(task, passes, devices=devices), fit(task, 1, devices=devices))


class Weighted(tiny.Points):
    """Points of which some do not count; of the first rows of a batch, none may."""

    def gather(self, indices):
        weight = (np.arange(len(indices)) % 5 > 1) * (np.arange(len(indices)) >= 4)
        return {**super().gather(indices), "weight": weight.astype(np.float32)}


def weighted_task(optimizer):
    dataset = tiny.dataset()._replace(train=Weighted())
    return train.supervised(tiny.linear(), optimizer, dataset)


@pytest.mark.parametrize("passes", [2, 4])
def test_parts_weigh_by_their_scored_items(passes):
    """The first of four parts has none at all."""
    task = weighted_task(optax.sgd(0.5))
    same(fit(task, passes), fit(task, 1))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"adaptive_damping": True}])
def test_statistics_of_kfac_are_those_of_the_whole_batch(options):
    dataset = tiny.dataset()
    model = models.mlp(dataset.inputs, dataset.outputs, widths=(5,))
    config = KfacConfig(
        factor_update_steps=1, inv_update_steps=1, damping=0.1, **options
    )
    task = train.supervised(
        model,
        train.compose(
            model, dataset, config, batch_size=16, steps=4, devices=1, seed=0
        ),
        dataset,
    )
    found, expected = fit(task, 4), fit(task, 1)
    same(found, expected, atol=1e-5)
    factors, wanted = (states(each[0].opt_state)[0] for each in (found, expected))
    chex.assert_trees_all_close(factors.factors, wanted.factors, rtol=1e-4, atol=1e-8)
    assert not np.allclose(wanted.factors["head"]["g"], np.eye(3), atol=0.1)


@pytest.mark.slow
def test_running_statistics_pass_from_part_to_part():
    """Two parts of one step move them as two steps of half the batch do."""
    dataset = data.DigitsConfig().load()
    model = models.resnet(dataset.inputs, dataset.outputs, depth=8, width=2)
    task = train.supervised(model, optax.sgd(0.0), dataset)
    twice, _ = fit(task, 2, steps=1, batch_size=32)
    steps, _ = fit(task, 1, steps=2, batch_size=16)
    chex.assert_trees_all_close(twice.model_state, steps.model_state, rtol=1e-5)


class Wide:
    """Zeros of 64 features."""

    def __len__(self):
        return 512

    def gather(self, indices):
        count = len(indices)
        return {"x": np.zeros((count, 64), np.float32), "y": np.zeros(count, np.int32)}


def test_a_step_in_parts_needs_less_memory():
    """Of what the forward pass stores, a quarter is there at a time."""
    model = models.mlp((64,), 8, widths=(256,) * 6)
    dataset = tiny.dataset()._replace(train=Wide(), inputs=(64,), outputs=8)
    task, mesh = train.supervised(model, optax.sgd(0.1), dataset), sharding.data_mesh(1)

    def temporaries(passes):
        config = train.TrainConfig(batch_size=4096, accumulate=passes)
        own = train.accumulating(task, config, mesh)
        state = train.state_shapes(own, mesh)
        batch = train.batch_shapes(own, 4096, mesh)
        program = train.train_step(own, mesh, state).lower(state, batch).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporaries(8) < 0.4 * temporaries(1)


def test_what_cannot_be_accumulated_is_refused():
    with pytest.raises(ConfigError, match="accumulate must be at least 1: got 0"):
        train.TrainConfig(accumulate=0)
    with pytest.raises(ConfigError, match="must divide the 16 examples of a device"):
        fit(tiny.task(), 3)

    def odd(one_pass, params, state):
        found = optim.whole_backward(one_pass, params, state)
        return found._replace(extras={"mystery": jnp.zeros(())})

    task = tiny.task()
    task = task.replace(method=task.method._replace(gradients=odd))
    with pytest.raises(ConfigError, match=r"cannot be accumulated.*'mystery'"):
        fit(task, 2)


def test_it_is_a_key_of_every_training_config():
    keys = overrides.keys(TrainingConfig())
    assert keys["train.accumulate"].value == 1
    assert jax.tree.leaves(keys["train.accumulate"].help)
