"""Schedules as they run: against accumulation without a pipeline, and their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import perf, sharding
from hpcjax.core.errors import ConfigError
from hpcjax.sharding import schedules
from tests.sharding import pipelines

SCHEDULES = {
    "gpipe": lambda: sharding.gpipe(4, 4),
    "one_f_one_b": lambda: sharding.one_f_one_b(4, 8),
    "zero_bubble_h1": lambda: sharding.zero_bubble_h1(4, 4),
    "interleaved": lambda: sharding.interleaved(8, 4, 2),
    "interleaved on two": lambda: sharding.interleaved(4, 4, 2),
    "chimera": lambda: sharding.chimera(4, 8),
    "chimera on two": lambda: sharding.chimera(2, 2),
    "one device": lambda: sharding.interleaved(3, 2, 3),
    "one stage": lambda: sharding.gpipe(1, 2),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def difference(schedule, dtype):
    """How far loss and gradients are from those without a pipeline."""
    functions = pipelines.functions(dtype)
    params = pipelines.params(schedule.stages, dtype)
    batch = pipelines.batch(0, dtype)
    found = pipelines.step(schedule, functions)(
        pipelines.spread(schedule, params), batch
    )
    assert found.value.dtype == dtype
    value, grads = pipelines.accumulated(
        functions, params, batch, schedule.micro_batches
    )
    own = pipelines.collect(schedule, found.grads)
    return max(
        pipelines.distance(found.value, value),
        *(pipelines.distance(own[name], grads[name]) for name in grads),
    )


@pytest.mark.acceptance("pipefisher", 7)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_gives_the_gradients_of_accumulation(name):
    assert difference(SCHEDULES[name](), "float32") < TOLERANCE["float32"]


@pytest.mark.acceptance("pipefisher", 7)
@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "zero_bubble_h1", "interleaved", "chimera"]
)
def test_in_float64_they_are_equal_to_ten_digits(name):
    with jax.enable_x64(True):
        assert difference(SCHEDULES[name](), "float64") < TOLERANCE["float64"]
