"""What is trained: a model, a transform, an objective and a data set."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from hpcjax import data, metrics, optim
from hpcjax.core.model import Model
from hpcjax.optim.kfac import Curvature
from hpcjax.sharding.mesh import DATA_AXIS, data_axes, data_mesh, make_mesh

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
    """

    model: Model
    optimizer: optax.GradientTransformationExtraArgs
    objective: Objective
    dataset: "data.Dataset"
    augment: Callable[..., Any] | None = None
    curvature: Curvature | None = None

    def mesh(self, devices: int) -> Mesh:
        """Returns the mesh that the optimizer communicates on, of so many devices."""
        if self.curvature is None or self.curvature.distribution is None:
            return data_mesh(devices)
        return make_mesh(self.curvature.distribution.mesh_shape)


def label_totals(logits: Float[Array, "batch *time labels"], batch: Batch) -> Totals:
    """Sums cross-entropy (nats) and errors over the labels of a batch.

    Args:
      logits: unnormalised log-probabilities.
      batch: int labels `"y"` [batch, *time] and, in validation, `"weight"` [batch].
    """
    labels = batch["y"]
    weight = jnp.ones(labels.shape, jnp.float32)
    if "weight" in batch:
        rows = batch["weight"]
        weight = weight * rows.reshape(rows.shape + (1,) * (labels.ndim - 1))
    losses = metrics.token_cross_entropy(logits, labels)
    wrong = (jnp.argmax(logits, axis=-1) != labels).astype(jnp.float32)
    sums = {"loss": jnp.sum(weight * losses), "error": jnp.sum(weight * wrong)}
    return Totals(sums, jnp.sum(weight))


def supervised(
    model: Model,
    optimizer: optax.GradientTransformation,
    dataset: "data.Dataset",
    augment: Callable[..., Any] | None = None,
    objective: Objective = label_totals,
    curvature: Curvature | None = None,
) -> Task:
    """Returns the task of predicting labels `y` from `x`: classes, or next tokens.

    Args:
      model: outputs logits over the labels.
      optimizer: a single-device transform; the mean of the gradients over the data axis
        is taken before it. A transform that communicates by itself goes into `Task`.
      dataset: sources of `{"x", "y"}`.
      augment: optional `(batch, rng) -> batch` on the host.
      objective: `(outputs, batch) -> Totals`.
      curvature: given with an optimizer that contains K-FAC, which averages its
        statistics by itself over the axes of `curvature`.
    """
    axes = DATA_AXIS if curvature is None else curvature.axes
    chained = optax.chain(optim.all_reduce_mean(axes), optimizer)
    return Task(
        model,
        optax.with_extra_args_support(chained),
        objective,
        dataset,
        augment,
        curvature,
    )


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
