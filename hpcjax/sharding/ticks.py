"""A schedule as static arrays: what each device does at each tick, for `lax.scan`.

At a tick every device runs one op or none. Its result then goes one place up or down
the ring of devices (`ppermute`) and can be used from the next tick on.
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
      micro_batch: which micro-batch, 0 where idle.
      chunk: which of the device's parts, by its place in `Schedule.parts`; 0 if idle.
      saved: buffer that a forward fills with what the backward of that micro-batch
        (and then its `WEIGHTS`) reads.
      inbox: buffer with the neighbour's result that the op reads; none for the first
        stage's forward and the last stage's backward.
      from_below: buffer that takes, at the end of the tick, the result of device − 1.
      from_above: the same for device + 1; both modulo the number of devices.
      saved_buffers: how many of these a device needs.
      inbox_buffers: how many of those.
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
    """A buffer's use: filled at the end of one tick, last read at another."""

    device: int
    filled: int
    read: int


def tick_table(schedule: Schedule) -> TickTable:
    """Returns the ticks of a schedule if every op takes one of them.

    Raises:
      ConfigError: the schedule is not valid, or has a stage whose next one is not on a
        neighbouring device.

    Examples:
      >>> from hpcjax.sharding import gpipe
      >>> tick_table(gpipe(2, 2)).op
      array([[1, 1, 0, 0, 2, 2],
             [0, 1, 1, 2, 2, 0]], dtype=int32)
    """
    ticks = _ticks(schedule)
    shape = (schedule.devices, 1 + max(ticks.values()))
    op, micro_batch, chunk = (np.zeros(shape, np.int32) for _ in range(3))
    for it, tick in ticks.items():
        place = it.device, tick
        op[place] = _CODES[it.kind]
        micro_batch[place] = it.micro_batch
        chunk[place] = schedule.parts(it.device).index((it.replica, it.stage))
    saved, saved_buffers = _saved(ticks, shape)
    inbox, below, above, inbox_buffers = _messages(schedule, ticks, shape)
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


def _ticks(schedule: Schedule) -> dict[Op, int]:
    """Returns the earliest tick of each op."""
    ticks: dict[Op, int] = {}
    free = [0] * schedule.devices
    for op, needs in validate(schedule).items():
        arrived = [ticks[need] + 1 for need in needs]
        ticks[op] = max(free[op.device], *arrived, 0)
        free[op.device] = ticks[op] + 1
    return ticks


def _saved(ticks: dict[Op, int], shape: tuple[int, int]) -> tuple[np.ndarray, int]:
    table = np.full(shape, -1, np.int32)
    kept: dict[Op, list[int]] = {}
    for op, tick in ticks.items():
        kept.setdefault(op._replace(kind="F"), []).append(tick)
    spans = [_Span(op.device, min(at), max(at)) for op, at in kept.items()]
    buffers, count = _colour(spans)
    for span, at, buffer in zip(spans, kept.values(), buffers, strict=True):
        table[span.device, at] = buffer
    return table, count


def _messages(
    schedule: Schedule, ticks: dict[Op, int], shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    inbox, below, above = (np.full(shape, -1, np.int32) for _ in range(3))
    sent = [
        (need, op)
        for op in ticks
        for need in schedule.needs(op)
        if need.stage != op.stage
    ]
    spans = [_Span(op.device, ticks[need], ticks[op]) for need, op in sent]
    buffers, count = _colour(spans)
    for (need, op), span, buffer in zip(sent, spans, buffers, strict=True):
        shift = (op.device - need.device) % schedule.devices
        if shift not in (1 % schedule.devices, schedule.devices - 1):
            raise ConfigError(f"{op} is not beside {need}, whose result it needs")
        inbox[op.device, span.read] = buffer
        # With two devices, or one, both directions lead to the same neighbour.
        target = below if shift == 1 % schedule.devices else above
        target[op.device, span.filled] = buffer
    return inbox, below, above, count


def _colour(spans: Iterable[_Span]) -> tuple[list[int], int]:
    """Returns a buffer for each span, the fewest per device, and how many there are.

    A buffer read at a tick may be filled again at the end of that tick.
    """
    spans = list(spans)
    buffers = [0] * len(spans)
    used: dict[int, list[int]] = {}
    for place in sorted(range(len(spans)), key=lambda place: spans[place].filled):
        span = spans[place]
        ends = used.setdefault(span.device, [])
        free = next((i for i, end in enumerate(ends) if end <= span.filled), len(ends))
        ends[free : free + 1] = [span.read]
        buffers[place] = free
    return buffers, max(map(len, used.values()), default=0)
