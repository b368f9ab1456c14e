"""Making device meshes, and placing arrays on them."""

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import DATA_AXIS, WORKER_AXIS
from hpcjax.core.shards import Specs

# The devices of data parallelism as KAISA's grid: those that precondition a layer form
# a column, those that receive the result a row. See `optim.kfac.Distribution`.
GRAD_WORKER_AXIS = "grad_worker"
GRAD_RECEIVER_AXIS = "grad_receiver"
# Devices that share out the batch and hold parts of one model, see `tensor3d`.
DEPTH_AXIS = "depth"
# Those that share out the batch and the experts of one model, see `ted`.
EXPERT_AXIS = "expert"
# Those that share out the space of each example, see `SpatialConfig`. To gradients they
# are data axes: their mean over all is that of the whole.
SPACE_AXES = ("space_d", "space_h", "space_w")
_DATA_AXES = (
    WORKER_AXIS,
    DATA_AXIS,
    EXPERT_AXIS,
    DEPTH_AXIS,
    GRAD_WORKER_AXIS,
    GRAD_RECEIVER_AXIS,
    *SPACE_AXES,
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
    _check_processes(mesh, _rows_of(axes))
    return axes


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns those of `data_axes` over which rows are split: all but those of space.

    Examples:
      >>> row_axes(make_mesh({"data": 1, "space_h": 1}))
      ('data',)
    """
    return _rows_of(data_axes(mesh))


def _rows_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns axes without those of space."""
    return tuple(axis for axis in axes if axis not in SPACE_AXES)


def batch_specs(batch: Mapping[str, Any], mesh: Mesh, cut: Specs) -> dict[str, Any]:
    """Returns how each entry of a batch is split: as `cut` says, or by rows alone."""
    rows = PartitionSpec(row_axes(mesh))
    return {key: cut.get(key, rows) for key in batch}


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


def place_batch(
    batch: Mapping[str, Any], mesh: Mesh, cut: Specs = MappingProxyType({})
) -> dict[str, Any]:
    """Places this process's rows of a batch on its devices, split over the data axes.

    Args:
      batch: arrays, or trees of them, whose first axis is the rows of this process.
      mesh: a mesh with data axes.
      cut: `Method.batch`, how entries are split that are not by rows alone.

    Returns:
      Global arrays, whose first axis is split over the data axes.
    """

    def place(spec: PartitionSpec, rows: Any) -> Any:
        put = functools.partial(
            jax.make_array_from_process_local_data, NamedSharding(mesh, spec)
        )
        return jax.tree.map(lambda leaf: put(np.asarray(leaf)), rows)

    specs = batch_specs(batch, mesh, cut)
    return {key: place(specs[key], rows) for key, rows in batch.items()}
