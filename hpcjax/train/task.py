"""The task of a training run: a model, a method, an objective and a data set."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcjax import data
from hpcjax.core.method import Method, Objective
from hpcjax.core.model import Model
from hpcjax.sharding.mesh import data_axes, make_mesh


class Task(NamedTuple):
    """Everything that defines a training run, except its length.

    Attributes:
      model: pure functions `init` and `apply`.
      method: the training method.
      objective: `(outputs, batch) -> Totals`.
      dataset: training and validation sources.
      augment: optional `(batch, rng) -> batch` on the host.
    """

    model: Model
    method: Method
    objective: Objective
    dataset: "data.Dataset"
    augment: Callable[..., Any] | None = None

    def mesh(self, devices: int) -> Mesh:
        """Returns the mesh of the method for a number of devices."""
        return make_mesh(self.method.mesh_shape(devices))


def batch_shapes(
    task: Task, batch_size: int, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of a global training batch, without making it."""
    sharding = NamedSharding(mesh, PartitionSpec(data_axes(mesh)))
    return {
        name: jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
        for name, like in rows_like(task.dataset, batch_size).items()
    }


def rows_like(dataset: "data.Dataset", rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of `rows` training examples."""
    example = dataset.train.gather(np.array([0]))
    return {
        name: jax.ShapeDtypeStruct((rows, *values.shape[1:]), values.dtype)
        for name, values in example.items()
    }
