"""A pipeline's schedule run by processes: each does its own ops as messages arrive.

Nothing is compiled across devices, so a device that waits is free: what fills its
bubbles runs until the message that it waits for is there.

References:
  Osawa, Li and Hoefler, PipeFisher, MLSys 2023, section 3.2.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core.errors import HpcjaxError
from hpcjax.hostcomm.channels import Channel, Message
from hpcjax.perf.kfac_work import Task
from hpcjax.perf.timelines import Bar
from hpcjax.sharding.schedules import Op, Schedule

Work = Op | Task
Row = Sequence[Work]
_FLUSH = "flush"


class Ran(NamedTuple):
    """A piece of work with the seconds at which it began and ended.

    Attributes:
      step: from 0.
      start: on a clock that all processes share.
      end: on the same.
      work: what was done.
    """

    step: int
    start: float
    end: float
    work: Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """What a device does, apart from waiting; nothing returns before it is done.

    Attributes:
      run_op: `(op, received) -> result`, both None where nothing is sent.
      run_task: does a task of K-FAC.
      flush: `(step)`, after all passes of a step.
    """

    run_op: Callable[[Op, np.ndarray | None], np.ndarray | None]
    run_task: Callable[[Task], Any]
    flush: Callable[[int], Any]


class HostPipeline:
    """One device of a pipeline, in a process of its own.

    Attributes:
      ran: ops and tasks of all steps, in order.
      steps: seconds at which each step began and ended here, flush included.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: int,
        links: Mapping[int, Channel],
        work: DeviceWork,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Connects a device.

        Args:
          schedule: of all devices.
          device: which one this is.
          links: to the others.
          work: what its ops do.
          clock: seconds; must be the same for all processes.
        """
        self._schedule, self._device, self._links = schedule, device, links
        self._work, self._clock = work, clock
        self._users: dict[Op, set[int]] = collections.defaultdict(set)
        for order in schedule.orders:
            for op in order:
                for need in schedule.needs(op):
                    if need.device == device != op.device:
                        self._users[need].add(op.device)
        self._arrived: dict[tuple, Message] = {}
        self.ran: list[Ran] = []
        self.steps: list[tuple[float, float]] = []

    def step(self, number: int, row: Row) -> None:
        """Does one step, in order, and its flush, for which all devices wait.

        A task begins in a bubble, unless what the device waits for is there; one that
        was planned for a bubble that is over waits for the next one of the step. What
        is left after the last op runs then.

        Args:
          number: of the step, from 0.
          row: its ops and tasks, such as a row of `FilledSchedule.steps`.

        Raises:
          ProcessLost: another device's process has ended or hangs.
        """
        began = self._clock()
        tasks: collections.deque[Task] = collections.deque()
        for each in row:
            if isinstance(each, Task):
                tasks.append(each)
            else:
                self._op(number, each, tasks)
        flush = Message(_FLUSH, {"key": [number]})
        for link in self._links.values():
            link.send(flush)
        for task in tasks:
            self._task(number, task)
        for other, link in self._links.items():
            self._receive(link, (_FLUSH, other, number), f"the end of step {number}")
        self._work.flush(number)
        self.steps.append((began, self._clock()))

    def _op(self, number: int, op: Op, tasks: collections.deque[Task]) -> None:
        received = None
        for need in self._schedule.needs(op):
            if need.device != self._device:
                link = self._links[need.device]
                key = ("result", need.device, number, *need)
                while tasks and not self._here(link, key):
                    self._task(number, tasks.popleft())
                received = self._receive(link, key, str(need)).arrays["x"]
        start = self._clock()
        made = self._work.run_op(op, received)
        self.ran.append(Ran(number, start, self._clock(), op))
        for device in self._users[op]:
            if made is None:
                raise HpcjaxError(f"{op} has no result, device {device} needs it")
            message = Message("result", {"key": [number, *op]}, {"x": made})
            self._links[device].send(message)

    def _task(self, number: int, task: Task) -> None:
        start = self._clock()
        self._work.run_task(task)
        self.ran.append(Ran(number, start, self._clock(), task))

    def _here(self, link: Channel, key: tuple) -> bool:
        while link.arrived():
            self._take(link, "anything")
        return key in self._arrived

    def _receive(self, link: Channel, key: tuple, what: str) -> Message:
        while key not in self._arrived:
            self._take(link, what)
        return self._arrived.pop(key)

    def _take(self, link: Channel, what: str) -> None:
        message = link.receive(what)
        other = next(rank for rank, each in self._links.items() if each is link)
        self._arrived[message.name, other, *message.options["key"]] = message


def check_work(ran: Sequence[Ran], rows: Sequence[Row], steps: int) -> None:
    """Checks that a device has done what it had to, in every step, and no more.

    Args:
      ran: what it did.
      rows: of a refresh, over and over again.
      steps: how many steps there were.

    Raises:
      HpcjaxError: names the first work that was left out or done too often.
    """
    asked = collections.Counter(
        (step, work) for step in range(steps) for work in rows[step % len(rows)]
    )
    done = collections.Counter((each.step, each.work) for each in ran)
    for step, work in (*asked, *done):
        if (found := done[step, work]) != (wanted := asked[step, work]):
            raise HpcjaxError(
                f"in step {step} {work} ran {found} times instead of {wanted}"
            )


def busy_share(
    ran: Sequence[Sequence[Ran]], begin: float, end: float, *, without: Row = ()
) -> float:
    """Returns the share of a time that devices computed, mean over them.

    Args:
      ran: of each device, all between `begin` and `end`.
      begin: seconds.
      end: seconds.
      without: work that does not count, such as what fits into no bubble.

    Examples:
      >>> op = Op(0, "F", 0, 0)
      >>> busy_share([[Ran(0, 1.0, 2.0, op)], []], 1.0, 3.0)
      0.25
    """
    left_out = set(without)
    busy = sum(
        each.end - each.start
        for row in ran
        for each in row
        if each.work not in left_out
    )
    return busy / (len(ran) * (end - begin))


def ran_bars(ran: Sequence[Ran], begin: float) -> tuple[Bar, ...]:
    """Returns what is drawn of it: milliseconds from `begin` on."""
    return tuple(
        Bar(
            each.work.device,
            1e3 * (each.start - begin),
            1e3 * (each.end - begin),
            each.work.kind,
        )
        for each in ran
    )


def work_to_json(work: Work) -> list[Any]:
    """Returns an op or a task as JSON values; see `work_from_json`.

    Examples:
      >>> work_to_json(Op(0, "F", 0, 3))
      ['Op', 0, 'F', 0, 3, 0]
    """
    return [type(work).__name__, *work]


def work_from_json(values: Sequence[Any]) -> Work:
    """Returns what `work_to_json` was given."""
    kind, *fields = values
    return Op(*fields) if kind == "Op" else Task(*fields)
