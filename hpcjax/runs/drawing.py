"""Draws the kinds of `pictures` with matplotlib, in the styles of `curves`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from hpcjax.runs import curves, packing, spans_and_fields
from hpcjax.runs import pictures as kinds
from hpcjax.runs.curves import plain
from hpcjax.runs.panels import (
    AROUND,
    GROUP,
    LINE,
    OTHER,
    ROW,
    SMALL,
    draw_bound,
    label_of,
    look_of,
    look_of_part,
    open_figure,
    set_scale,
    tell_missing,
    tell_verdicts,
    word_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcjax.runs.tables import TableResult

# Where the label of a point may stand: offsets in points, and alignments.
_MARKERS = "os^DXvP<>p"
_BESIDE = (
    *((5, 0, "left", "center"), (-5, 0, "right", "center")),
    *((0, 5, "center", "bottom"), (0, -5, "center", "top")),
    *((4, 4, "left", "bottom"), (4, -4, "left", "top")),
    *((-4, 4, "right", "bottom"), (-4, -4, "right", "top")),
    *(
        (x, y, "left" if x > 0 else "right", "center")
        for x in (12, -12, 30, -30)
        for y in (12, -12, 24, -24, 40, -40)
    ),
)


def draw(result: "TableResult") -> "Figure | None":
    """Draws a table as its `picture` says, of its cells.

    A table that says nothing has dots of its columns with intervals, at most two, or
    else of its first numbers.

    Returns:
      The figure; None if there are no numbers.

    Raises:
      ConfigError: the table lacks a column or a dimension that the picture names.
    """
    table = packing.unpack(result.dataset)
    picture = result.table.picture or _default(table, result.table.columns)
    if picture is None:
        return None
    kinds.check(picture, table)
    if isinstance(picture, kinds.Picture):
        table = kinds.pick(picture, table)
        rows = table["row"].values.tolist() if "row" in table.dims else []
        roles = kinds.find_roles(picture, result.table.tier(result.tier), rows)
        figure = _DRAWERS[type(picture)](picture, table, roles, result)
        curves.add_legend(figure)
    else:
        figure = picture(table)
    tell_verdicts(figure, kinds.tell_verdicts(result), result.passed)
    return figure


def _default(table: xr.Dataset, columns: Iterable[str]) -> kinds.Dots | None:
    numbers = [
        name
        for name in columns
        if name in table
        and table[name].dims == ("row",)
        and table[name].dtype.kind in "if"
        and np.isfinite(table[name]).any()
    ]
    measured = [name for name in numbers if f"{name}_low" in table]
    return kinds.Dots(tuple(measured[:2] or numbers[:1])) if numbers else None


def _arrange(
    picture: kinds.Dots | kinds.Bars, table: xr.Dataset
) -> tuple[xr.Dataset, np.ndarray]:
    """Returns a table's rows in the order of a picture, and where each one stands."""
    rows = table["row"].values.tolist()
    groups = [kinds.group(str(row), picture.by)[0] for row in rows]
    known = list(dict.fromkeys(groups))
    order = sorted(range(len(rows)), key=lambda n: known.index(groups[n]))
    if isinstance(picture, kinds.Dots) and picture.sort:
        values = np.nan_to_num(table[picture.names()[0]].values, nan=np.inf)
        order.sort(key=lambda n: (known.index(groups[n]), values[n]))
    shift = np.array([0.6 * known.index(groups[n]) for n in order])
    return table.isel(row=order), np.arange(len(order)) + shift


def _name_rows(axes: "Axes", table: xr.Dataset, places: np.ndarray) -> None:
    names = [plain(curves.shorten(row)) for row in table["row"].values]
    axes.set_yticks(places, names, fontsize=SMALL)
    axes.set_ylim(places[-1] + 0.6, -0.6)


