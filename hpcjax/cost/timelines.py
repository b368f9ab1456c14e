"""Timelines of devices as bars, and their export for Perfetto."""

from collections.abc import Iterable
from typing import Any, NamedTuple


class Bar(NamedTuple):
    """A piece of work on a device.

    Attributes:
      device: number of the device.
      start: when it begins.
      end: when it ends.
      kind: of work; bars of a kind look the same.
      label: tells bars of one kind apart.
    """

    device: int
    start: float | int
    end: float | int
    kind: str
    label: str = ""


def chrome_trace(bars: Iterable[Bar]) -> dict[str, Any]:
    """Returns bars in the JSON format of Perfetto and `chrome://tracing`.

    The times of bars are taken to be in milliseconds. Every device is shown as a thread
    of one process.

    Examples:
      >>> chrome_trace([Bar(0, 1, 3, "F", "5")])["traceEvents"][0]["dur"]
      2000.0
    """
    bars = list(bars)
    # The trace event format: "X" is a complete event with times in microseconds, "M" is
    # metadata.
    events: list[dict[str, Any]] = [
        {
            "name": f"{bar.kind} {bar.label}".rstrip(),
            "cat": bar.kind,
            "ph": "X",
            "ts": 1e3 * bar.start,
            "dur": 1e3 * (bar.end - bar.start),
            "pid": 0,
            "tid": bar.device,
        }
        for bar in bars
    ]
    events += [
        {
            "name": "thread_name",
            "ph": "M",
            "pid": 0,
            "tid": device,
            "args": {"name": f"device {device}"},
        }
        for device in sorted({bar.device for bar in bars})
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
