"""A schedule as static arrays: the op of each device at each tick of a `lax.scan`.

At a tick every device runs one op or none. The result is then sent to a neighbour in
the ring of devices by `ppermute`, and can be used from the next tick on.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.sharding.schedules import Op, Schedule, validate

IDLE, FORWARD, BACKWARD, WEIGHTS = range(4)
_CODES = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}


class TickTable(NamedTuple):
    """The ticks of one step; every array is int32 [device, tick], −1 means none.

    Attributes:
      op: `IDLE`, `FORWARD`, `BACKWARD` or `WEIGHTS`: the branch of a `lax.switch`.
      micro_batch: number of the micro-batch, 0 if idle.
      chunk: place of the op's stage in `Schedule.parts` of the device; 0 if idle.
      saved: buffer into which a forward op writes its input, and from which the
        backward op of that micro-batch (and its `WEIGHTS` op) reads it.
      inbox: buffer with the neighbour's result that the op reads; none for the first
        stage's forward and the last stage's backward.
      from_below: buffer that takes the result of device − 1 at the end of the tick.
      from_above: the same for device + 1; both modulo the number of devices.
      saved_buffers: number of buffers for inputs that a device needs.
      inbox_buffers: number of buffers for results of neighbours that a device needs.
    """

    op: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray
    saved: np.ndarray
    inbox: np.ndarray
    from_below: np.ndarray
    from_above: np.ndarray
    saved_buffers: int
    inbox_buffers: int


class _Span(NamedTuple):
    """One use of a buffer: filled at the end of one tick, last read at another."""

    device: int
    filled: int
    read: int


def tick_table(schedule: Schedule) -> TickTable:
    """Returns the ticks of a schedule in which every op takes one tick.

    Raises:
      ConfigError: the schedule is not valid, or consecutive stages are not on
        neighbouring devices.

    Examples:
      >>> from hpcjax.sharding import gpipe
      >>> tick_table(gpipe(2, 2)).op
      array([[1, 1, 0, 0, 2, 2],
             [0, 1, 1, 2, 2, 0]], dtype=int32)
    """
    ticks = _find_ticks(schedule)
    shape = (schedule.devices, 1 + max(ticks.values()))
    op, micro_batch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
    for it, tick in ticks.items():
        place = it.device, tick
        op[place] = _CODES[it.kind]
        micro_batch[place] = it.micro_batch
        chunk[place] = schedule.parts(it.device).index((it.replica, it.stage))
    saved, saved_buffers = _assign_saved(ticks, shape)
    inbox, below, above, inbox_buffers = _assign_inbox(schedule, ticks, shape)
    return TickTable(
        op,
        micro_batch,
        chunk,
        saved,
        inbox,
        below,
        above,
        saved_buffers,
        inbox_buffers,
    )


def _find_ticks(schedule: Schedule) -> dict[Op, int]:
    """Returns the earliest tick of each op."""
    ticks: dict[Op, int] = {}
    free = [0] * schedule.devices
    for op, needs in validate(schedule).items():
        # `validate` returns ops in an order in which needs precede them.
        # A result is sent at the end of a tick, and can be read from the next one on.
        arrived = [ticks[need] + 1 for need in needs]
        ticks[op] = max(free[op.device], *arrived, 0)
        free[op.device] = ticks[op] + 1
    return ticks


def _assign_saved(
    ticks: dict[Op, int], shape: tuple[int, int]
) -> tuple[np.ndarray, int]:
    """Returns the buffers for inputs of stages, [device, tick], and their number."""
    table = np.full(shape, -1, np.int32)
    uses: dict[Op, list[int]] = {}
    for op, tick in ticks.items():
        # Forward, backward and weight op of one micro-batch at one stage share a key:
        # the input is saved from the first of them to the last.
        uses.setdefault(op._replace(kind="F"), []).append(tick)
    spans = [_Span(op.device, min(at), max(at)) for op, at in uses.items()]
    buffers, count = _allocate(spans)
    for span, at, buffer in zip(spans, uses.values(), buffers, strict=True):
        table[span.device, at] = buffer
    return table, count


def _assign_inbox(
    schedule: Schedule, ticks: dict[Op, int], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Returns the buffers of the inbox: read, and filled from either neighbour."""
    inbox, below, above = (np.full(shape, -1, np.int32) for _ in range(3))
    sent = [
        (need, op)
        for op in ticks
        for need in schedule.needs(op)
        if need.stage != op.stage
    ]
    spans = [_Span(op.device, ticks[need], ticks[op]) for need, op in sent]
    buffers, count = _allocate(spans)
    for (need, op), span, buffer in zip(sent, spans, buffers, strict=True):
        shift = (op.device - need.device) % schedule.devices
        if shift not in (1 % schedule.devices, schedule.devices - 1):
            raise ConfigError(f"{op} is not beside {need}, whose result it needs")
        inbox[op.device, span.read] = buffer
        # Of two devices, or one, both neighbours are the same: "below" is taken.
        target = below if shift == 1 % schedule.devices else above
        target[op.device, span.filled] = buffer
    return inbox, below, above, count


def _allocate(spans: Iterable[_Span]) -> tuple[list[int], int]:
    """Returns a buffer for each span, and how many buffers a device needs at most.

    A buffer that is read at a tick may be filled again at the end of that tick. Giving
    spans in order of their beginnings the first free buffer needs the fewest (interval
    graph colouring).
    """
    spans = list(spans)
    buffers = [0] * len(spans)
    used: dict[int, list[int]] = {}
    for place in sorted(range(len(spans)), key=lambda place: spans[place].filled):
        span = spans[place]
        ends = used.setdefault(span.device, [])
        # `ends[i]` is the tick at which buffer i is last read. The slice assignment
        # replaces that entry, or appends one if no buffer is free.
        free = next((i for i, end in enumerate(ends) if end <= span.filled), len(ends))
        ends[free : free + 1] = [span.read]
        buffers[place] = free
    return buffers, max(map(len, used.values()), default=0)
