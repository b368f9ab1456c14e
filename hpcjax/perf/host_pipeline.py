"""Runs a pipeline with one process per device, by a schedule or as messages arrive.

In one SPMD program every device would wait for the slowest at each communication. Here
no program spans devices: while a device waits for a message, it is in a bubble of the
pipeline and works on K-FAC tasks.

References:
  Osawa, Li and Hoefler, PipeFisher, MLSys 2023, section 3.2.
"""

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import HpcjaxError, ProcessLost
from hpcjax.cost.kfac_work import Task
from hpcjax.cost.timelines import Bar
from hpcjax.hostcomm import Tag, Transport
from hpcjax.hostcomm.mailbox import Request
from hpcjax.sharding.message_driven import Action, MessageDriven, Pass
from hpcjax.sharding.schedules import Op, Schedule

Work = Op | Task
Row = Sequence[Work]


class WorkSpan(NamedTuple):
    """A piece of work that was done, with its times.

    Attributes:
      step: of the training, from 0.
      start: seconds on a clock that all processes share.
      end: seconds on the same clock.
      work: the op or task.
    """

    step: int
    start: float
    end: float
    work: Work


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """Functions that do a device's work; each must return only when it is done.

    Attributes:
      run_op: `(op, received) -> result`. `received` is the array from the device that
        `op` depends on, None if that is this device. The result is sent to the devices
        that need it, and may be None if none does. What can be written to is copied,
        so that the next op may change it.
      run_task: does a K-FAC task.
      flush: `(step)`; called when all devices have finished the ops of a step.
    """

    run_op: Callable[[Op, np.ndarray | None], np.ndarray | None]
    run_task: Callable[[Task], Any]
    flush: Callable[[int], Any]