def _dots(
    picture: kinds.Dots, table: xr.Dataset, roles: Mapping, result: "TableResult"
) -> "Figure":
    table, places = _arrange(picture, table)
    names = picture.names()
    height = AROUND + LINE * bool(picture.bound) + ROW * (1 + places[-1])
    figure, panels = open_figure(height, len(names), sharey=True)
    bound = draw_bound(panels[0, 0], picture, result, up=True)
    for name, axes in zip(names, panels[0], strict=True):
        shown = bound if name == names[0] else []
        _dots_of(axes, picture, table, name, places, roles, shown)
        axes.set_xlabel(label_of(picture, name, result), fontsize=SMALL + 1)
    _name_rows(panels[0, 0], table, places)
    return figure


def _dots_of(
    axes: "Axes",
    picture: kinds.Dots,
    table: xr.Dataset,
    name: str,
    places: np.ndarray,
    roles: Mapping,
    bound: Sequence[float],
) -> None:
    """Draws one column against the places of its rows."""
    values = table[name].values.astype(float)
    low, high = (
        table.get(f"{name}_{end}", table[name]).values for end in ("low", "high")
    )
    rows = table["row"].values.tolist()
    shown = [values, low, high, bound]
    if f"{name}_by_seed" in table:
        seeds = table[f"{name}_by_seed"].transpose("row", ...).values
        at = np.broadcast_to(places[:, None], seeds.shape)
        seen = np.isfinite(seeds)
        tick = {"color": curves.COLOURS[1], "markersize": 8, "label": "one seed"}
        axes.plot(seeds[seen], at[seen], "|", **tick)
        shown.append(seeds)
    for row, *point in zip(rows, places, values, strict=True):
        look = look_of(roles[row])
        axes.plot(point[1:], point[:1], linestyle="", markersize=5, **look)
    set_scale(axes.xaxis, shown, picture.log, 6 if len(picture.names()) == 1 else 4)
    finite = [x for each in shown for x in np.ravel(each) if np.isfinite(x)]
    axes.update_datalim([(x, 0) for x in finite])
    axes.margins(x=0.06)
    axes.autoscale_view()
    axes.set_xlim(axes.get_xlim())
    for row, *point in zip(rows, places, values, low, high, strict=True):
        _interval(axes, *point, colour=look_of(roles[row])["color"])


def _interval(
    axes: "Axes", place: float, value: float, low: float, high: float, colour: str
) -> None:
    """Draws an interval; what has no end gets an arrow, what is not finite a word."""
    if not np.isfinite(value):
        _name_missing(axes, place, value, x=0.99, ha="right")
        return
    edge = axes.get_xlim()[1]
    if low < high:
        axes.plot([low, min(high, edge)], [place, place], color=colour, linewidth=2)
    if high > edge:
        axes.plot([edge], [place], ">", color=colour, clip_on=False)


def _name_missing(
    axes: "Axes", place: float, value: float, x: float, **at: Any
) -> None:
    inside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), **at}
    axes.text(x, place, word_of(value), fontsize=SMALL, va="center", **inside)


def _bars(
    picture: kinds.Bars, table: xr.Dataset, roles: Mapping, result: "TableResult"
) -> "Figure":
    table, places = _arrange(picture, table)
    names, rows = picture.names(), table["row"].values.tolist()
    each = 1 if picture.stacked else len(names)
    height = AROUND + (0.1 + GROUP * max(each, 1.2)) * (1 + places[-1])
    figure, panels = open_figure(height)
    axes, thick = panels[0, 0], 0.8 / each
    ends = np.zeros((2, len(rows)))  # of what is stacked, left and right of zero
    for n, name in enumerate(names):
        values = table[name].values.astype(float)
        known = np.where(np.isfinite(values), values, 0)
        behind = np.where(values < 0, *ends) if picture.stacked else ends[0]
        at = places if picture.stacked else places + thick * (n - (each - 1) / 2)
        for m, row in enumerate(rows):
            look = _bar_look(n, roles[row], len(names))
            named = kinds.heading(name, result.table.columns) if len(names) > 1 else ""
            label = named or look_of(roles[row])["label"]
            box = {"height": 0.9 * thick, "left": behind[m], "label": label}
            axes.barh(at[m], known[m], **box, **look)
        if f"{name}_low" in table and not picture.stacked:
            bars = table[f"{name}_low"].values, table[f"{name}_high"].values
            axes.hlines(at, *bars, color="#000000", linewidth=1)
        if picture.stacked:
            ends += [np.minimum(known, 0), np.maximum(known, 0)]
        for m in np.flatnonzero(~np.isfinite(values)):
            _name_missing(axes, at[m], values[m], x=0.01)
    bound = draw_bound(axes, picture, result, up=True)
    shown = [*ends] if picture.stacked else [table[name].values for name in names]
    set_scale(axes.xaxis, [*shown, bound], False)
    axes.set_xlabel(label_of(picture, names[0], result) if each == 1 else picture.label)
    _name_rows(axes, table, places)
    return figure


