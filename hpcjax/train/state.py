"""The state of a training run: all of it is on devices, all of it is saved."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from hpcjax.core import per_device
from hpcjax.core.keys import derive
from hpcjax.core.structs import pytree
from hpcjax.sharding.mesh import state_shardings
from hpcjax.train.task import Task


@pytree
class TrainState:
    """What a step takes and returns.

    Attributes:
      step: int32, steps taken; also the position in the data.
      params: parameters of the model.
      model_state: running statistics.
      opt_state: state of the transform; `PerDevice` parts differ between devices.
      key: typed key; draws of step n derive from it by name and n.
      skipped: int32, steps left out because a gradient was not finite.
    """

    step: Any
    params: Any
    model_state: Any
    opt_state: Any
    key: Any
    skipped: Any


def make_state(task: Task, key: jax.Array, mesh: Mesh) -> TrainState:
    """Initialises parameters and optimizer state; traceable."""
    params, model_state = task.model.init(derive(key, "init"))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=per_device.expand(task.optimizer.init(params), mesh),
        key=derive(key, "train"),
        skipped=jnp.zeros((), jnp.int32),
    )


def state_shapes(task: Task, mesh: Mesh) -> TrainState:
    """Returns the state's shapes, dtypes and shardings without computing it."""
    shapes = jax.eval_shape(lambda: make_state(task, jax.random.key(0), mesh))
    shardings = state_shardings(shapes, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )


def init_state(task: Task, seed: int, mesh: Mesh) -> TrainState:
    """Returns the state before the first step, placed on the mesh.

    Placing it now is what keeps the step function at one compilation.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(task, mesh))
    make = jax.jit(lambda key: make_state(task, key, mesh), out_shardings=shardings)
    return make(jax.random.key(seed))
