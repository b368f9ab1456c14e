"""Pipelines simulated: when each device runs what, and how long it stands idle.

Every device runs its order one op after the other, each as soon as what it needs has
arrived. Times are in any one unit; `chrome_trace` takes them for milliseconds.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.perf.timelines import Bar, chrome_trace
from hpcjax.sharding.schedules import KINDS, Kind, Op, Schedule, validate

Duration = float | int
PerStage = float | int | tuple[float | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What one micro-batch costs at one stage; one number, or one for each stage.

    Attributes:
      t_f: its forward pass.
      t_b: its backward pass.
      t_p2p: a result's way to another device, which keeps neither of them busy.
      recompute: the backward pass repeats the forward pass.
      t_w: the part of `t_b` that schedules with `W` ops do apart; default its half.
    """

    t_f: PerStage
    t_b: PerStage
    t_p2p: Duration = 0
    recompute: bool = False
    t_w: PerStage | None = None

    def __post_init__(self) -> None:
        for name in ("t_f", "t_b", "t_p2p", "t_w"):
            value = getattr(self, name)
            check_durations(name, 0 if value is None else value)

    def of(self, kind: Kind, stage: int, *, splits_backward: bool = False) -> Duration:
        """Returns the duration of an op, of a schedule with or without `W` ops."""
        t_f, t_b = at_stage(self.t_f, stage), at_stage(self.t_b, stage)
        t_w = t_b / 2 if self.t_w is None else at_stage(self.t_w, stage)
        if kind == "F":
            return t_f
        if kind == "W":
            return t_w
        backward = t_b - t_w if splits_backward else t_b
        return backward + t_f if self.recompute else backward


class Span(NamedTuple):
    """An op with the times at which it begins and ends."""

    start: Duration
    end: Duration
    op: Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step of a pipeline as it was simulated, from 0 to `makespan`.

    Attributes:
      schedule: what was run.
      costs: how long its ops take.
      spans: of each device, in order.
    """

    schedule: Schedule
    costs: StageCosts
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def makespan(self) -> Duration:
        """T_pipe, when the last device ends."""
        return max(row[-1].end for row in self.spans if row)

    def busy(self, device: int) -> Duration:
        """Returns the sum of the durations of a device's ops."""
        return sum(span.end - span.start for span in self.spans[device])

    @property
    def utilization(self) -> float:
        """Share of the makespan that devices are busy, mean over them."""
        busy = sum(map(self.busy, range(self.schedule.devices)))
        return share(busy, self.makespan * self.schedule.devices)

    def bubbles(self, device: int) -> tuple[tuple[Duration, Duration], ...]:
        """Returns begin and end of each time that a device is idle, in order."""
        row = self.spans[device]
        starts = [0, *(span.end for span in row)]
        ends = [*(span.start for span in row), self.makespan]
        return tuple((a, b) for a, b in zip(starts, ends, strict=True) if a < b)

    def live_activations(self, device: int) -> int:
        """Returns how many micro-batches' activations a device holds at most at once.

        A stage's activations are held from the begin of the forward pass to the end of
        the backward pass, or of the weights' part of it.
        """
        held: dict[Op, list[Span]] = {}
        for span in self.spans[device]:
            held.setdefault(span.op._replace(kind="F"), []).append(span)
        return most_at_once((row[0].start, row[-1].end) for row in held.values())

    def bars(self) -> tuple[Bar, ...]:
        """Returns what is drawn of it."""
        return tuple(op_bar(span) for row in self.spans for span in row)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns it as JSON values for Perfetto or `chrome://tracing`."""
        return chrome_trace(self.bars())


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Returns when every op of a schedule runs, each as early as it can.

    Args:
      schedule: the order of work on every device.
      costs: how long each op takes.

    Raises:
      ConfigError: an invalid schedule, or costs of another number of stages.

    Examples:
      >>> from hpcjax.sharding import gpipe
      >>> line = simulate(gpipe(4, 4), StageCosts(t_f=1, t_b=2))
      >>> line.makespan, line.bubbles(3)
      (21, ((0, 3), (15, 21)))
    """
    valid = validate(schedule)
    _check_costs(costs, schedule.stages)
    splits = schedule.splits_backward
    durations = {
        (kind, stage): costs.of(kind, stage, splits_backward=splits)
        for kind in KINDS
        for stage in range(schedule.stages)
    }
    ends: dict[Op, Duration] = {}
    free: list[Duration] = [0] * schedule.devices
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    for op, needs in valid.items():
        arrived = [
            ends[need] + (0 if need.device == op.device else costs.t_p2p)
            for need in needs
        ]
        start = max(free[op.device], *arrived, 0)
        end = start + durations[op.kind, op.stage]
        ends[op] = free[op.device] = end
        spans[op.device].append(Span(start, end, op))
    return Timeline(schedule=schedule, costs=costs, spans=tuple(map(tuple, spans)))


