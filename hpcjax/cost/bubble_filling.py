"""Places K-FAC's work into the bubbles of a pipeline.

A refresh of all curvature and inverses spreads over `period` steps, as many as its work
needs; then the next refresh begins.

References:
  Osawa, Li and Hoefler, PipeFisher, MLSys 2023, section 3.3.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.cost.filler import Filler, Gate, Placed, check_placed
from hpcjax.cost.kfac_work import BEFORE, Factor, Task, panels
from hpcjax.cost.pipeline import (
    Duration,
    PerStage,
    Timeline,
    check_durations,
    check_stages,
    most_at_once,
    op_bar,
    share,
)
from hpcjax.cost.timelines import Bar, chrome_trace
from hpcjax.sharding.schedules import Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilledSchedule:
    """A refresh of K-FAC's curvature and inverses inside a pipeline's steps.

    Attributes:
      timeline: one step of the pipeline.
      placed: the tasks in the bubbles of each device, in order of time.
      unplaced: tasks that fit into no bubble of their device; they run after the
        pipeline of their step, which they lengthen.

    Raises:
      ConfigError: tasks overlap, begin before what they need has ended, or need
        curvature that is never taken.
    """

    timeline: Timeline
    placed: tuple[tuple[Placed, ...], ...]
    unplaced: tuple[Placed, ...]

    def __post_init__(self) -> None:
        check_placed(self.timeline, tuple(self._all_placed()))

    @functools.cached_property
    def period_per_device(self) -> tuple[int, ...]:
        """Number of steps until each device has done its work of a refresh."""
        last = [0] * len(self.placed)
        for it in self._all_placed():
            last[it.task.device] = max(last[it.task.device], it.step)
        return tuple(1 + step for step in last)

    @property
    def period(self) -> int:
        """Steps of a refresh; all devices begin the next one together."""
        return max(self.period_per_device)

    @property
    def added(self) -> tuple[Duration, ...]:
        """Time that `unplaced` tasks add to each step of a refresh."""
        pipe = self.timeline.makespan
        return tuple(
            max((it.end - pipe for it in self.unplaced if it.step == step), default=0)
            for step in range(self.period)
        )

    @property
    def utilization_per_device(self) -> tuple[float, ...]:
        """Share of its `period_per_device` steps that each device computes.

        Preconditioning is not counted.
        """
        pipe = self.timeline.makespan
        return tuple(
            self._busy_time(device, steps)
            / (pipe * steps + self._unplaced_time(device))
            for device, steps in enumerate(self.period_per_device)
        )

    @property
    def utilization(self) -> float:
        """Share of the common period that devices compute, mean over devices.

        Passes of the pipeline and tasks in its bubbles count as computing. `unplaced`
        tasks do not, but lengthen the period. Preconditioning is left out of both.
        """
        whole = self.timeline.makespan * self.period + sum(self.added)
        devices = range(len(self.placed))
        busy = sum(self._busy_time(device, self.period) for device in devices)
        return share(busy, whole * len(devices))

    @property
    def ratio(self) -> float:
        """K-FAC's work of a refresh over the idle time of one step, of all devices."""
        idle = sum(
            end - start
            for device in range(len(self.placed))
            for start, end in self.timeline.bubbles(device)
        )
        work = sum(it.task.duration for it in self._all_placed())
        return work / idle if idle else float("inf") if work else 0.0

    @functools.cached_property
    def visible(self) -> Mapping[int, tuple[Factor, ...]]:
        """Inverses by the step of a refresh whose flush is the first to use them.

        This is the step in which the last panel of the inversion runs.
        """
        finished: dict[Factor, int] = {}
        for it in self._all_placed():
            if it.task.kind.startswith("inv"):
                factor = it.task.factor
                finished[factor] = max(it.step, finished.get(factor, 0))
        return {
            step: tuple(sorted(f for f, at in finished.items() if at == step))
            for step in range(self.period)
        }

    def inverse_ages(self, step: int) -> dict[Factor, int]:
        """Returns the age in steps of the curvature behind each inverse at a flush.

        Step 1 refreshes everything at once, outside the bubbles. The first refresh in
        the bubbles also begins with step 1: step t is step (t − 1) mod `period` of a
        refresh. An inverse finished in step j of a refresh is used by `period` flushes,
        the first of which is that of step j.

        Args:
          step: of the training, from 1.

        Raises:
          ConfigError: a step below 1.
        """
        if step < 1:
            raise ConfigError(f"steps are counted from 1: got step={step}")
        refresh, place = divmod(step - 1, self.period)
        ages = {}
        for finished, factors in self.visible.items():
            # Before its step of this refresh, an inverse is that of the refresh before.
            source = refresh - (place < finished)
            # Curvature is of a refresh's first step, which is step source · period + 1.
            age = step - 1 - source * self.period
            # No inverse is older than the full refresh in step 1.
            ages |= dict.fromkeys(factors, min(age, step - 1))
        return ages

    def live_inputs(self, device: int) -> int:
        """Returns the most micro-batches whose layer inputs a device saves at a time.

        They are saved from the forward pass until they are added to A.
        """
        return self._live(device, "F", "curvA")

    def live_errors(self, device: int) -> int:
        """Returns the most micro-batches whose output gradients are saved at a time.

        They are saved from the backward pass until they are added to B.
        """
        return self._live(device, "B", "curvB")

    def steps(self, device: int) -> tuple[tuple[Op | Task, ...], ...]:
        """Returns a device's ops and tasks in each step of a refresh, in order."""
        rows = []
        for step in range(self.period):
            tasks = [
                (it.start, it.end, it.task)
                for it in self._all_placed()
                if it.step == step and it.task.device == device
            ]
            row = sorted([*self.timeline.spans[device], *tasks], key=lambda it: it[:2])
            rows.append(tuple(work for *_, work in row))
        return tuple(rows)

    def bars(self, preconditioning: Sequence[Duration] = ()) -> tuple[Bar, ...]:
        """Returns the bars of a whole refresh, to be drawn.

        Args:
          preconditioning: time of each device at the end of a step, see
            `cost.preconditioning`.
        """
        bars: list[Bar] = []
        start: Duration = 0
        for step, added in enumerate(self.added):
            bars += [op_bar(s, start) for row in self.timeline.spans for s in row]
            bars += [
                _task_bar(it, start) for it in self._all_placed() if it.step == step
            ]
            flush = start + self.timeline.makespan + added
            bars += [
                Bar(device, flush, flush + duration, "prec")
                for device, duration in enumerate(preconditioning)
            ]
            start = flush + max(preconditioning, default=0)
        return tuple(bars)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns the bars as JSON values for Perfetto or `chrome://tracing`."""
        return chrome_trace(self.bars())

    def _all_placed(self) -> Iterable[Placed]:
        return (*(it for row in self.placed for it in row), *self.unplaced)

    def _unplaced_time(self, device: int) -> Duration:
        return sum(it.task.duration for it in self.unplaced if it.task.device == device)

    def _busy_time(self, device: int, steps: int) -> Duration:
        """Returns the time of a device's passes in `steps` and its placed tasks."""
        work = sum(it.task.duration for it in self.placed[device])
        return self.timeline.busy(device) * steps + work

    def _live(self, device: int, pass_kind: str, task_kind: str) -> int:
        """Counts the micro-batches between a pass and the last task that needs it."""
        pipe = self.timeline.makespan
        last_use: dict[tuple[int, int, int], Duration] = {}
        for it in self._all_placed():
            task = it.task
            if task.device == device and task.kind == task_kind:
                key = task.replica, task.stage, task.unit
                # All intervals start in step 0. Of an end in a later step it matters
                # only that it is after every start, so that `added` can be left out.
                end = it.step * pipe + it.end
                last_use[key] = max(end, last_use.get(key, 0))
        ops = ((span.start, span.op) for span in self.timeline.spans[device])
        return most_at_once(
            (start, last_use[op.replica, op.stage, op.micro_batch])
            for start, op in ops
            if op.kind == pass_kind
            and (op.replica, op.stage, op.micro_batch) in last_use
        )