class HostPipeline:
    """One device of a pipeline, in a process of its own.

    Attributes:
      spans: the ops and tasks of all steps so far, in order.
      steps: seconds at which each step began and ended here, flush included.
    """

    def __init__(
        self,
        schedule: Schedule | None,
        transport: Transport,
        work: DeviceWork,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Makes this rank the device of its number.

        Args:
          schedule: of all devices; None if steps follow their messages.
          transport: ours.
          work: what its ops do.
          clock: seconds; must be the same for all processes.
        """
        self._schedule, self._transport = schedule, transport
        self._work, self._clock = work, clock
        self._device = transport.rank
        self._others = [r for r in range(transport.size) if r != transport.rank]
        self._users: dict[Op, set[int]] = collections.defaultdict(set)
        for op in [op for order in schedule.orders for op in order] if schedule else ():
            for need in self._needs(op):
                if need.device == self._device != op.device:
                    self._users[need].add(op.device)
        self.spans: list[WorkSpan] = []
        self.steps: list[tuple[float, float]] = []

    def step(self, number: int, row: Row | MessageDriven) -> None:
        """Runs the ops and tasks of one step and its flush, for which all devices wait.

        Ops run in the given order, or in that of messages as they arrive. A task runs
        when the next op still waits for a message; a task whose planned bubble is over
        waits for the step's next bubble.
        Tasks that remain after the last op run before the flush.

        Args:
          number: of the step, from 0.
          row: its ops and tasks, such as a row of `FilledSchedule.steps`; or the state
            machine of this device's stage, a new one for each step.

        Raises:
          ProcessLost: another device's process has ended or hangs.
          ConfigError: a state machine of another stage, or of another pipeline.
          HpcjaxError: a state machine that has begun, or an op without its result.
        """
        if isinstance(row, MessageDriven):
            ours = self._transport.rank, self._transport.size
            rule = f"a state machine must be of (stage, stages) {ours}"
            theirs = row.stage, row.stages
            checks.require(theirs == ours, rule, given=theirs)
        start = self._clock()
        tasks: collections.deque[Task] = collections.deque()
        # A device computes while its results are under way.
        sent: list[Request] = []
        if isinstance(row, MessageDriven):
            self._follow(number, row, sent)
            row = ()
        for work in row:
            if isinstance(work, Task):
                tasks.append(work)
            else:
                sent += self._run_op(number, work, tasks)
        flush = Tag("flush", number)
        for other in self._others:
            sent.append(self._transport.isend(other, flush, np.zeros(0)))
        for task in tasks:
            self._run_task(number, task)
        for request in sent:
            request.wait()
        for other in self._others:
            with _naming(f"the end of step {number}"):
                self._transport.receive(other, flush)
        self._work.flush(number)
        self.steps.append((start, self._clock()))

    def _run_op(
        self, number: int, op: Op, tasks: collections.deque[Task]
    ) -> list[Request]:
        received = None
        for need in self._needs(op):
            if need.device != self._device:
                with _naming(str(need)):
                    coming = self._transport.irecv(need.device, _result(number, need))
                    while tasks and not coming.test():
                        self._run_task(number, tasks.popleft())
                    received = coming.wait()
        result = self._time_op(number, op, received)
        return [
            self._transport.isend(
                device, _result(number, op), _given(result, op, device)
            )
            for device in self._users[op]
        ]

    def _needs(self, op: Op) -> Sequence[Op]:
        if self._schedule is None:
            raise HpcjaxError("a pipeline without a schedule follows its messages")
        return tuple(self._schedule.needs(op))

    def _time_op(
        self, number: int, op: Op, received: np.ndarray | None
    ) -> np.ndarray | None:
        start = self._clock()
        result = self._work.run_op(op, received)
        self.spans.append(WorkSpan(number, start, self._clock(), op))
        return result

    def _follow(self, number: int, stage: MessageDriven, sent: list[Request]) -> None:
        """Runs what messages ask for, of each kind of which one is waited for."""
        asked: dict[Pass, Request] = {}
        self._act(number, stage.start(), None, sent)
        while any(stage.expected.values()):
            for kind, left in stage.expected.items():
                if left and kind not in asked:
                    name = _messages(number, kind)
                    asked[kind] = self._transport.irecv(self._peer(kind), name)
            peers = " or ".join(str(self._peer(kind)) for kind in asked)
            with _naming(f"a message of step {number} from stage {peers}"):
                self._transport.wait_any(list(asked.values()))
                here = [kind for kind, request in asked.items() if request.test()]
                here.sort(key=lambda kind: asked[kind].due)
                kind = here[stage.choose(here)]
                request = asked.pop(kind)
                received = request.wait()
            if request.arrived is None:
                raise HpcjaxError(f"{kind} of step {number} came without its number")
            done = stage.arrived(kind, request.arrived.tag.round)
            self._act(number, done, received, sent)

    def _peer(self, kind: Pass) -> int:
        """Returns the stage that messages of a kind come from."""
        return self._device + (1 if kind == "B" else -1)

    def _act(
        self,
        number: int,
        actions: Sequence[Action],
        received: np.ndarray | None,
        sent: list[Request],
    ) -> None:
        """Runs ops, the first of which is given what was received."""
        for kind, micro_batch, to in actions:
            op = Op(self._device, kind, self._device, micro_batch)
            result, received = self._time_op(number, op, received), None
            if to is not None:
                tag = Tag(_messages(number, kind), micro_batch)
                sent.append(self._transport.isend(to, tag, _given(result, op, to)))

    def _run_task(self, number: int, task: Task) -> None:
        start = self._clock()
        self._work.run_task(task)
        self.spans.append(WorkSpan(number, start, self._clock(), task))


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Says in a ProcessLost what was waited for."""
    try:
        yield
    except ProcessLost as error:
        raise ProcessLost(f"{error}; {what} was waited for") from None


def _given(result: np.ndarray | None, op: Op, device: int) -> np.ndarray:
    """Returns what an op gave to be sent, which nobody changes meanwhile."""
    if result is None:
        raise HpcjaxError(f"{op} has no result, device {device} needs it")
    array = np.asarray(result)
    return array.copy() if array.flags.writeable else array


def _messages(number: int, kind: Pass) -> str:
    """Returns the kind of messages of a step alone: late ones are of another."""
    return f"{kind} of step {number}"


def _result(number: int, op: Op) -> Tag:
    """Returns what the result of an op is sent with."""
    return Tag(str(op), number)


def check_work(spans: Sequence[WorkSpan], rows: Sequence[Row], steps: int) -> None:
    """Checks that a device did exactly the planned work in every step.

    Args:
      spans: what the device did.
      rows: planned ops and tasks of each step of a refresh; step t has row
        t mod `len(rows)`.
      steps: number of steps.

    Raises:
      HpcjaxError: names the first work that was left out or done too often.
    """
    planned = collections.Counter(
        (step, work) for step in range(steps) for work in rows[step % len(rows)]
    )
    done = collections.Counter((span.step, span.work) for span in spans)
    for step, work in (*planned, *done):
        if (count := done[step, work]) != (wanted := planned[step, work]):
            raise HpcjaxError(
                f"in step {step} {work} ran {count} times instead of {wanted}"
            )


def busy_share(
    spans: Sequence[Sequence[WorkSpan]],
    begin: float,
    end: float,
    *,
    without: Row = (),
) -> float:
    """Returns the mean over devices of the share of the time that they computed.

    Args:
      spans: of each device, all between `begin` and `end`.
      begin: start of that time, in seconds.
      end: its end, in seconds.
      without: work that does not count, such as tasks that fit into no bubble.

    Examples:
      >>> op = Op(0, "F", 0, 0)
      >>> busy_share([[WorkSpan(0, 1.0, 2.0, op)], []], 1.0, 3.0)
      0.25
    """
    excluded = set(without)
    busy = sum(
        span.end - span.start
        for row in spans
        for span in row
        if span.work not in excluded
    )
    return busy / (len(spans) * (end - begin))


def work_bars(spans: Sequence[WorkSpan], begin: float) -> tuple[Bar, ...]:
    """Returns spans as bars to draw, in milliseconds from `begin` on."""
    return tuple(
        Bar(
            span.work.device,
            1e3 * (span.start - begin),
            1e3 * (span.end - begin),
            span.work.kind,
        )
        for span in spans
    )


def work_to_json(work: Work) -> list[Any]:
    """Returns an op or a task as JSON values; see `work_from_json`.

    Examples:
      >>> work_to_json(Op(0, "F", 0, 3))
      ['Op', 0, 'F', 0, 3, 0]
    """
    return [type(work).__name__, *work]


def work_from_json(values: Sequence[Any]) -> Work:
    """Returns the op or task that `work_to_json` encoded."""
    kind, *fields = values
    return Op(*fields) if kind == "Op" else Task(*fields)
