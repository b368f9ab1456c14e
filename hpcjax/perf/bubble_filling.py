"""K-FAC's work placed into the bubbles of a pipeline, over as many steps as it needs.

One refresh of all curvature and inverses takes `period` steps; then the next begins.

References:
  Osawa, Li and Hoefler, PipeFisher, MLSys 2023, section 3.3.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.perf.filler import Filler, Gate, Placed
from hpcjax.perf.kfac_work import BEFORE, Factor, Task, panels
from hpcjax.perf.pipeline import (
    Duration,
    PerStage,
    Timeline,
    check_durations,
    check_stages,
    most_at_once,
    op_bar,
    share,
)
from hpcjax.perf.timelines import Bar, chrome_trace
from hpcjax.sharding.schedules import Op


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilledSchedule:
    """A refresh of K-FAC's curvature and inverses inside a pipeline's steps.

    Attributes:
      timeline: one step of the pipeline.
      placed: of each device, what is in its bubbles, in order of time.
      unplaced: what fits into no bubble of its device: it runs after the pipeline of
        the step it is placed at, and lengthens that step.
    """

    timeline: Timeline
    placed: tuple[tuple[Placed, ...], ...]
    unplaced: tuple[Placed, ...]

    @functools.cached_property
    def period_per_device(self) -> tuple[int, ...]:
        """Steps in which each device has work of a refresh, from the first one on."""
        last = [0] * len(self.placed)
        for it in self._all():
            last[it.task.device] = max(last[it.task.device], it.step)
        return tuple(1 + step for step in last)

    @property
    def period(self) -> int:
        """Steps that a refresh takes: all devices begin the next one together."""
        return max(self.period_per_device)

    @property
    def added(self) -> tuple[Duration, ...]:
        """How much longer than the pipeline each step of a refresh is."""
        pipe = self.timeline.makespan
        return tuple(
            max((it.end - pipe for it in self.unplaced if it.step == step), default=0)
            for step in range(self.period)
        )

    @property
    def utilization_per_device(self) -> tuple[float, ...]:
        """Share of its own steps that each device computes, preconditioning aside."""
        pipe = self.timeline.makespan
        return tuple(
            self._filled(device, steps) / (pipe * steps + self._after(device))
            for device, steps in enumerate(self.period_per_device)
        )

    @property
    def utilization(self) -> float:
        """Share of the common period that devices compute, mean over devices.

        Counts the pipeline and what is in its bubbles. Preconditioning is in neither
        part; `unplaced` work is time that passes, not filling.
        """
        whole = self.timeline.makespan * self.period + sum(self.added)
        devices = range(len(self.placed))
        filled = sum(self._filled(device, self.period) for device in devices)
        return share(filled, whole * len(devices))

    @property
    def ratio(self) -> float:
        """K-FAC's work of a refresh over the idle time of a step, all devices."""
        idle = sum(
            end - start
            for device in range(len(self.placed))
            for start, end in self.timeline.bubbles(device)
        )
        work = sum(it.task.duration for it in self._all())
        return work / idle if idle else float("inf") if work else 0.0

    @functools.cached_property
    def visible(self) -> Mapping[int, tuple[Factor, ...]]:
        """The inverses that the flush of each step of a refresh is the first to use.

        An inverse is there as soon as the last part of it is; see `inverse_ages`.
        """
        finished: dict[Factor, int] = {}
        for it in self._all():
            if it.task.kind.startswith("inv"):
                factor = it.task.factor
                finished[factor] = max(it.step, finished.get(factor, 0))
        return {
            step: tuple(sorted(f for f, at in finished.items() if at == step))
            for step in range(self.period)
        }

    def inverse_ages(self, step: int) -> dict[Factor, int]:
        """Returns how many steps old the curvature behind each inverse is at a flush.

        Step 1 refreshes everything at once, outside the bubbles, and the first refresh
        in the bubbles begins with it: step t is step (t − 1) mod `period` of one. An
        inverse finished in step j of a refresh serves the next `period` flushes.

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
            began = refresh - (place < finished)
            age = step - 1 - began * self.period
            ages |= dict.fromkeys(factors, min(age, step - 1))
        return ages

    def live_inputs(self, device: int) -> int:
        """Returns for how many micro-batches layer inputs are kept at most at once.

        Kept for curvature: from the forward pass until their share of A is added.
        """
        return self._live(device, "F", "curvA")

    def live_errors(self, device: int) -> int:
        """Returns for how many micro-batches output gradients are kept at most at once.

        Kept for curvature: from the backward pass until their share of B is added.
        """
        return self._live(device, "B", "curvB")

    def steps(self, device: int) -> tuple[tuple[Op | Task, ...], ...]:
        """Returns what a device does in each step of a refresh, in order."""
        rows = []
        for step in range(self.period):
            own = [
                (it.start, it.end, it.task)
                for it in self._all()
                if it.step == step and it.task.device == device
            ]
            row = sorted([*self.timeline.spans[device], *own], key=lambda it: it[:2])
            rows.append(tuple(what for *_, what in row))
        return tuple(rows)

    def bars(self, preconditioning: Sequence[Duration] = ()) -> tuple[Bar, ...]:
        """Returns what is drawn of a whole refresh.

        Args:
          preconditioning: of each device at the end of a step, see `preconditioning`.
        """
        bars: list[Bar] = []
        start: Duration = 0
        for step, added in enumerate(self.added):
            bars += [op_bar(s, start) for row in self.timeline.spans for s in row]
            bars += [_task_bar(it, start) for it in self._all() if it.step == step]
            flush = start + self.timeline.makespan + added
            bars += [
                Bar(device, flush, flush + duration, "prec")
                for device, duration in enumerate(preconditioning)
            ]
            start = flush + max(preconditioning, default=0)
        return tuple(bars)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns it as JSON values for Perfetto or `chrome://tracing`."""
        return chrome_trace(self.bars())

    def _all(self) -> Iterable[Placed]:
        return (*(it for row in self.placed for it in row), *self.unplaced)

    def _after(self, device: int) -> Duration:
        return sum(it.task.duration for it in self.unplaced if it.task.device == device)

    def _filled(self, device: int, steps: int) -> Duration:
        work = sum(it.task.duration for it in self.placed[device])
        return self.timeline.busy(device) * steps + work

    def _live(self, device: int, passing: str, kind: str) -> int:
        pipe = self.timeline.makespan
        used: dict[tuple[int, int, int], Duration] = {}
        for it in self._all():
            task = it.task
            if task.device == device and task.kind == kind:
                key = task.replica, task.stage, task.unit
                # Passes of the first step only: how long later ones are is no matter.
                end = it.step * pipe + it.end
                used[key] = max(end, used.get(key, 0))
        ops = ((span.start, span.op) for span in self.timeline.spans[device])
        return most_at_once(
            (start, used[op.replica, op.stage, op.micro_batch])
            for start, op in ops
            if op.kind == passing and (op.replica, op.stage, op.micro_batch) in used
        )


