"""The state of a training run, which is on devices and saved completely."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcjax.core import compat, per_device, trees
from hpcjax.core.keys import derive
from hpcjax.core.structs import pytree
from hpcjax.train.task import Task


@pytree
class TrainState:
    """The state that a step takes and returns.

    Attributes:
      step: int32, number of steps taken, which is also the position in the data.
      params: parameters of the model, in a `PerDevice` if they differ between devices;
        of those that are cut, each device has its part.
      model_state: running statistics, averaged over all devices in every step. The mean
        of running averages is the running average of means, so this is the same as if
        devices kept their own until validation. What a model keeps in a `PerDevice` is
        each device's own.
      opt_state: state of the method; its `PerDevice` parts differ between devices.
      key: typed key, from which draws of step n are derived by name and n.
      skipped: int32, number of steps skipped for numbers that were not finite.
    """

    step: Any
    params: Any
    model_state: Any
    opt_state: Any
    key: Any
    skipped: Any


def make_state(task: Task, key: jax.Array, mesh: Mesh) -> TrainState:
    """Initialises parameters and optimizer state; traceable."""
    bare, model_state = task.model.init(derive(key, "init"))
    params, opt_state = task.method.init(bare)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=per_device.expand(params, mesh),
        model_state=per_device.expand(model_state, mesh),
        opt_state=per_device.expand(opt_state, mesh),
        key=derive(key, "train"),
        skipped=jnp.zeros((), jnp.int32),
    )


def state_shapes(task: Task, mesh: Mesh) -> TrainState:
    """Returns the state's shapes, dtypes and shardings without computing it."""
    return task.once(("shapes of the state", mesh), lambda: _find_shapes(task, mesh))


def _find_shapes(task: Task, mesh: Mesh) -> TrainState:
    shapes = jax.eval_shape(lambda: make_state(task, jax.random.key(0), mesh))
    on_host = task.method.around.on_host
    outside = {
        f"opt_state/{path}" for path in trees.flatten(shapes.opt_state) if on_host(path)
    }

    def place(path: str, leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        kind = "pinned_host" if path in outside else None
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    specs = jax.tree.leaves(
        state_specs(task, shapes), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    flat = trees.flatten(shapes)
    placed = map(place, flat, flat.values(), specs)
    return jax.tree.unflatten(jax.tree.structure(shapes), list(placed))


def state_specs(task: Task, like: TrainState) -> TrainState:
    """Returns a `PartitionSpec` for each leaf of a state, or of its shapes."""
    params, opt_state = task.method.specs(like.params, like.opt_state)
    specs = per_device.specs(like)
    return dataclasses.replace(specs, params=params, opt_state=opt_state)


def init_state(task: Task, seed: int, mesh: Mesh) -> TrainState:
    """Returns the state before the first step, placed on the mesh.

    Its placement is that of the states that steps return, so that the step function is
    compiled only once.
    """
    make = task.once(("first state", mesh), lambda: _state_maker(task, mesh))
    return make(jax.random.key(seed))


def _state_maker(task: Task, mesh: Mesh) -> Callable[[jax.Array], TrainState]:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(task, mesh))
    options = compat.single_use_compilation(mesh.devices.flat[0].platform)
    return jax.jit(
        lambda key: make_state(task, key, mesh),
        out_shardings=shardings,
        compiler_options=options,
    )
