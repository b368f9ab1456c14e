"""The greedy search behind `assign`: an idle device takes the first task that fits."""

import collections
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hpcjax.core.errors import ConfigError
from hpcjax.cost.kfac_work import BEFORE, Factor, Task, TaskKind
from hpcjax.cost.pipeline import Duration, Timeline

Gate = Literal["device", "layer"]
_SLACK = 1e-9
Gap = tuple[Duration, Duration]
# A step of the refresh and a time after its start; compares in order of time.
When = tuple[int, Duration]
# Tasks of a device that must run in order, such as the panels of an inversion.
Chain = collections.deque[Task]


class Placed(NamedTuple):
    """A task with its time in a refresh.

    Attributes:
      step: of the refresh, from 0.
      start: when it begins, measured from the start of that step.
      end: when it ends, measured likewise.
      task: the task.
    """

    step: int
    start: Duration
    end: Duration
    task: Task


class Filler:
    """The state of the search: waiting tasks, placed tasks, and finished factors.

    Attributes:
      placed: tasks with their times, in order of time.
      waiting: number of tasks that are not placed.
    """

    def __init__(
        self, timeline: Timeline, tasks: Sequence[Task], margin: Duration, gate: Gate
    ) -> None:
        devices = range(timeline.schedule.devices)
        self.margin, self.gate, self.makespan = margin, gate, timeline.makespan
        self.gaps: list[tuple[Gap, ...]] = [timeline.bubbles(d) for d in devices]
        self.pass_ends = {span.op: span.end for row in timeline.spans for span in row}
        self.chains = [_group_chains(tasks, device) for device in devices]
        self.placed: list[Placed] = []
        self.waiting = len(tasks)
        # What syncs and inversions wait for: the unplaced tasks of a factor and of a
        # device, and when the last placed task of a factor ends.
        self.unplaced = collections.Counter((t.kind, t.factor) for t in tasks)
        self.unplaced_here = collections.Counter((t.kind, t.device) for t in tasks)
        self.finished: dict[tuple[TaskKind, Factor], When] = {}

    def fill(self, step: int) -> None:
        """Places tasks into the bubbles of one step."""
        self._walk(step, self.gaps, long=False)

    def append(self, step: int) -> None:
        """Places tasks that fit into no bubble after the pipeline of one step."""
        rest: Gap = (self.makespan, math.inf)
        self._walk(step, [(rest,)] * len(self.gaps), long=True)

    def _walk(self, step: int, gaps: list[tuple[Gap, ...]], *, long: bool) -> None:
        """Places tasks at every time at which a gap begins or a task ends, in order.

        Args:
          step: of the refresh.
          gaps: idle times of each device.
          long: place only tasks that fit into no bubble.
        """
        pending = [collections.deque(row) for row in gaps]
        busy: list[Duration] = [0] * len(gaps)
        times: list[Duration] = [start for row in gaps for start, _ in row]
        heapq.heapify(times)
        while times and self.waiting:
            now = heapq.heappop(times)
            # All idle devices, not only the one of this event: a task may have waited
            # for the end of one on another device.
            for device, row in enumerate(pending):
                while row and row[0][1] <= now:
                    row.popleft()
                while row and row[0][0] <= now and busy[device] <= now:
                    chain = self._first(device, (step, now), row[0][1], long)
                    if chain is None:
                        break
                    busy[device] = self._place(chain, step, now)
                    heapq.heappush(times, busy[device])

    def _first(self, device: int, now: When, end: Duration, long: bool) -> Chain | None:
        """Returns the first chain whose next task may run now and fits until `end`."""
        start, stretch = now[1], 1 + self.margin
        for chain in self.chains[device]:
            task = chain[0]
            fits = start + task.duration * stretch < end
            wanted = not long or self._fits_no_bubble(task)
            if fits and wanted and self._may_run(task, now):
                return chain
        return None

    def _place(self, chain: Chain, step: int, now: Duration) -> Duration:
        """Places the first task of a chain and returns when it ends."""
        task = chain.popleft()
        if not chain:
            # Compared by identity, since empty deques are equal to each other.
            own = self.chains[task.device]
            own[:] = [other for other in own if other is not chain]
        end = now + task.duration
        key = task.kind, task.factor
        self.placed.append(Placed(step, now, end, task))
        self.waiting -= 1
        self.unplaced[key] -= 1
        self.unplaced_here[task.kind, task.device] -= 1
        self.finished[key] = max((step, end), self.finished.get(key, (0, 0)))
        return end

    def _fits_no_bubble(self, task: Task) -> bool:
        needed = task.duration * (1 + self.margin)
        return not any(start + needed < end for start, end in self.gaps[task.device])

    def _may_run(self, task: Task, now: When) -> bool:
        """Returns whether what a task needs is done by now."""
        if task.kind.startswith("curv"):
            # Curvature is that of the first step's micro-batches.
            return (0, self.pass_ends[task.needed_pass]) <= now
        before = BEFORE[task.kind]
        if self.gate == "device" and any(
            self.unplaced_here[kind, task.device] for kind in before
        ):
            return False
        # Placed is not enough: the last task, maybe another device's, must have ended.
        # Factors without tasks of a kind (no sync) have no entry, and need not wait.
        return all(
            not self.unplaced[kind, task.factor]
            and self.finished.get((kind, task.factor), now) <= now
            for kind in before
        )