class TrainTime(NamedTuple):
    """Simulated time of training to the same loss without and with K-FAC.

    Attributes:
      base: time without K-FAC.
      kfac: time with K-FAC's work in the bubbles.
      ratio: kfac / base.
    """

    base: Duration
    kfac: Duration
    ratio: float


def assign(
    timeline: Timeline,
    tasks: Iterable[Task],
    *,
    margin: Duration = 0.05,
    gate: Gate = "device",
    panel: PerStage | None = None,
) -> FilledSchedule:
    """Places the tasks of one refresh greedily into a pipeline's bubbles.

    Bubbles are visited in order of time, and each takes the first of `tasks` that may
    run and fits, until none does. A curvature task needs the forward (A) or backward
    pass (B) of its micro-batch in the first step. A sync needs the curvature of its
    factor from all replicas; an inversion needs the sync, or the curvature if there is
    no sync. The remaining tasks go into the following steps. A task that is too long
    for every bubble of its device runs after the first step in which it may run.

    The released code then revisits earlier bubbles as if all passes were done. With the
    dependencies as above this would place nothing more.

    Args:
      timeline: one step of the pipeline.
      tasks: as from `kfac_tasks`; earlier ones are placed first.
      margin: spare time that a task must have in a bubble, relative to its duration.
      gate: with `"device"`, as in the paper's code, a sync or inversion also waits
        until the device has no unplaced task of the kinds that precede it (curvature,
        and for inversions sync, of A or of B); with `"layer"` it waits for its own
        factor only.
      panel: longest piece of an inversion, which is split into equal ones; one number,
        or one for each stage. None leaves inversions whole.

    Raises:
      ConfigError: a negative margin or panel, an unknown gate, tasks that do not belong
        to the schedule or have an invalid duration, or tasks that can never be placed.

    Examples:
      >>> from hpcjax import cost, sharding
      >>> schedule = sharding.gpipe(2, 2)
      >>> line = cost.simulate(schedule, cost.StageCosts(t_f=4, t_b=8))
      >>> costs = cost.KfacCosts(t_curv=1, t_inv=6)
      >>> tasks = cost.kfac_tasks(schedule, [[cost.Layer(8, 8)]] * 2, costs)
      >>> filled = assign(line, tasks)
      >>> filled.period, round(filled.utilization, 3), filled.unplaced
      (2, 0.778, ())
    """
    if gate not in ("device", "layer"):
        raise ConfigError(f"gate must be 'device' or 'layer': got {gate!r}")
    check_durations("margin", margin)
    check_stages("panel", panel, timeline.schedule.stages)
    if panel is not None and min(panel if isinstance(panel, tuple) else [panel]) <= 0:
        raise ConfigError(f"panel must be positive, or None: got {panel}")
    tasks = tuple(tasks)
    _check_tasks(timeline, tasks)
    split = [part for task in tasks for part in panels(task, panel)]
    filler = Filler(timeline, split, margin, gate)
    step = 0
    while filler.waiting:
        before = filler.waiting
        filler.fill(step)
        filler.append(step)
        # In the first step all tasks may wait for a last pass. Later, passes are done,
        # and some task has all that it needs: a step that places none never will.
        if step and filler.waiting == before:
            raise ConfigError(
                f"{before} tasks fit nowhere, not even after the pipeline: got "
                f"margin={margin}, {len(tasks)} tasks"
            )
        step += 1
    inside = [it for it in filler.placed if it.start < timeline.makespan]
    after = [it for it in filler.placed if it.start >= timeline.makespan]
    return FilledSchedule(
        timeline=timeline,
        placed=tuple(
            tuple(it for it in inside if it.task.device == device)
            for device in range(timeline.schedule.devices)
        ),
        unplaced=tuple(after),
    )