def _bar_look(place: int, role: kinds.Role, count: int) -> dict[str, Any]:
    """Returns how a bar is drawn: those of one column by role, others by column."""
    look = look_of_part(place)
    if count == 1 and role != "about":
        hollow = {"hatch": "////"} if role == "control" else {"edgecolor": OTHER}
        look |= {"facecolor": "none", **hollow}
    return look


def _lines(
    picture: kinds.Lines, table: xr.Dataset, roles: Mapping, result: "TableResult"
) -> "Figure":
    figure, panels = open_figure(3.0)
    axes = panels[0, 0]
    series = list(kinds.find_series(picture, table, roles, result))
    numbers = [x for each in series for x in each.x if x is not None]
    for place, each in enumerate(series):
        _line(axes, each, place)
    bound = draw_bound(axes, picture, result, up=False)
    shown = [bound, *([*each.y, *each.low] for each in series)]
    set_scale(axes.yaxis, shown, picture.log)
    tell_missing(axes, [said for each in series for said in _missing_of(each)])
    set_scale(axes.xaxis, [numbers], picture.log_x, 8)
    if len({*numbers}) < 9:
        _tick_at(axes, sorted({*numbers}))
    axes.set_ylabel(label_of(picture, picture.names()[0], result))
    axes.set_xlabel(plain(picture.x_label or picture.x.strip("{} =,/_")))
    return figure


def _missing_of(each: kinds.Series) -> list[str]:
    """Returns in words what a line has no points of."""
    lost = each.y[~np.isfinite(each.y)]
    words = " or ".join(dict.fromkeys(map(word_of, lost)))
    return [f"{each.name} {len(lost)} of {len(each.y)} {words}".strip()] * bool(words)


def _tick_at(axes: "Axes", places: Sequence[float]) -> None:
    """Puts ticks at values, but for those that would stand too close to another."""
    log = axes.get_xscale() == "log"
    at = [math.log(x) if log else x for x in places]
    apart, kept = 0.06 * ((at[-1] - at[0]) or 1), []
    for n, place in enumerate(at):
        if not kept or place - at[kept[-1]] > apart:
            kept.append(n)
    axes.set_xticks([places[n] for n in kept])
    axes.minorticks_off()


def _line(axes: "Axes", each: kinds.Series, place: int) -> None:
    look: dict[str, Any] = {**curves.style(place), "label": each.name}
    if each.role == "other":
        look["color"] = OTHER
    if each.role == "control":
        look |= {"markerfacecolor": "none", "label": f"{look['label']} (control)"}
    if all(at is None for at in each.x):
        for value in each.y[np.isfinite(each.y)]:
            axes.axhline(value, **(look | {"marker": "", "linewidth": 1}))
        return
    if not np.isfinite(each.y).any():
        return
    if len(each.x) <= 20:
        look["markevery"] = 1
    axes.plot(each.x, np.where(np.isfinite(each.y), each.y, np.nan), **look)
    if (each.low < each.high).any():
        band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
        axes.fill_between(each.x, each.low, each.high, **band)