class TrainTime(NamedTuple):
    """Simulated time of two trainings to the same loss.

    Attributes:
      base: without K-FAC.
      kfac: with it, its work in the bubbles.
      ratio: of the second to the first.
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
    """Places the tasks of one refresh into a pipeline's bubbles, greedily.

    Steps are walked through in time; in each bubble the first of `tasks` that may run
    and fits is placed, until none does. The j-th curvature task of a layer needs the
    j-th forward (A) or backward pass (B) of its replica in the first step; a sync needs
    the curvature of its factor from all replicas, an inversion the sync, or else the
    curvature. What is left goes on in the next step. A task that fits into no bubble of
    its device runs after the first step in which it may.

    The released code also looks at bubbles before the current one again, as if all
    passes were done; what depends on passes or tasks can never be early, so that this
    would place nothing here.

    Args:
      timeline: one step of the pipeline.
      tasks: see `kfac_tasks`; in order of preference.
      margin: share of its duration that a task needs besides in a bubble.
      gate: with `"device"`, which is how the paper's code does it, a sync or inversion
        also waits until no task of its side that comes before it (curvature, and for
        inversions sync) is left on the device; with `"layer"` it does not.
      panel: longest piece of an inversion, which is split into equal ones; one number
        or one for each stage. None leaves inversions whole.

    Raises:
      ConfigError: a negative margin or panel, an unknown gate, tasks of another
        schedule or with an impossible duration, or none that can ever be placed.

    Examples:
      >>> from hpcjax import perf, sharding
      >>> schedule = sharding.gpipe(2, 2)
      >>> line = perf.simulate(schedule, perf.StageCosts(t_f=4, t_b=8))
      >>> costs = perf.KfacCosts(t_curv=1, t_inv=6)
      >>> tasks = perf.kfac_tasks(schedule, [[perf.Layer(8, 8)]] * 2, costs)
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
    while filler.left:
        before = filler.left
        filler.fill(step)
        filler.append(step)
        # In the first step all may wait for a last pass; later one of them can run.
        if step and filler.left == before:
            raise ConfigError(
                f"{before} tasks fit nowhere, not even after the pipeline: got "
                f"margin={margin}, {len(tasks)} tasks"
            )
        step += 1
    inside = [it for it in filler.made if it.start < timeline.makespan]
    after = [it for it in filler.made if it.start >= timeline.makespan]
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
        if task.kind.startswith("curv") and task.passing not in ops:
            raise ConfigError(f"this pipeline has no {task.passing}: got {task}")


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
      steps_base: steps without it.
      steps_kfac: steps with it.
      t_pipe: time of a pipelined step.
      t_prec: preconditioning at its end.

    Examples:
      >>> train_time(7038, 2961, 100, 5).ratio < 0.45
      True
    """
    base, kfac = steps_base * t_pipe, steps_kfac * (t_pipe + t_prec)
    return TrainTime(base, kfac, kfac / base)