def _check_tasks(timeline: Timeline, tasks: Iterable[Task]) -> None:
    held = {
        (device, replica, stage)
        for replica, row in enumerate(timeline.schedule.holders)
        for stage, device in enumerate(row)
    }
    ops = {span.op for row in timeline.spans for span in row}
    for task in tasks:
        if task.kind not in BEFORE:
            raise ConfigError(f"a task's kind is one of {list(BEFORE)}: got {task}")
        check_durations(f"the duration of {task}", task.duration)
        if (task.device, task.replica, task.stage) not in held:
            raise ConfigError(
                f"device {task.device} of this pipeline does not hold stage "
                f"{task.stage} of replica {task.replica}: got {task}"
            )
        if task.kind.startswith("curv") and task.needed_pass not in ops:
            raise ConfigError(f"this pipeline has no {task.needed_pass}: got {task}")


def _task_bar(it: Placed, step_start: Duration) -> Bar:
    task = it.task
    times = step_start + it.start, step_start + it.end
    label = f"{task.stage}.{task.layer}.{task.unit}"
    return Bar(task.device, *times, task.kind, label)


def train_time(
    steps_base: int, steps_kfac: int, t_pipe: Duration, t_prec: Duration
) -> TrainTime:
    """Returns the time of training without and with K-FAC in the bubbles.

    Args:
      steps_base: steps to the target loss without K-FAC.
      steps_kfac: steps to the same loss with K-FAC.
      t_pipe: time of a pipelined step.
      t_prec: time of preconditioning at the end of a step.

    Examples:
      >>> train_time(7038, 2961, 100, 5).ratio < 0.45
      True
    """
    base, kfac = steps_base * t_pipe, steps_kfac * (t_pipe + t_prec)
    return TrainTime(base, kfac, kfac / base)
