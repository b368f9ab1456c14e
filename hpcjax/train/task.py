"""The task of a training run: a model, a method, an objective and a data set."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcjax import data
from hpcjax.core import trees
from hpcjax.core.method import Method, Score
from hpcjax.core.model import Model
from hpcjax.sharding.mesh import batch_specs, make_mesh

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Everything that defines a training run, except its length and its seed.

    A task keeps the programs that are compiled for it: to train it again, with another
    seed or from a checkpoint, compiles nothing.

    Attributes:
      model: pure functions `init` and `apply`.
      method: the training method.
      objective: `(outputs, batch) -> Totals`.
      dataset: training and validation sources.
      read: how the batches of a run of so many steps are read; None: ahead of the step.
    """

    model: Model
    method: Method
    objective: Score
    dataset: "data.Dataset"
    read: Callable[["data.Batches", int], "data.Reader"] | None = None
    _made: dict[Hashable, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returned when it was first called for this key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def replace(self, **parts: Any) -> "Task":
        """Returns a task with other parts, for which nothing is compiled yet."""
        return dataclasses.replace(self, **parts)

    def mesh(self, devices: int) -> Mesh:
        """Returns the mesh of the method for a number of devices."""
        return make_mesh(self.method.mesh_shape(devices))


def batch_shapes(task: Task, batch_size: int, mesh: Mesh) -> dict[str, Any]:
    """Returns shapes and shardings of a global training batch, without making it."""
    batch = rows_like(task.dataset, batch_size)
    specs = batch_specs(batch, mesh, task.method.batch)

    def place(spec: PartitionSpec, rows: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), rows
        )

    return {key: place(specs[key], rows) for key, rows in batch.items()}


def rows_like(dataset: "data.Dataset", rows: int) -> dict[str, Any]:
    """Returns the shapes of a batch of `rows` training examples, as the model gets it.

    Where batches have several shapes, it is the one of the most numbers.

    Raises:
      ConfigError: the augmentation does not fit the examples.
    """
    if isinstance(dataset.train, data.ShapedSampler):
        return max(list_shapes(dataset.train, rows), key=trees.num_params)
    if isinstance(dataset.train, data.Sampler):
        stream = data.batches(dataset.train, rows, 0, augment=dataset.augment)
        return jax.tree.map(_like, stream[0])
    example = dataset.train.gather(np.array([0]))
    if dataset.augment is not None:
        example = dataset.augment(example, data.example_rng(0, 0), dataset.train)
    return jax.tree.map(lambda values: _like(values, rows), example)


def list_shapes(sampler: "data.ShapedSampler", rows: int) -> list[dict[str, Any]]:
    """Returns the shapes of batches, whose base size has `rows` rows."""
    return [jax.tree.map(_like, batch) for batch in sampler.shapes(rows)]


def _like(values: np.ndarray, rows: int | None = None) -> jax.ShapeDtypeStruct:
    shape = values.shape if rows is None else (rows, *values.shape[1:])
    return jax.ShapeDtypeStruct(shape, values.dtype)
