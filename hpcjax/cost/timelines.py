"""Timelines of devices as bars, exported for Perfetto or drawn with matplotlib."""

import itertools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ops of the pipeline in light colours, what fills its bubbles in full ones.
_COLOURS = {
    "F": "#a6cee3",
    "F up": "#cde4f0",
    "B": "#b2df8a",
    "B up": "#d5eebf",
    "W": "#fdbf6f",
    "curvA": "#e31a1c",
    "curvB": "#fb6a4a",
    "syncA": "#666666",
    "syncB": "#999999",
    "invA": "#6a3d9a",
    "invB": "#9e7bc4",
    "prec": "#b15928",
}
# Of kinds that are not ops, such as the jobs of a cluster, in alphabetical order.
_OTHERS = ("#444444", "#1f78b4", "#ff7f00", "#33a02c", "#6a3d9a", "#b15928")


class Bar(NamedTuple):
    """A piece of work on a device.

    Attributes:
      device: number of the device.
      start: when it begins.
      end: when it ends.
      kind: of work; bars of a kind have the same colour.
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


def draw_timelines(rows: Mapping[str, Iterable[Bar]], *, unit: str = "ms") -> "Figure":
    """Draws timelines, one panel for each of `rows`, over a common time axis.

    Args:
      rows: bars, such as `timeline.bars()`, by the title of their panel.
      unit: of the bars' times.

    Returns:
      The figure; `figure.savefig("timeline.png")` writes it.

    Raises:
      ConfigError: no panel, or one without bars.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    drawn = {title: list(bars) for title, bars in rows.items()}
    if not drawn or not all(drawn.values()):
        counts = {title: len(bars) for title, bars in drawn.items()}
        raise ConfigError(f"a picture needs panels with bars in them: got {counts}")
    devices = {title: 1 + max(b.device for b in bars) for title, bars in drawn.items()}
    figure = Figure(
        figsize=(12, 0.6 * len(drawn) + 0.35 * sum(devices.values())),
        layout="constrained",
    )
    panels = figure.subplots(
        len(drawn),
        1,
        sharex=True,
        squeeze=False,
        height_ratios=list(devices.values()),
    )[:, 0]
    used = {bar.kind for bars in drawn.values() for bar in bars}
    others = sorted(used - set(_COLOURS))
    colours = {kind: colour for kind, colour in _COLOURS.items() if kind in used}
    colours |= dict(zip(others, itertools.cycle(_OTHERS), strict=False))
    for axes, (title, bars) in zip(panels, drawn.items(), strict=True):
        spans: dict[tuple[int, str], list[tuple[float | int, float | int]]] = {}
        for bar in bars:
            span = bar.start, bar.end - bar.start
            spans.setdefault((bar.device, bar.kind), []).append(span)
        for (device, kind), row in spans.items():
            axes.broken_barh(
                row,
                (device - 0.45, 0.9),
                facecolor=colours[kind],
                edgecolor="white",
                linewidth=0.15,
            )
        axes.set(title=title, yticks=range(devices[title]), ylabel="device")
        axes.invert_yaxis()
        axes.margins(x=0.01)
    panels[-1].set_xlabel(f"time ({unit})")
    patches = [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=len(colours), frameon=False
    )
    return figure