def check_placed(timeline: Timeline, placed: Sequence[Placed]) -> None:
    """Checks a refresh, whoever has placed its tasks.

    Args:
      timeline: one step of the pipeline.
      placed: all tasks, those behind the pipeline too.

    Raises:
      ConfigError: a device does two things at a time, a task begins before what it
        needs has ended, or a sync or an inverse is of curvature that is never taken;
        names them.
    """
    # What sums of floating-point times may be off.
    slack = _SLACK * timeline.makespan
    finished: dict[tuple[TaskKind, Factor], When] = {}
    for it in placed:
        key = it.task.kind, it.task.factor
        finished[key] = max((it.step, it.end), finished.get(key, (0, 0)))
    rows = collections.defaultdict(list)
    passes = {span.op: span.end for row in timeline.spans for span in row}
    for it in placed:
        rows[it.step, it.task.device].append((it.start, it.end, it.task))
        # Only syncs may be missing: those that take no time are no tasks.
        for kind in BEFORE[it.task.kind]:
            if kind.startswith("curv") and (kind, it.task.factor) not in finished:
                raise ConfigError(f"{it.task} needs {kind}, which is never placed")
        needed: list[tuple[object, When]] = [
            (kind, finished[kind, it.task.factor])
            for kind in BEFORE[it.task.kind]
            if (kind, it.task.factor) in finished
        ]
        if it.task.kind.startswith("curv"):
            op = it.task.needed_pass
            needed.append((op, (0, passes.get(op, math.inf))))
        for what, (step, end) in needed:
            if (it.step, it.start + slack) < (step, end):
                raise ConfigError(
                    f"{it.task} begins at {it.start} of step {it.step}, before its "
                    f"{what} ends, at {end} of step {step}"
                )
    for (step, device), row in rows.items():
        busy = [*(span[:3] for span in timeline.spans[device]), *row]
        busy.sort(key=lambda one: one[:2])
        for (_, end, first), (start, _, second) in itertools.pairwise(busy):
            if start + slack < end:
                raise ConfigError(
                    f"device {device} does two things at a time in step {step}: "
                    f"{second} begins at {start}, and {first} ends at {end}"
                )


def _group_chains(tasks: Sequence[Task], device: int) -> list[Chain]:
    """Groups a device's tasks that differ only in their unit, in the order given."""
    chains: dict[tuple[str, int, int, int], Chain] = {}
    for task in tasks:
        if task.device == device:
            key = task.kind, task.replica, task.stage, task.layer
            chains.setdefault(key, collections.deque()).append(task)
    return list(chains.values())
