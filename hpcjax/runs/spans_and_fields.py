"""Draws timelines and maps; see `drawing`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from hpcjax.runs import curves
from hpcjax.runs import pictures as kinds
from hpcjax.runs.panels import (
    AROUND,
    HATCHES,
    SMALL,
    WIDTH,
    label_of,
    open_figure,
    plain,
    set_scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcjax.runs.tables import TableResult


def draw_timeline(
    picture: kinds.Timeline, table: xr.Dataset, _: Mapping, result: "TableResult"
) -> "Figure":
    """Draws a timeline for each row."""
    held = table[picture.column]
    rows = held["row"].values.tolist()
    spans = {
        str(row): [
            (device, kind, held.sel(row=row, device=device, kind=kind).values)
            for device in held["device"].values.tolist()
            for kind in held["kind"].values.tolist()
        ]
        for row in rows
    }
    return draw_spans(spans, picture.label or "time")


def draw_spans(
    panels: Mapping[str, Sequence[tuple[int, str, np.ndarray]]], label: str
) -> "Figure":
    """Draws what devices do, a panel for each title, over a common time axis.

    Args:
      panels: by title, device, kind of work, and its `[bar, 2]` starts and ends.
      label: of the time axis.
    """
    devices = sorted({device for each in panels.values() for device, *_ in each})
    used = dict.fromkeys(
        kind for each in panels.values() for _, kind, bars in each if bars.size
    )
    height = AROUND + len(panels) * (0.35 + 0.2 * len(devices))
    figure, axes = open_figure(height, rows=len(panels), sharex=True)
    for panel, (title, spans) in zip(axes[:, 0], panels.items(), strict=True):
        for device, kind, held in spans:
            bars = held[np.isfinite(held).all(1)]
            if not len(bars):
                continue
            width = np.diff(bars, axis=1)[:, 0]
            panel.broken_barh(
                list(zip(bars[:, 0], width, strict=True)),
                (devices.index(device) - 0.42, 0.84),
                label=kind,
                **_look_of_kind(list(used).index(kind)),
            )
        panel.set_title(plain(title), fontsize=SMALL + 1, loc="left")
        panel.set_yticks(range(len(devices)), devices, fontsize=SMALL)
        panel.set_ylim(len(devices) - 0.5, -0.5)
        panel.margins(x=0.01)
        set_scale(panel.xaxis, [np.concatenate([b.ravel() for *_, b in spans])], False)
    figure.supylabel("device", fontsize=SMALL + 1)
    axes[-1, 0].set_xlabel(plain(label))
    return figure


def _look_of_kind(place: int) -> dict[str, Any]:
    colour = curves.COLOURS[place % len(curves.COLOURS)]
    hatch = HATCHES[place % len(HATCHES)]
    face = "none" if place % 2 else colour
    return {"facecolor": face, "edgecolor": colour, "hatch": hatch, "linewidth": 0.4}


def draw_map(
    picture: kinds.Map, table: xr.Dataset, _: Mapping, result: "TableResult"
) -> "Figure":
    """Draws a field for each row, and their errors below."""
    held = table[picture.column].transpose("row", picture.y, picture.x)
    rows = held["row"].values.tolist()
    others = [row for row in rows if picture.truth and row != picture.truth]
    down = 2 if others else 1
    shape = held.sizes[picture.y] / held.sizes[picture.x]
    height = AROUND + down * (0.4 + shape * WIDTH / len(rows))
    figure, panels = open_figure(height, len(rows), down)
    ends = {"vmin": float(np.nanmin(held)), "vmax": float(np.nanmax(held))}
    fields = {row: held.sel(row=row) for row in rows}
    image = _fields(panels[0], fields, {**ends, "cmap": "viridis"})
    label = label_of(picture, picture.column, result)
    figure.colorbar(image, ax=panels[0], shrink=0.9).set_label(label, fontsize=SMALL)
    if others:
        errors = {row: fields[row] - fields[picture.truth] for row in others}
        most = max(float(np.nanmax(np.abs(each))) for each in errors.values())
        look = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"}
        left = [
            axes for axes, row in zip(panels[1], rows, strict=True) if row in others
        ]
        named = {f"{row} - {picture.truth}": each for row, each in errors.items()}
        image = _fields(left, named, look)
        bar = figure.colorbar(image, ax=panels[1], shrink=0.9)
        bar.set_label("difference", fontsize=SMALL)
        for axes, row in zip(panels[1], rows, strict=True):
            axes.set_visible(row in others)
    return figure


def _fields(
    panels: Iterable["Axes"], fields: Mapping[str, xr.DataArray], look: Mapping
) -> Any:
    """Draws fields side by side on one scale, and returns what a colour bar shows."""
    image = None
    for axes, (name, field) in zip(panels, fields.items(), strict=True):
        image = axes.imshow(field.values, origin="lower", **look)
        axes.set_title(plain(name), fontsize=SMALL)
        axes.set(xticks=[], yticks=[])
    return image