def _check_costs(costs: StageCosts, stages: int) -> None:
    for name in ("t_f", "t_b", "t_w"):
        check_stages(name, getattr(costs, name), stages)
    t_w = 0 if costs.t_w is None else costs.t_w
    if any(at_stage(t_w, s) > at_stage(costs.t_b, s) for s in range(stages)):
        raise ConfigError(f"t_w is a part of t_b: got t_w={t_w}, t_b={costs.t_b}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What a device's part of the model takes, in any one unit.

    Attributes:
      activations: of one micro-batch, until its backward pass.
      peak_errors: the most that a backward pass takes besides.
      saved_errors: output gradients of one micro-batch, kept for curvature.
      factors: all Kronecker factors; their inverses take as much again.
      params: parameters; their gradients take as much again.
    """

    activations: Duration
    peak_errors: Duration
    saved_errors: Duration
    factors: Duration
    params: Duration


def pipeline_memory(
    parts: StageMemory,
    *,
    live_activations: int,
    live_errors: int,
    replicas: int = 1,
    recompute: bool = False,
) -> Duration:
    """Returns what a device needs while K-FAC's work fills its bubbles.

    act·n + peak_err + save_err·m + 2·kron + 2·param·replicas; the paper takes N for n
    and m, which is exact for GPipe and the most that any other schedule needs.

    Args:
      parts: of one stage.
      live_activations: n, see `Timeline.live_activations`; 1 with recomputation.
      live_errors: m, see `FilledSchedule.live_errors`.
      replicas: stages that a device holds, 2 for Chimera.
      recompute: only one micro-batch's activations exist at a time.

    Examples:
      >>> parts = StageMemory(
      ...     activations=10, peak_errors=5, saved_errors=2, factors=3, params=1
      ... )
      >>> pipeline_memory(parts, live_activations=4, live_errors=4)
      61
    """
    return (
        parts.activations * (1 if recompute else live_activations)
        + parts.peak_errors
        + parts.saved_errors * live_errors
        + 2 * parts.factors
        + 2 * parts.params * replicas
    )


def most_at_once(intervals: Iterable[tuple[Duration, Duration]]) -> int:
    """Returns how many half-open intervals overlap at most.

    Examples:
      >>> most_at_once([(0, 2), (1, 3), (2, 4)])
      2
    """
    # Ends sort before starts: what ends as another begins does not overlap with it.
    events = sorted(event for a, b in intervals for event in ((a, 1), (b, -1)))
    level = most = 0
    for _, step in events:
        level += step
        most = max(most, level)
    return most


def op_bar(span: Span, step_start: Duration = 0) -> Bar:
    """Returns an op as it is drawn in a step that begins at `step_start`."""
    op = span.op
    kind = op.kind if op.replica == 0 else f"{op.kind} up"
    times = step_start + span.start, step_start + span.end
    return Bar(op.device, *times, kind, str(op.micro_batch))


def share(part: Duration, whole: Duration) -> float:
    """Returns `part / whole`; of nothing, all of it."""
    return part / whole if whole else 1.0


def at_stage(value: PerStage, stage: int) -> Duration:
    """Returns the number for one stage."""
    return value[stage] if isinstance(value, tuple) else value


def check_durations(name: str, value: PerStage) -> None:
    """Raises ConfigError unless every number is a finite, non-negative duration."""
    for number in value if isinstance(value, tuple) else (value,):
        if not (math.isfinite(number) and number >= 0):
            raise ConfigError(f"{name} must be finite and at least 0: got {value}")


def check_stages(name: str, value: PerStage | None, stages: int) -> None:
    """Raises ConfigError unless there is one number, or one for each stage."""
    if isinstance(value, tuple) and len(value) != stages:
        raise ConfigError(
            f"{name} needs one number or one for each of {stages} stages: got {value}"
        )
