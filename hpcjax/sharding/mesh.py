"""The only maker of device meshes, and the placement of arrays on them."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError

DATA_AXIS = "data"
# The same devices as a grid: those that precondition a layer stand in one column of it,
# those that receive the result in one row. See `optim.kfac.Distribution`.
GRAD_WORKER_AXIS = "grad_worker"
GRAD_RECEIVER_AXIS = "grad_receiver"
_DATA_AXES = (DATA_AXIS, GRAD_WORKER_AXIS, GRAD_RECEIVER_AXIS)


def make_mesh(shape: Mapping[str, int]) -> Mesh:
    """Returns a mesh of the first devices, named axes in the order of `shape`.

    Axes are `Auto`: bodies of `shard_map` see local blocks, everything else is left to
    the compiler. Devices of all processes count.

    Raises:
      ConfigError: a size below 1, or more devices asked for than there are.

    Examples:
      >>> dict(make_mesh({"data": 1}).shape)
      {'data': 1}
    """
    sizes = tuple(shape.values())
    wanted, have = int(np.prod(sizes)), jax.device_count()
    if not sizes or min(sizes) < 1 or wanted > have:
        raise ConfigError(
            f"a mesh needs sizes of at least 1 and at most {have} devices in all: "
            f"got {dict(shape)}"
        )
    return jax.make_mesh(
        sizes,
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:wanted],
    )


def data_mesh(devices: int | None = None) -> Mesh:
    """Returns the one-axis mesh of data parallelism over `devices` (default: all)."""
    return make_mesh({DATA_AXIS: jax.device_count() if devices is None else devices})


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes of `mesh` over which batches are split, in its order.

    Raises:
      ValueError: there is none.

    Examples:
      >>> data_axes(data_mesh(1))
      ('data',)
    """
    found = tuple(axis for axis in mesh.axis_names if axis in _DATA_AXES)
    if not found:
        raise ValueError(
            f"a mesh needs one of the data axes {_DATA_AXES}: got {mesh.axis_names}"
        )
    return found


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """Returns shardings for a state: replicated, `PerDevice` parts split by axis."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        per_device.specs(state),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def place_batch(batch: Mapping[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts this process's rows of a batch on its devices, split along the data axis.

    Args:
      batch: arrays whose first dimension is the rows of this process.
      mesh: a mesh with data axes.

    Returns:
      Global arrays, first dimension split over the data axes.
    """
    sharding = NamedSharding(mesh, PartitionSpec(data_axes(mesh)))
    return {
        name: jax.make_array_from_process_local_data(sharding, np.asarray(rows))
        for name, rows in batch.items()
    }
