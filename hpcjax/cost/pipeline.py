"""Simulation of pipeline schedules: when each device runs which op, and when it idles.

Every device runs its ops in order, each as soon as the results it needs have arrived.
Times may be in any unit; `chrome_trace` takes them for milliseconds.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.cost.timelines import Bar, chrome_trace
from hpcjax.sharding.schedules import KINDS, Kind, Op, Schedule, validate

Duration = float | int
PerStage = float | int | tuple[float | int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Times of one micro-batch at one stage: one number, or one for each stage.

    Attributes:
      t_f: forward pass.
      t_b: backward pass.
      t_p2p: transfer of a result to another device, which keeps neither device busy.
      recompute: whether the backward pass first repeats the forward pass.
      t_w: the part of `t_b` that computes gradients of weights, which some schedules
        run apart as a `W` op; None for half of `t_b`.
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
        """Returns the duration of an op.

        Args:
          kind: of the op.
          stage: of the op.
          splits_backward: whether the schedule has `W` ops.
        """
        t_f, t_b = at_stage(self.t_f, stage), at_stage(self.t_b, stage)
        t_w = t_b / 2 if self.t_w is None else at_stage(self.t_w, stage)
        if kind == "F":
            return t_f
        if kind == "W":
            return t_w
        # With W ops, a B op computes the gradients of the inputs only.
        backward = t_b - t_w if splits_backward else t_b
        return backward + t_f if self.recompute else backward


class Span(NamedTuple):
    """An op with the times at which it begins and ends."""

    start: Duration
    end: Duration
    op: Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """One simulated step of a pipeline, from 0 to `makespan`.

    Attributes:
      schedule: the simulated schedule.
      costs: the times of its ops.
      spans: the ops of each device with their times, in order.
    """

    schedule: Schedule
    costs: StageCosts
    spans: tuple[tuple[Span, ...], ...]

    @functools.cached_property
    def makespan(self) -> Duration:
        """T_pipe, the time at which the last device finishes."""
        return max(row[-1].end for row in self.spans if row)

    def busy(self, device: int) -> Duration:
        """Returns the sum of the durations of a device's ops."""
        return sum(span.end - span.start for span in self.spans[device])

    @property
    def utilization(self) -> float:
        """Share of the makespan that a device is busy, mean over devices."""
        busy = sum(map(self.busy, range(self.schedule.devices)))
        return share(busy, self.makespan * self.schedule.devices)

    def bubbles(self, device: int) -> tuple[tuple[Duration, Duration], ...]:
        """Returns start and end of each interval in which a device idles, in order."""
        row = self.spans[device]
        # The bubbles lie between an op's end and the next op's start.
        starts = [0, *(span.end for span in row)]
        ends = [*(span.start for span in row), self.makespan]
        return tuple((a, b) for a, b in zip(starts, ends, strict=True) if a < b)

    def live_activations(self, device: int) -> int:
        """Returns the most micro-batches whose activations a device holds at a time.

        Activations of a stage are held from the start of the forward pass to the end of
        the backward pass, or of its `W` op.
        """
        # Grouped by stage and micro-batch, so the F op stands for all ops of its group.
        groups: dict[Op, list[Span]] = {}
        for span in self.spans[device]:
            groups.setdefault(span.op._replace(kind="F"), []).append(span)
        return most_at_once((row[0].start, row[-1].end) for row in groups.values())

    def bars(self) -> tuple[Bar, ...]:
        """Returns the ops of all devices as bars to draw."""
        return tuple(op_bar(span) for row in self.spans for span in row)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns the bars as JSON values for Perfetto or `chrome://tracing`."""
        return chrome_trace(self.bars())


def simulate(schedule: Schedule, costs: StageCosts) -> Timeline:
    """Simulates a schedule, with every op as early as possible.

    Args:
      schedule: the order of work on every device.
      costs: times of its ops.

    Raises:
      ConfigError: an invalid schedule, or costs of another number of stages.

    Examples:
      >>> from hpcjax.sharding import gpipe
      >>> line = simulate(gpipe(4, 4), StageCosts(t_f=1, t_b=2))
      >>> line.makespan, line.bubbles(3)
      (21, ((0, 3), (15, 21)))
    """
    _check_costs(costs, schedule.stages)
    splits = schedule.splits_backward
    durations = {
        (kind, stage): costs.of(kind, stage, splits_backward=splits)
        for kind in KINDS
        for stage in range(schedule.stages)
    }
    spans = run_ops(schedule, lambda op: durations[op.kind, op.stage], costs.t_p2p)
    return Timeline(schedule=schedule, costs=costs, spans=spans)


def run_ops(
    schedule: Schedule, duration: Callable[[Op], Duration], latency: Duration
) -> tuple[tuple[Span, ...], ...]:
    """Returns the ops of each device with their times, each as early as possible."""
    ends: dict[Op, Duration] = {}
    free: list[Duration] = [0] * schedule.devices
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    # `validate` returns the ops in an order in which every op is behind its needs, so
    # that one walk through them suffices.
    for op, needs in validate(schedule).items():
        arrived = [
            ends[need] + (0 if need.device == op.device else latency) for need in needs
        ]
        start = max(free[op.device], *arrived, 0)
        ends[op] = free[op.device] = start + duration(op)
        spans[op.device].append(Span(start, ends[op], op))
    return tuple(map(tuple, spans))


def _check_costs(costs: StageCosts, stages: int) -> None:
    for name in ("t_f", "t_b", "t_w"):
        check_stages(name, getattr(costs, name), stages)
    t_w = 0 if costs.t_w is None else costs.t_w
    if any(at_stage(t_w, s) > at_stage(costs.t_b, s) for s in range(stages)):
        raise ConfigError(f"t_w is a part of t_b: got t_w={t_w}, t_b={costs.t_b}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one stage of the model, in any unit.

    Attributes:
      activations: act, of one micro-batch, held until its backward pass.
      peak_errors: peak_err, what a backward pass needs temporarily.
      saved_errors: save_err, output gradients of one micro-batch, saved for curvature.
      factors: kron, all Kronecker factors; their inverses need as much again.
      params: param, the parameters; their gradients need as much again.
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
    """Returns the memory that a device needs while K-FAC's work fills its bubbles.

    act · n + peak_err + save_err · m + 2 kron + 2 param · replicas. The paper uses the
    number of micro-batches N for n and m, which is exact for GPipe and an upper bound
    for the other schedules.

    Args:
      parts: memory of one stage.
      live_activations: n, see `Timeline.live_activations`.
      live_errors: m, see `FilledSchedule.live_errors`.
      replicas: stages that a device holds, 2 for Chimera.
      recompute: the activations of only one micro-batch exist at a time, so n = 1.

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


