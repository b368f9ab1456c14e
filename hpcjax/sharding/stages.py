"""The stacked parameters of a pipeline's stages, and how devices hold them.

All stages have parameters of the same shapes. Below the key `"stages"` of a model's
parameters they are stacked along axis 0, with a row for each part that a device holds,
device after device, so that splitting this axis evenly gives every device its own.
Chimera has two rows for each stage, on two devices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.sharding.schedules import Part, Schedule

STAGE_AXIS = "stage"
STAGES = "stages"


def stage_rows(schedule: Schedule) -> tuple[Part, ...]:
    """Returns for each row of stacked parameters the part that it is.

    Raises:
      ConfigError: devices hold different numbers of parts.

    Examples:
      >>> from hpcjax.sharding import chimera
      >>> [part.stage for part in stage_rows(chimera(2, 2))]
      [0, 1, 1, 0]
    """
    parts_of_devices = [schedule.parts(device) for device in range(schedule.devices)]
    if len({len(parts) for parts in parts_of_devices}) != 1:
        raise ConfigError(
            "every device must hold equally many stages to run one program: got "
            f"{[len(parts) for parts in parts_of_devices]}"
        )
    return tuple(part for parts in parts_of_devices for part in parts)


def spread_stages(schedule: Schedule, stages: Any) -> Any:
    """Returns leaves `[rows, ...]`, one row for each part, from leaves `[stages, ...]`.

    Raises:
      ConfigError: a leaf has another number of stages than the schedule.
    """
    rows = np.array([part.stage for part in stage_rows(schedule)])
    return _pick(stages, rows, schedule.stages, "stages")


def collect_stages(schedule: Schedule, rows: Any) -> Any:
    """Returns leaves `[stages, ...]` of the first replica, from leaves `[rows, ...]`.

    Raises:
      ConfigError: a leaf has another number of rows than `stage_rows`.
    """
    parts = stage_rows(schedule)
    places = np.array([parts.index(Part(0, s)) for s in range(schedule.stages)])
    return _pick(rows, places, len(parts), "rows")


def _pick(tree: Any, places: np.ndarray, count: int, what: str) -> Any:
    """Returns the rows at `places` of every leaf, which must have `count` rows."""
    # Checked, because JAX clamps an index that is out of range to the last row.
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if not lengths <= {(count,)}:
        raise ConfigError(
            f"every leaf needs the schedule's {count} {what} along its first axis: got "
            f"{sorted(lengths)}"
        )
    return jax.tree.map(lambda leaf: leaf[places], tree)


def stage_specs(tree: Any, axis_name: str = STAGE_AXIS) -> Any:
    """Returns the `shard_map` specifications of parameters or an optimizer's state.

    Leaves below a key `"stages"` are split along their first axis, others replicated.

    Examples:
      >>> specs = stage_specs({"head": 0, "stages": {"kernel": 0}})
      >>> specs["head"], specs["stages"]["kernel"]
      (P(), P('stage',))
    """

    def spec(path: Any, _: Any) -> PartitionSpec:
        keys = trees.path_of(path).split("/")
        return PartitionSpec(axis_name) if STAGES in keys else PartitionSpec()

    return jax.tree.map_with_path(spec, tree)


def stage_shardings(tree: Any, mesh: Mesh, axis_name: str = STAGE_AXIS) -> Any:
    """Returns `stage_specs` as shardings on `mesh`, for `jax.device_put`."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        stage_specs(tree, axis_name),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def sum_replicas(schedule: Schedule, rows: Any, axis_name: str = STAGE_AXIS) -> Any:
    """Returns each row summed over its replicas, bitwise equal on both their devices.

    For use inside `shard_map` on leaves `[parts of a device, ...]`. Schedules without
    replicas change nothing; with two replicas the devices that hold the same stages
    exchange their rows.

    Raises:
      ConfigError: there are more than two replicas, or the other replicas of a device's
        stages are on several devices.
    """
    if schedule.replicas == 1:
        return rows
    pairs, places = _partners(schedule)
    place = jnp.asarray(places)[jax.lax.axis_index(axis_name)]

    def add(leaf: jax.Array) -> jax.Array:
        # Addition is commutative also in floating point, so both devices get the same.
        return leaf + jax.lax.ppermute(leaf, axis_name, pairs)[place]

    return jax.tree.map(add, rows)


def _partners(schedule: Schedule) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Returns (source, target) devices, and `[device, row]`, the row of the replica.

    The row is the place of a part's other replica among those of the source.
    """
    devices = range(schedule.devices)
    others = [
        [(schedule.holders[1 - part.replica][part.stage], part) for part in parts]
        for parts in map(schedule.parts, devices)
    ]
    sources = [{device for device, _ in row} for row in others]
    if schedule.replicas != 2 or any(len(each) != 1 for each in sources):
        raise ConfigError(
            "a device's stages must all have their one other replica on one device: "
            f"got holders {schedule.holders}"
        )
    places = [
        [
            schedule.parts(device).index(Part(1 - part.replica, part.stage))
            for device, part in row
        ]
        for row in others
    ]
    pairs = [(source, target) for target in devices for source in sources[target]]
    return pairs, np.array(places)
