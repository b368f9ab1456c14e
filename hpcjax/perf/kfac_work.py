"""K-FAC's work in a pipeline as tasks that fit between its passes.

A layer with input width a and output width g has two Kronecker factors: A (a × a) from
its inputs and B (g × g) from the gradients of its outputs. Each is accumulated over
the micro-batches (curvature), summed over replicas (sync) and inverted.

References:
  Osawa, Li and Hoefler, PipeFisher, MLSys 2023, sections 3.1 and 3.2.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.perf.pipeline import (
    Duration,
    PerStage,
    at_stage,
    check_durations,
    check_stages,
)
from hpcjax.sharding.schedules import Op, Schedule

TaskKind = Literal["curvA", "curvB", "syncA", "syncB", "invA", "invB"]
# Every kind in the order of preference, and what of the same factor comes before it.
BEFORE: dict[TaskKind, tuple[TaskKind, ...]] = {
    "curvA": (),
    "curvB": (),
    "syncA": ("curvA",),
    "syncB": ("curvB",),
    "invA": ("curvA", "syncA"),
    "invB": ("curvB", "syncB"),
}


class Layer(NamedTuple):
    """Widths of a linear layer: the sides of its two factors.

    Attributes:
      a: of its inputs.
      g: of its outputs.
    """

    a: int
    g: int


class Factor(NamedTuple):
    """A Kronecker factor of the model.

    Attributes:
      stage: of its layer.
      layer: place of the layer in its stage, forwards.
      side: `A` of inputs, `B` of output gradients.
    """

    stage: int
    layer: int
    side: Literal["A", "B"]


class Task(NamedTuple):
    """A piece of K-FAC's work on one device that is not interrupted.

    Attributes:
      device: where.
      kind: curvature, sync or inversion, of A or of B.
      replica: of the stage.
      stage: of the layer.
      layer: its place in the stage, forwards.
      unit: its micro-batch for curvature, the panel for an inversion, else 0.
      duration: how long it takes.
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
        """The factor that it is about."""
        return Factor(self.stage, self.layer, side(self.kind))

    @property
    def passing(self) -> Op:
        """The pass that curvature needs: A the forward, B the backward one."""
        kind = "F" if side(self.kind) == "A" else "B"
        return Op(self.device, kind, self.stage, self.unit, self.replica)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KfacCosts:
    """What K-FAC costs at one stage, all its layers; one number or one per stage.

    Attributes:
      t_curv: curvature of one micro-batch.
      t_inv: all inversions.
      t_sync: summing the factors over replicas, once per refresh; 0 for no such task.
      t_prec: preconditioning, once per step.
    """

    t_curv: PerStage
    t_inv: PerStage
    t_sync: PerStage = 0
    t_prec: PerStage = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_durations(field.name, getattr(self, field.name))


def side(kind: TaskKind) -> Literal["A", "B"]:
    """Returns which of a layer's factors a kind of task is about."""
    return "A" if kind.endswith("A") else "B"


def transformer_block(width: int, hidden: int | None = None) -> tuple[Layer, ...]:
    """Returns the linear layers of a block: query, key, value, output and two of MLP.

    Args:
      width: of the model.
      hidden: of the MLP, default four times the width.

    Examples:
      >>> transformer_block(8)[-2:]
      (Layer(a=8, g=32), Layer(a=32, g=8))
    """
    hidden = 4 * width if hidden is None else hidden
    return (*[Layer(width, width)] * 4, Layer(width, hidden), Layer(hidden, width))


def split_stages(layers: Sequence[Any], stages: int) -> tuple[tuple[Any, ...], ...]:
    """Returns layers (or blocks) in order, spread evenly; first stages take the rest.

    Raises:
      ConfigError: more stages than layers.

    Examples:
      >>> split_stages("abcde", 2)
      (('a', 'b', 'c'), ('d', 'e'))
    """
    if not 1 <= stages <= len(layers):
        raise ConfigError(
            "stages must be at least 1 and at most the number of layers: got "
            f"stages={stages}, {len(layers)} layers"
        )
    short, more = divmod(len(layers), stages)
    ends = [short * stage + min(stage, more) for stage in range(stages + 1)]
    return tuple(tuple(layers[a:b]) for a, b in itertools.pairwise(ends))


def kfac_tasks(
    schedule: Schedule, stage_layers: Sequence[Sequence[Layer]], costs: KfacCosts
) -> tuple[Task, ...]:
    """Returns the tasks of one refresh of all factors, in the order of preference.

    A stage's costs are shared out by size: curvature and sync by side², inversion by
    side³. Curvature is a task for each micro-batch of a replica. Replicas of a stage
    share its inversions by layer in turns: with two, the even layers are the first's.

    Args:
      schedule: whose stages and micro-batches they are.
      stage_layers: the layers of each stage, forwards.
      costs: of each stage.

    Returns:
      The tasks of all devices by kind (curvature, sync, inversion, of A before B), then
      by replica, stage, layer and unit.

    Raises:
      ConfigError: stages without layers, layers without width, or costs of another
        number of stages.
    """
    _check_layers(schedule, stage_layers)
    for field in dataclasses.fields(costs):
        check_stages(field.name, getattr(costs, field.name), schedule.stages)
    units = _units(schedule)
    tasks = [
        task
        for replica, row in enumerate(schedule.holders)
        for stage, device in enumerate(row)
        for task in _tasks_of_part(
            Task(device, "curvA", replica, stage, 0, 0, 0),
            stage_layers[stage],
            costs,
            units[replica],
            schedule.replicas,
        )
        if task.duration or not task.kind.startswith("sync")
    ]
    return tuple(sorted(tasks, key=lambda task: list(BEFORE).index(task.kind)))


def preconditioning(schedule: Schedule, costs: KfacCosts) -> tuple[Duration, ...]:
    """Returns how long each device preconditions at the end of a step.

    Replicas share a stage's layers, as they do its inversions.

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
    """Returns an inversion as the fewest equal panels that are short enough.

    A blocked Cholesky factorization can stop between its panels. Other tasks, and all
    with `longest=None`, are returned as they are.
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
    """Yields the tasks of one replica's stage; `first` says which and where it is."""
    squares = sum(layer.a**2 + layer.g**2 for layer in layers)
    cubes = sum(layer.a**3 + layer.g**3 for layer in layers)
    t_curv, t_sync, t_inv = (
        at_stage(value, first.stage)
        for value in (costs.t_curv, costs.t_sync, costs.t_inv)
    )
    for kind in BEFORE:
        for place, layer in enumerate(layers):
            dim = layer.a if side(kind) == "A" else layer.g
            task = first._replace(kind=kind, layer=place)
            if kind.startswith("curv"):
                share = t_curv * dim**2 / squares
                for micro_batch in micro_batches:
                    yield task._replace(unit=micro_batch, duration=share)
            elif kind.startswith("sync"):
                yield task._replace(duration=t_sync * dim**2 / squares)
            elif place % replicas == first.replica:
                yield task._replace(duration=t_inv * dim**3 / cubes)


def _units(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Returns the micro-batches of each replica in the order in which they come."""
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