def stage_activations(
    depth: int,
    width: int,
    *,
    rows: int,
    time: int,
    heads: int,
    in_flight: int = 1,
    remat_every: int = 1,
    itemsize: int = 4,
) -> float:
    """Returns bytes of activations of a stage that recomputes its blocks.

    Of each micro-batch that is in flight every k-th block's input is kept. A backward
    pass computes k blocks again, of which it keeps the inputs, and then one after the
    other all that a block needs: n L/k + k inputs, and one block. With n L blocks of
    the whole model in all stages' flight, the least is near k = √(n L).

    A block of attention and a feed-forward part of 4 · width, of which nothing is
    fused, has 16 arrays like its input and two of weights of attention, and a slope of
    each.

    Args:
      depth: L, blocks of the stage.
      width: features of a token.
      rows: sequences of a micro-batch.
      time: tokens of a sequence.
      heads: of attention.
      in_flight: n, micro-batches whose backward pass is still to come.
      remat_every: k.
      itemsize: bytes of a number.

    Raises:
      ConfigError: a number below 1, or k does not divide L.

    References:
      Singh and Bhatele, AxoNN, IPDPS 2022, on recomputation.

    Examples:
      >>> sizes = {"width": 8, "rows": 1, "time": 16, "heads": 1}
      >>> best = min((1, 2, 4, 8, 16), key=lambda k: stage_activations(
      ...     16, **sizes, remat_every=k))
      >>> best
      4
    """
    counts = {"depth": depth, "width": width, "rows": rows, "time": time}
    checks.require_count(1, **counts, heads=heads, itemsize=itemsize)
    checks.require_count(1, in_flight=in_flight, remat_every=remat_every)
    rule = "remat_every must divide the depth"
    checks.require(depth % remat_every == 0, rule, depth=depth, remat_every=remat_every)
    one = rows * time * width * itemsize
    block = 2 * (16 + 2 * heads * time / width)
    return one * (in_flight * depth / remat_every + remat_every + block)


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
    """Returns the bar of an op in a step that begins at `step_start`."""
    op = span.op
    # Chimera's second pipeline runs from the last device up to the first.
    kind = op.kind if op.replica == 0 else f"{op.kind} up"
    times = step_start + span.start, step_start + span.end
    return Bar(op.device, *times, kind, str(op.micro_batch))


def share(part: Duration, whole: Duration) -> float:
    """Returns `part / whole`, and 1 if `whole` is 0."""
    return part / whole if whole else 1.0


def at_stage(value: PerStage, stage: int) -> Duration:
    """Returns the value for one stage of a number or of one number per stage."""
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