def _scatter(
    picture: kinds.Scatter, table: xr.Dataset, roles: Mapping, result: "TableResult"
) -> "Figure":
    figure, panels = open_figure(3.6)
    axes, rows = panels[0, 0], table["row"].values.tolist()
    points = np.stack([table[n].values.astype(float) for n in picture.names()], 1)
    named = [kinds.group(str(row), picture.by) for row in rows]
    groups = list(dict.fromkeys(each for each, _ in named))
    for row, point, (within, _) in zip(rows, points, named, strict=True):
        place = groups.index(within)
        look = look_of(roles[row])
        if within:
            look |= {"label": within, "marker": _MARKERS[place % len(_MARKERS)]}
            if roles[row] != "other":
                look["color"] = curves.style(place)["color"]
        axes.plot(*point[:, None], linestyle="", markersize=6, **look)
    bound = draw_bound(axes, picture, result, up=False)
    set_scale(axes.xaxis, [points[:, 0]], picture.log_x)
    set_scale(axes.yaxis, [points[:, 1], bound], picture.log)
    if picture.front:
        best = points[kinds.find_front(points, picture.front)]
        line = {"color": curves.COLOURS[0], "linewidth": 0.9, "label": "no better one"}
        axes.plot(*best.T, zorder=1, **line)
    axes.margins(0.12)
    axes.set_xlabel(plain(kinds.heading(picture.x, result.table.columns)))
    axes.set_ylabel(label_of(picture, picture.y, result))
    lost = [
        f"{row} {word_of(point[~np.isfinite(point)][0])}"
        for row, point in zip(rows, points, strict=True)
        if not np.isfinite(point).all()
    ]
    tell_missing(axes, lost)
    if picture.labels:
        bare = _label_points(figure, axes, points, [name for _, name in named])
        tell_missing(axes, lost + [f"{name} unnamed" for name in bare])
    return figure


def _label_points(
    figure: "Figure", axes: "Axes", points: np.ndarray, names: Sequence[str]
) -> list[str]:
    """Writes names beside points, where they cover neither points nor each other.

    Returns:
      Those that find no place.
    """
    from matplotlib import transforms

    figure.draw_without_rendering()
    at = axes.transData.transform(points)
    taken = [
        transforms.Bbox([(x - 4, y - 4), (x + 4, y + 4)])
        for x, y in at
        if np.isfinite((x, y)).all()
    ]
    inside, bare = axes.get_window_extent(), []
    for name, point in zip(names, points, strict=True):
        if not np.isfinite(point).all():
            continue
        words = plain(curves.shorten(name))
        text = axes.annotate(words, tuple(point), (0, 0), textcoords="offset points")
        for x, y, ha, va in _BESIDE:
            text.set(ha=ha, va=va, fontsize=SMALL, position=(x, y))
            box = text.get_window_extent().padded(1)
            within = np.all(box.min >= inside.min) and np.all(box.max <= inside.max)
            if within and not box.count_overlaps(taken):
                taken.append(box)
                if max(abs(x), abs(y)) > 5:
                    _lead(axes, tuple(point), (x, y))
                break
        else:
            text.remove()
            bare.append(name)
    return bare


def _lead(axes: "Axes", point: tuple[Any, ...], offset: tuple[int, int]) -> None:
    """Draws a thin line from a point to a name that stands away from it."""
    arrow = {"arrowstyle": "-", "linewidth": 0.5, "color": OTHER, "shrinkB": 2}
    options: dict[str, Any] = {"textcoords": "offset points", "arrowprops": arrow}
    axes.annotate("", point, xytext=offset, **options)


_DRAWERS: Mapping[type, Any] = {
    kinds.Dots: _dots,
    kinds.Lines: _lines,
    kinds.Bars: _bars,
    kinds.Scatter: _scatter,
    kinds.Timeline: spans_and_fields.draw_timeline,
    kinds.Map: spans_and_fields.draw_map,
}
