"""Training steps as functions that `perf.compare` can time."""

from collections.abc import Callable
from typing import Any

from hpcjax import data, perf
from hpcjax.sharding.mesh import place_batch
from hpcjax.train.state import init_state
from hpcjax.train.step import train_step
from hpcjax.train.task import Task


def step_thunk(
    task: Task, batch_size: int, *, devices: int = 1, seed: int = 0
) -> Callable[[], Any]:
    """Returns a function that takes one compiled step, always on the same batch.

    Args:
      task: model, method, objective and data.
      batch_size: number of examples, those of the first batch.
      devices: number of devices of the task's mesh.
      seed: of the parameters.
    """
    mesh = task.mesh(devices)
    rows = data.batches(task.dataset.train, batch_size, seed)[0]
    batch = place_batch(rows, mesh, task.method.batch)
    state = init_state(task, seed, mesh)
    return perf.stepper(train_step(task, mesh, state), state, batch)
