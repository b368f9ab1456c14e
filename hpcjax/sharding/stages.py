"""Parameters of a pipeline's stages: who holds which, in what order they are stacked.

All stages have parameters of the same shapes. They are stacked along axis 0, a row for
each part that a device holds, device after device, below the key `"stages"` of the
parameters; so they are split evenly over the axis of the pipeline. With Chimera there
are two rows for each stage, one on each of two devices.
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
    """Returns the part that each row of stacked parameters is, device after device.

    Raises:
      ConfigError: devices hold different numbers of parts.

    Examples:
      >>> from hpcjax.sharding import chimera
      >>> [part.stage for part in stage_rows(chimera(2, 2))]
      [0, 1, 1, 0]
    """
    held = [schedule.parts(device) for device in range(schedule.devices)]
    if len({len(parts) for parts in held}) != 1:
        raise ConfigError(
            "every device must hold equally many stages to run one program: got "
            f"{[len(parts) for parts in held]}"
        )
    return tuple(part for parts in held for part in parts)


def spread_stages(schedule: Schedule, stages: Any) -> Any:
    """Returns the rows that the devices hold, from leaves `[stages, ...]`.

    Raises:
      ConfigError: a leaf has another number of stages than the schedule.
    """
    rows = np.array([part.stage for part in stage_rows(schedule)])
    return _picked(stages, rows, schedule.stages, "stages")


def collect_stages(schedule: Schedule, rows: Any) -> Any:
    """Returns leaves `[stages, ...]`, of the first replica, from what devices hold.

    Raises:
      ConfigError: a leaf has another number of rows than `stage_rows`.
    """
    parts = stage_rows(schedule)
    places = np.array([parts.index(Part(0, s)) for s in range(schedule.stages)])
    return _picked(rows, places, len(parts), "rows")


def _picked(tree: Any, places: np.ndarray, count: int, what: str) -> Any:
    # JAX takes the last row in place of one that is not there.
    found = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if not found <= {(count,)}:
        raise ConfigError(
            f"every leaf needs the schedule's {count} {what} along its first axis: got "
            f"{sorted(found)}"
        )
    return jax.tree.map(lambda leaf: leaf[places], tree)


def stage_specs(tree: Any, axis_name: str = STAGE_AXIS) -> Any:
    """Returns the `shard_map` specifications of parameters or an optimizer's state.

    What is below a key `"stages"` is split along its first axis, the rest replicated.

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
    """Returns `stage_specs` as shardings, to place a tree on `mesh` with."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        stage_specs(tree, axis_name),
        is_leaf=lambda leaf: isinstance(leaf, PartitionSpec),
    )


def sum_replicas(schedule: Schedule, rows: Any, axis_name: str = STAGE_AXIS) -> Any:
    """Returns the sum over replicas of each row, the same bits on both their devices.

    Inside `shard_map`; leaves `[parts of a device, ...]`. Without replicas these are
    returned as they are, with two the devices that hold the same stages exchange them.

    Raises:
      ConfigError: more than two replicas, or a device whose stages have their other
        replicas on several devices.
    """
    if schedule.replicas == 1:
        return rows
    pairs, places = _partners(schedule)
    place = jnp.asarray(places)[jax.lax.axis_index(axis_name)]

    def add(leaf: jax.Array) -> jax.Array:
        return leaf + jax.lax.ppermute(leaf, axis_name, pairs)[place]

    return jax.tree.map(add, rows)


def _partners(schedule: Schedule) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Returns who sends its rows to whom, and [device, row]: which row is the other."""
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
