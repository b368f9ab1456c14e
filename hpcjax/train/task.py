"""What is trained: a model, a transform, an objective and a data set."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from hpcjax import data
from hpcjax.core.model import Model
from hpcjax.optim import PartialBackward
from hpcjax.optim.kfac import Curvature
from hpcjax.sharding.mesh import data_axes, data_mesh, make_mesh

Batch = Mapping[str, Any]


class Totals(NamedTuple):
    """Sums over the scored items of a batch, so that parts of it can be added.

    Attributes:
      sums: one float32 scalar for each metric; `"loss"` is the one that is trained.
      count: the number of items, float32.
    """

    sums: dict[str, Float[Array, ""]]
    count: Float[Array, ""]

    def means(self) -> dict[str, Float[Array, ""]]:
        """Returns the mean of each metric; NaN where nothing was scored."""
        return {name: total / self.count for name, total in self.sums.items()}


Objective = Callable[[Any, Batch], Totals]


class Task(NamedTuple):
    """Everything a training run is made of, except its length.

    Attributes:
      model: pure functions `init` and `apply`.
      optimizer: a transform that takes the *local* gradients of each device and returns
        identical updates on all of them; it communicates by itself.
      objective: `(outputs, batch) -> Totals`.
      dataset: training and validation sources.
      augment: optional `(batch, rng) -> batch` on the host.
      curvature: what K-FAC, if `optimizer` contains it, wants of the backward pass.
      backward: which workers backpropagate through which blocks; `optimizer` then
        contains `optim.contributor_mean`. None: all through all.
    """

    model: Model
    optimizer: optax.GradientTransformationExtraArgs
    objective: Objective
    dataset: "data.Dataset"
    augment: Callable[..., Any] | None = None
    curvature: Curvature | None = None
    backward: PartialBackward | None = None

    def mesh(self, devices: int) -> Mesh:
        """Returns the mesh that the optimizer communicates on, of so many devices."""
        if self.curvature is None or self.curvature.distribution is None:
            return data_mesh(devices)
        return make_mesh(self.curvature.distribution.mesh_shape)


def batch_shapes(
    task: Task, batch_size: int, mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and shardings of one global training batch without building it."""
    example = task.dataset.train.gather(np.array([0]))
    sharding = NamedSharding(mesh, PartitionSpec(data_axes(mesh)))
    return {
        name: jax.ShapeDtypeStruct(
            (batch_size, *rows.shape[1:]), rows.dtype, sharding=sharding
        )
        for name, rows in example.items()
    }
