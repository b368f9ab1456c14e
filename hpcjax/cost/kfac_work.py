"""Divides the work of K-FAC into tasks that fit into the bubbles of a pipeline.

A layer with input width a and output width g has two Kronecker factors: A (a × a) from
its inputs and B (g × g) from the gradients of its outputs. Each is accumulated over
the micro-batches (curvature), summed over replicas (sync) and inverted.

References:
  Osawa, Li and Hoefler, PipeFisher, MLSys 2023, sections 3.1 and 3.2.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.cost.pipeline import (
    Duration,
    PerStage,
    at_stage,
    check_durations,
    check_stages,
)
from hpcjax.sharding.schedules import Op, Schedule

TaskKind = Literal["curvA", "curvB", "syncA", "syncB", "invA", "invB"]
# Every kind, in the order in which tasks are placed, with the kinds that must be done
# for the same factor before.
BEFORE: dict[TaskKind, tuple[TaskKind, ...]] = {
    "curvA": (),
    "curvB": (),
    "syncA": ("curvA",),
    "syncB": ("curvB",),
    "invA": ("curvA", "syncA"),
    "invB": ("curvB", "syncB"),
}


class Layer(NamedTuple):
    """Widths of a linear layer, which are the sizes of its two factors.

    Attributes:
      a: input width; factor A is `[a, a]`.
      g: output width; factor B is `[g, g]`.
    """

    a: int
    g: int


class Factor(NamedTuple):
    """A Kronecker factor of the model.

    Attributes:
      stage: the pipeline stage of its layer.
      layer: position of the layer in its stage, in forward order.
      side: `A` for the inputs, `B` for the output gradients.
    """

    stage: int
    layer: int
    side: Literal["A", "B"]


class Task(NamedTuple):
    """A piece of K-FAC's work that one device does without interruption.

    Attributes:
      device: the device that does it.
      kind: curvature, sync or inversion, of A or of B.
      replica: which copy of the stage.
      stage: of the layer.
      layer: the layer's position in the stage, in forward order.
      unit: the micro-batch of a curvature task, the panel of an inversion, else 0.
      duration: in the unit of the pipeline's times.
    """

    device: int
    kind: TaskKind
    replica: int
    stage: int
    layer: int
    unit: int
    duration: Duration

    @property
    def factor(self) -> Factor:
        """The factor that the task computes, sums or inverts."""
        return Factor(self.stage, self.layer, side(self.kind))

    @property
    def needed_pass(self) -> Op:
        """The pass that a curvature task needs: forward for A, backward for B."""
        kind = "F" if side(self.kind) == "A" else "B"
        return Op(self.device, kind, self.stage, self.unit, self.replica)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacCosts:
    """Times of K-FAC's work for all layers of a stage: one number, or one per stage.

    Attributes:
      t_curv: curvature of all factors for one micro-batch.
      t_inv: inversion of all factors, once per refresh.
      t_sync: sum of all factors over replicas, once per refresh; 0 for no such task.
      t_prec: preconditioning of the gradients, once per step.
    """

    t_curv: PerStage
    t_inv: PerStage
    t_sync: PerStage = 0
    t_prec: PerStage = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_durations(field.name, getattr(self, field.name))


def side(kind: TaskKind) -> Literal["A", "B"]:
    """Returns the factor, A or B, to which a kind of task belongs."""
    return "A" if kind.endswith("A") else "B"


def transformer_block(width: int, hidden: int | None = None) -> tuple[Layer, ...]:
    """Returns the linear layers of a block: query, key, value, output, two of the MLP.

    Args:
      width: of the model.
      hidden: width of the MLP; by default four times the model's.

    Examples:
      >>> transformer_block(8)[-2:]
      (Layer(a=8, g=32), Layer(a=32, g=8))
    """
    hidden = 4 * width if hidden is None else hidden
    return (*[Layer(width, width)] * 4, Layer(width, hidden), Layer(hidden, width))


def kfac_tasks(
    schedule: Schedule, stage_layers: Sequence[Sequence[Layer]], costs: KfacCosts
) -> tuple[Task, ...]:
    """Returns the tasks of one refresh of all factors, in the order to place them.

    A stage's costs are divided among its factors by the operations on an n × n factor:
    curvature and sync in proportion to n², inversion to n³. Each micro-batch of a
    replica has its own curvature task. The replicas of a stage invert its layers in
    turns: with two replicas, the first one inverts the even layers.

    Args:
      schedule: its stages, replicas and micro-batches have the tasks.
      stage_layers: the layers of each stage, in forward order.
      costs: times of each stage.

    Returns:
      The tasks of all devices, sorted by kind (curvature, sync, inversion; A before B),
      then by replica, stage, layer and unit.

    Raises:
      ConfigError: stages without layers, layers without width, or costs of another
        number of stages.
    """
    _check_layers(schedule, stage_layers)
    for field in dataclasses.fields(costs):
        check_stages(field.name, getattr(costs, field.name), schedule.stages)
    micro_batches = _micro_batches_of_replicas(schedule)
    tasks = [
        task
        for replica, row in enumerate(schedule.holders)
        for stage, device in enumerate(row)
        for task in _tasks_of_part(
            Task(device, "curvA", replica, stage, 0, 0, 0),
            stage_layers[stage],
            costs,
            micro_batches[replica],
            schedule.replicas,
        )
        if task.duration or not task.kind.startswith("sync")
    ]
    # The sort is stable: within a kind, the order of the loops above remains.
    return tuple(sorted(tasks, key=lambda task: list(BEFORE).index(task.kind)))


def preconditioning(schedule: Schedule, costs: KfacCosts) -> tuple[Duration, ...]:
    """Returns how long each device preconditions gradients at the end of a step.

    The replicas of a stage share its layers, as they share the inversions.

    Raises:
      ConfigError: costs of another number of stages.
    """
    check_stages("t_prec", costs.t_prec, schedule.stages)
    return tuple(
        sum(
            at_stage(costs.t_prec, part.stage) / schedule.replicas
            for part in schedule.parts(device)
        )
        for device in range(schedule.devices)
    )


def panels(task: Task, longest: PerStage | None) -> tuple[Task, ...]:
    """Splits an inversion into the fewest equal panels of at most `longest`.

    A blocked Cholesky factorization can stop between its panels. Tasks of other kinds
    are returned unchanged, and so are all if `longest` is None.
    """
    limit = None if longest is None else at_stage(longest, task.stage)
    if limit is None or not task.kind.startswith("inv") or task.duration <= limit:
        return (task,)
    count = math.ceil(task.duration / limit)
    part = task.duration / count
    return tuple(task._replace(unit=unit, duration=part) for unit in range(count))


def _tasks_of_part(
    first: Task,
    layers: Sequence[Layer],
    costs: KfacCosts,
    micro_batches: tuple[int, ...],
    replicas: int,
) -> Iterator[Task]:
    """Yields the tasks of one copy of a stage, in the order of kinds.

    Args:
      first: a task with the device, replica and stage of all others.
      layers: of the stage.
      costs: of all stages.
      micro_batches: of the replica.
      replicas: of the stage.
    """
    squares = sum(layer.a**2 + layer.g**2 for layer in layers)
    cubes = sum(layer.a**3 + layer.g**3 for layer in layers)
    t_curv, t_sync, t_inv = (
        at_stage(value, first.stage)
        for value in (costs.t_curv, costs.t_sync, costs.t_inv)
    )
    for kind in BEFORE:
        for place, layer in enumerate(layers):
            dim = layer.a if side(kind) == "A" else layer.g
            # `squares` and `cubes` sum over both factors: the shares add up to the
            # stage's cost.
            task = first._replace(kind=kind, layer=place)
            if kind.startswith("curv"):
                share = t_curv * dim**2 / squares
                for micro_batch in micro_batches:
                    yield task._replace(unit=micro_batch, duration=share)
            elif kind.startswith("sync"):
                yield task._replace(duration=t_sync * dim**2 / squares)
            elif place % replicas == first.replica:
                yield task._replace(duration=t_inv * dim**3 / cubes)


def _micro_batches_of_replicas(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Returns the micro-batches of each replica, in the order in which they enter."""
    return tuple(
        tuple(
            op.micro_batch
            for op in schedule.orders[row[0]]
            if op.kind == "F" and op.replica == replica and op.stage == 0
        )
        for replica, row in enumerate(schedule.holders)
    )


def _check_layers(schedule: Schedule, stage_layers: Sequence[Sequence[Layer]]) -> None:
    empty = [stage for stage, layers in enumerate(stage_layers) if not layers]
    if len(stage_layers) != schedule.stages or empty:
        raise ConfigError(
            f"each of {schedule.stages} stages needs at least one layer: got layers "
            f"for {len(stage_layers)} stages, none in stages {empty}"
        )
    if flat := [each for row in stage_layers for each in row if min(each) < 1]:
        raise ConfigError(f"a layer's widths must be at least 1: got {flat[0]}")
