"""The greedy walk behind `assign`: an idle device takes the first task that fits."""

import collections
import heapq
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from hpcjax.perf.kfac_work import BEFORE, Factor, Task, TaskKind
from hpcjax.perf.pipeline import Duration, Timeline

Gate = Literal["device", "layer"]
Gap = tuple[Duration, Duration]
# A step of the refresh, and a time from its begin.
When = tuple[int, Duration]
# Tasks of a device that follow one another, such as the panels of an inversion.
Chain = collections.deque[Task]


class Placed(NamedTuple):
    """A task with its place in a refresh.

    Attributes:
      step: of the refresh, from 0.
      start: when it begins, from the begin of that step.
      end: when it ends.
      task: what is done.
    """

    step: int
    start: Duration
    end: Duration
    task: Task


class Filler:
    """Tasks that wait, tasks that are placed, and when what they need is done.

    Attributes:
      made: what is placed, in order of time.
      left: number of tasks that wait.
    """

    def __init__(
        self, timeline: Timeline, tasks: Sequence[Task], margin: Duration, gate: Gate
    ) -> None:
        devices = range(timeline.schedule.devices)
        self.margin, self.gate, self.makespan = margin, gate, timeline.makespan
        self.gaps: list[tuple[Gap, ...]] = [timeline.bubbles(d) for d in devices]
        self.passed = {span.op: span.end for row in timeline.spans for span in row}
        self.chains = [_chains(tasks, device) for device in devices]
        self.made: list[Placed] = []
        self.left = len(tasks)
        # What syncs and inversions wait for: tasks left of a factor and on a device,
        # and when the last one placed of a factor ends.
        self.open = collections.Counter((t.kind, t.factor) for t in tasks)
        self.open_here = collections.Counter((t.kind, t.device) for t in tasks)
        self.closed: dict[tuple[TaskKind, Factor], When] = {}

    def fill(self, step: int) -> None:
        """Places what fits into the bubbles of one step."""
        self._walk(step, self.gaps, long=False)

    def append(self, step: int) -> None:
        """Places after a step's pipeline what may run then and fits into no bubble."""
        rest: Gap = (self.makespan, math.inf)
        self._walk(step, [(rest,)] * len(self.gaps), long=True)

    def _walk(self, step: int, gaps: list[tuple[Gap, ...]], *, long: bool) -> None:
        """Visits every time at which a gap begins or a task ends, in order.

        A task may wait for the end of another device's, so all idle devices are looked
        at each time.
        """
        pending = [collections.deque(row) for row in gaps]
        busy: list[Duration] = [0] * len(gaps)
        times: list[Duration] = [start for row in gaps for start, _ in row]
        heapq.heapify(times)
        while times and self.left:
            now = heapq.heappop(times)
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
        start, stretch = now[1], 1 + self.margin
        for chain in self.chains[device]:
            task = chain[0]
            fits = start + task.duration * stretch < end
            if fits and (not long or self._too_long(task)) and self._may_run(task, now):
                return chain
        return None

    def _place(self, chain: Chain, step: int, now: Duration) -> Duration:
        task = chain.popleft()
        if not chain:
            # By identity: every empty deque is equal to this one.
            own = self.chains[task.device]
            own[:] = [other for other in own if other is not chain]
        end = now + task.duration
        key = task.kind, task.factor
        self.made.append(Placed(step, now, end, task))
        self.left -= 1
        self.open[key] -= 1
        self.open_here[task.kind, task.device] -= 1
        self.closed[key] = max((step, end), self.closed.get(key, (0, 0)))
        return end

    def _too_long(self, task: Task) -> bool:
        needed = task.duration * (1 + self.margin)
        return not any(start + needed < end for start, end in self.gaps[task.device])

    def _may_run(self, task: Task, now: When) -> bool:
        if task.kind.startswith("curv"):
            return (0, self.passed[task.passing]) <= now
        before = BEFORE[task.kind]
        if self.gate == "device" and any(
            self.open_here[kind, task.device] for kind in before
        ):
            return False
        return all(
            not self.open[kind, task.factor]
            and self.closed.get((kind, task.factor), now) <= now
            for kind in before
        )


def _chains(tasks: Sequence[Task], device: int) -> list[Chain]:
    found: dict[tuple[str, int, int, int], Chain] = {}
    for task in tasks:
        if task.device == device:
            key = task.kind, task.replica, task.stage, task.layer
            found.setdefault(key, collections.deque()).append(task)
    return list(found.values())
