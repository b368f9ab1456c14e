"""Draws timelines and maps; see `drawing`."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from hpcjax.runs import curves, packing
from hpcjax.runs import pictures as kinds
from hpcjax.runs.curves import plain
from hpcjax.runs.panels import (
    AROUND,
    SMALL,
    WIDTH,
    label_of,
    look_of_part,
    open_figure,
    set_scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcjax.runs.tables import TableResult

# Share of a field's values, at either end, that colours do not tell apart.
_REST = 0.005


def draw_timeline(
    picture: kinds.Timeline, table: xr.Dataset, _: Mapping, __: "TableResult"
) -> "Figure":
    """Draws a timeline for each row."""
    return _draw_spans(table[picture.column], picture.label or "time")


def draw_timelines(rows: Mapping[str, Iterable[Any]], *, unit: str = "ms") -> "Figure":
    """Draws timelines, one panel for each of `rows`, over a common time axis.

    Args:
      rows: bars as of `cost.Bar`, such as `timeline.bars()`, by the panel's title.
      unit: of the bars' times.

    Raises:
      ConfigError: no panel, or one without bars.
    """
    figure = _draw_spans(packing.timeline(rows), f"time ({unit})")
    curves.add_legend(figure)
    return figure


def _draw_spans(held: xr.DataArray, label: str) -> "Figure":
    """Draws what devices do, a panel for each row of a column of timelines."""
    rows, devices, used = (held[n].values.tolist() for n in ("row", "device", "kind"))
    height = AROUND + len(rows) * (0.35 + 0.2 * len(devices))
    figure, axes = open_figure(height, rows=len(rows), sharex=True)
    for panel, row in zip(axes[:, 0], rows, strict=True):
        own = held.sel(row=row).transpose("device", "kind", "bar", "edge").values
        for device, kind in np.ndindex(own.shape[:2]):
            bars = own[device, kind]
            bars = bars[np.isfinite(bars).all(1)]
            if len(bars):
                spans = [(start, end - start) for start, end in bars]
                look = {**look_of_part(kind), "linewidth": 0.4, "label": used[kind]}
                panel.broken_barh(spans, (device - 0.42, 0.84), **look)
        panel.set_title(plain(row), fontsize=SMALL + 1, loc="left")
        panel.set_yticks(range(len(devices)), devices, fontsize=SMALL)
        panel.set_ylim(len(devices) - 0.5, -0.5)
        panel.margins(x=0.01)
        set_scale(panel.xaxis, [own], False)
    figure.supylabel("device", fontsize=SMALL + 1)
    axes[-1, 0].set_xlabel(plain(label))
    return figure


def draw_map(
    picture: kinds.Map, table: xr.Dataset, _: Mapping, result: "TableResult"
) -> "Figure":
    """Draws a field for each row, and their errors below."""
    held = table[picture.column].transpose("row", picture.y, picture.x)
    held = held.sortby([picture.y, picture.x])
    rows = held["row"].values.tolist()
    others = [row for row in rows if picture.truth and row != picture.truth]
    down = 2 if others else 1
    shape = held.sizes[picture.y] / held.sizes[picture.x]
    height = AROUND / 2 + down * (0.8 + shape * WIDTH / len(rows))
    figure, panels = open_figure(height, len(rows), down)
    fields = {row: held.sel(row=row) for row in rows}
    low, high = np.nanquantile(held, (_REST, 1 - _REST))
    look = {"vmin": low, "vmax": high, "cmap": "viridis"}
    image = _fields(panels[0], fields, look)
    _tell_scale(image, panels[0], label_of(picture, picture.column, result))
    if others:
        errors = {row: fields[row] - fields[picture.truth] for row in others}
        most = np.nanquantile([abs(each) for each in errors.values()], 1 - _REST)
        look = {"vmin": -most, "vmax": most, "cmap": "RdBu_r"}
        left = [
            axes for axes, row in zip(panels[1], rows, strict=True) if row in others
        ]
        named = {f"{row} - {picture.truth}": each for row, each in errors.items()}
        image = _fields(left, named, look)
        for axes, each in zip(left, errors.values(), strict=True):
            _outline(axes, each.values, most / 2)
        _tell_scale(
            image, panels[1], "difference; lines: half of the ends, dashed: less"
        )
        for axes, row in zip(panels[1], rows, strict=True):
            axes.set_visible(row in others)
    return figure


def _tell_scale(image: Any, panels: Any, label: str) -> None:
    """Draws what colours stand for below panels; few values lie beyond its ends."""
    options = {"location": "bottom", "shrink": 0.7, "aspect": 50, "extend": "both"}
    bar = image.figure.colorbar(image, ax=panels, **options)
    bar.set_label(label, fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)


def _outline(axes: "Axes", field: np.ndarray, most: float) -> None:
    """Draws where a difference is large, dashed where it is negative."""
    low, high = np.nanmin(field), np.nanmax(field)
    levels = [level for level in (-most, most) if low < level < high]
    if levels:
        axes.contour(field, levels, colors="#000000", linewidths=0.6)


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
