"""Making device meshes, and placing arrays on them."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import DATA_AXIS, WORKER_AXIS

# The devices of data parallelism as KAISA's grid: those that precondition a layer form
# a column, those that receive the result a row. See `optim.kfac.Distribution`.
GRAD_WORKER_AXIS = "grad_worker"
GRAD_RECEIVER_AXIS = "grad_receiver"
# Devices that share out the batch and hold parts of one model, see `tensor3d`.
DEPTH_AXIS = "depth"
# Those that share out the batch and the experts of one model, see `ted`.
EXPERT_AXIS = "expert"
_DATA_AXES = (
    WORKER_AXIS,
    DATA_AXIS,
    EXPERT_AXIS,
    DEPTH_AXIS,
    GRAD_WORKER_AXIS,
    GRAD_RECEIVER_AXIS,
)


def make_mesh(shape: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the first devices, with the axes of `shape` in their order.

    Axes are `Auto`: the compiler chooses shardings, except inside `shard_map`. The
    devices are those of all processes.

    Raises:
      ConfigError: a size below 1, or more devices asked for than there are.

    Examples:
      >>> dict(make_mesh({"data": 1}).shape)
      {'data': 1}
    """
    sizes = tuple(shape.values())
    needed, available = int(np.prod(sizes)), jax.device_count()
    if not sizes or min(sizes) < 1 or needed > available:
        raise ConfigError(
            f"a mesh needs sizes of at least 1 and at most {available} devices in all: "
            f"got {dict(shape)}"
        )
    return jax.make_mesh(
        sizes,
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:needed],
    )


def data_mesh(devices: int | None = None) -> Mesh:
    """Returns the one-axis mesh of data parallelism over `devices` (default: all)."""
    return make_mesh({DATA_AXIS: jax.device_count() if devices is None else devices})


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of `mesh` over which batches are split, in its order.

    Raises:
      ConfigError: devices of several processes would have the same rows, of which each
        process reads others.
      ValueError: there is none.

    Examples:
      >>> data_axes(data_mesh(1))
      ('data',)
    """
    axes = tuple(axis for axis in mesh.axis_names if axis in _DATA_AXES)
    if not axes:
        raise ValueError(
            f"a mesh needs one of the data axes {_DATA_AXES}: got {mesh.axis_names}"
        )
    _check_processes(mesh, axes)
    return axes


@functools.lru_cache(maxsize=8)  # it is asked for in every step
def _check_processes(mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Raises ConfigError if devices of two processes have one place along the axes."""
    owners = np.array([d.process_index for d in mesh.devices.flat])
    places = [mesh.axis_names.index(axis) for axis in axes]
    apart = np.moveaxis(owners.reshape(mesh.devices.shape), places, range(len(places)))
    parts = int(np.prod([mesh.shape[axis] for axis in axes]))
    rows = apart.reshape(parts, -1)
    if (rows != rows[:, :1]).any():
        raise ConfigError(
            "processes must divide what shares out the batch, for each reads rows of "
            f"its own: got {len(set(owners))} processes, {' * '.join(axes)} = {parts}, "
            f"of a mesh {dict(mesh.shape)}"
        )


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns the shardings of a state: replicated, except `PerDevice` values.

    Those are split along the axis that they name.
    """
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        per_device.specs(state),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def place_batch(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Places this process's rows of a batch on its devices, split over the data axes.

    Args:
      batch: arrays, or trees of them, whose first axis is the rows of this process.
      mesh: a mesh with data axes.

    Returns:
      Global arrays, whose first axis is split over the data axes.
    """
    sharding = NamedSharding(mesh, PartitionSpec(data_axes(mesh)))
    return jax.tree.map(
        lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)),
        dict(batch),
    )
