"""The response of a sweep's value to its axes, as a table and as a picture."""

import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import xarray as xr
from rich.console import Group, RenderableType

from hpcjax.runs import curves
from hpcjax.runs.frames import Frame
from hpcjax.runs.sweeps import axes
from hpcjax.runs.sweeps.driver import SEED, SweepResult, kept_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# An axis with so few values names each; a map with so few cells tells each.
_LISTED, _TOLD = 8, 42
# From this share of a map's colours on they are dark.
_DARK = 0.5


def summary(result: SweepResult, best: int = 10) -> RenderableType:
    """Returns a table of the best points, and counts of the trials by status.

    Where the seed is swept, points are judged by their mean over seeds.
    """
    dataset = result.dataset
    frame = ranking(dataset)
    counts = frame["status"].value_counts()
    lines = [", ".join(f"{count} {status}" for status, count in counts.items())]
    if kept := dataset.attrs.get("subject_to", ""):
        lines.append(f"{int((dataset['feasible'] == 1).sum())} keep {kept}")
    failed = frame[frame["error"] != ""]
    lines += sorted(
        f"{count} failed: {error}"
        for error, count in failed["error"].value_counts().items()
    )
    lines.append(f"sweep      {result.name}\ndirectory  {result.directory}")
    by = dataset.attrs["by"]
    shown = frame[frame["mean"].notna()]
    if SEED in _axes(dataset):
        columns, rows = _points(shown, _axes(dataset))
        title = f"the best of {len(rows)} points by the mean of {by} over seeds"
    else:
        columns = [*_axes(dataset), "value", "run"]
        rows = [_cells(row[columns]) for _, row in shown.iterrows()]
        title = f"the best of {len(frame)} trials by {by}"
    table = Frame(f"{result.name}: {title}", columns, rows[:best])
    return Group(table, "\n".join(lines))


def _points(
    trials: pd.DataFrame, axes: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows of the points that all seeds have a value of."""
    others = [name for name in axes if name != SEED]
    groups = trials.groupby(others or ["by"], sort=False, dropna=False)
    rows = []
    for _, group in groups:
        ends = f"{group['value'].min():.6g} to {group['value'].max():.6g}"
        first = _cells(group.iloc[0][[*others, "mean"]])
        rows.append([*first, ends, str(len(group))])
    return [*others, "mean", "range", "seeds"], rows


def _cells(row: pd.Series) -> list[str]:
    return [f"{x:.6g}" if n in ("value", "mean") else str(x) for n, x in row.items()]


def _axes(dataset: xr.Dataset) -> list[str]:
    return dataset.attrs["axes"].split()


def ranking(dataset: xr.Dataset) -> pd.DataFrame:
    """Returns one line per trial, best first: axes, value, mean, status, run, error.

    `mean` is that of the values of all seeds at the trial's point, by which trials are
    ordered: the best of many seeds would be chosen for its luck. It is the value itself
    where the seed is not swept, and NaN where a seed has no value or breaks the sweep's
    constraint.
    """
    told = dataset[["value", "status", "run", "error"]]
    cells = told.assign(kept=kept_values(dataset)).to_dataframe().reset_index()
    others = [name for name in _axes(dataset) if name != SEED]
    cells["by"] = dataset.attrs["by"]
    groups = cells.groupby(others or ["by"], sort=False, dropna=False)
    cells["mean"] = groups["kept"].transform(lambda values: values.mean(skipna=False))
    return cells.sort_values(["mean", *others, "value"], kind="stable")


def save_picture(result: SweepResult) -> pathlib.Path:
    """Writes `response.png` into the sweep's folder and returns its path."""
    path = result.directory / "response.png"
    curves.save(draw(result.dataset), path)
    return path


def draw(dataset: xr.Dataset) -> "Figure":
    """Draws `value` against every swept key, one panel each, and a map of two.

    A point is the median over seeds, its bar their range. With several keys a line is
    the median of the points over the others. Points of which a seed has no finite value
    are marked at the upper edge. An axis is logarithmic if it was given so, or its
    listed values are positive and span a factor of 10, as those of `value` may. Its key
    has the unit that the field's help begins with.

    Args:
      dataset: what `gather` returned.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    keys = [name for name in _axes(dataset) if name != SEED] or [SEED]
    points = _over_seeds(dataset, keys)
    logarithmic = {*dataset.attrs.get("logarithmic", "").split()}
    said = curves.describe(str(dataset.attrs.get("by", "value")))
    count = len(keys) + (len(keys) == 2)
    figure = Figure(figsize=(0.6 + 3.4 * count, 3.2), layout="constrained")
    first = None
    for number, key in enumerate(keys, 1):
        panel = figure.add_subplot(1, count, number, sharey=first)
        _draw_points(panel, points, key, logarithmic)
        first = first or panel
        panel.tick_params(labelleft=panel is first)
    assert first is not None
    seeds = SEED in _axes(dataset) and SEED not in keys
    first.set_ylabel(f"{said}\nmedian and range of seeds" if seeds else said)
    if axes.spans(points[["low", "high"]].to_numpy()):
        first.set_yscale("log")
        _name_ticks(first.yaxis, points[["low", "high"]])
    if len(keys) == 2:
        panel = figure.add_subplot(1, count, count)
        _draw_map(panel, points, keys, logarithmic)
        bar = figure.colorbar(panel.collections[0])
        bar.set_label(f"{said}, median over seeds" if seeds else said)
        if isinstance(bar.norm, LogNorm):
            _name_ticks(bar.ax.yaxis, points["median"])
    lines = dataset.attrs.get("units", "").splitlines()
    units = dict(line.split("=") for line in lines)
    for axis in (axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)):
        if unit := units.get(axis.get_label_text()):
            axis.set_label_text(f"{axis.get_label_text()} ({unit})", parse_math=False)
    curves.add_legend(figure)
    return figure


def _over_seeds(dataset: xr.Dataset, keys: list[str]) -> pd.DataFrame:
    """Returns a line for each point: keys, median, low, high, whether one is lost."""
    cells = dataset[["value"]].to_dataframe().reset_index()
    finite = np.isfinite(cells["value"])
    cells = cells.assign(finite=cells["value"].where(finite), lost=~finite)
    groups = cells.groupby(keys, sort=False, dropna=False)
    named = {"median": "median", "low": "min", "high": "max"}
    return groups.agg(
        **{name: ("finite", how) for name, how in named.items()}, lost=("lost", "any")
    ).reset_index()


def _show_places(
    panel: "Axes", way: str, values: pd.Series, logarithmic: set[str]
) -> np.ndarray:
    """Names the axis `way`, scales it, and returns where on it values are."""
    key = str(values.name)
    axis = getattr(panel, f"{way}axis")
    axis.set_label_text(key, parse_math=False)
    if values.dtype.kind not in "fi" or key == SEED:
        known = list(dict.fromkeys(map(str, values)))
        axis.set_ticks(range(len(known)), known, parse_math=False)
        return np.array([known.index(str(value)) for value in values])
    if key in logarithmic:
        getattr(panel, f"set_{way}scale")("log")
        _name_ticks(axis, values)
    listed = np.unique(values)
    if len(listed) <= _LISTED:
        axis.set_ticks(listed, [f"{value:g}" for value in listed])
        axis.set_ticks([], minor=True)
    return values.to_numpy()


def _name_ticks(axis: Any, values: pd.DataFrame | pd.Series) -> None:
    """Writes plain numbers at a logarithmic axis, so many that two can be compared."""
    from matplotlib.ticker import LogLocator, NullFormatter

    few = np.nanmax(values) < axes.SPREAD**2 * np.nanmin(values)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _draw_points(
    panel: "Axes", points: pd.DataFrame, key: str, logarithmic: set[str]
) -> None:
    """Draws medians and ranges over a key."""
    at = _show_places(panel, "x", points[key], logarithmic)
    good = points["median"].notna().to_numpy()
    median, low, high = (points[name][good] for name in ("median", "low", "high"))
    look: dict[str, Any] = {"fmt": "o", "alpha": 0.7, "capsize": 3}
    look["label"] = "trial" if low.equals(high) else "median and range of seeds"
    panel.errorbar(at[good], median, [median - low, high - median], **look)
    middles = median.groupby(at[good]).median()
    if len(middles) < good.sum():
        look = {"marker": "_", "markersize": 18, "color": "tab:orange", "zorder": 3}
        numbers = points[key].dtype.kind in "fi"
        look |= {"linestyle": "solid" if numbers else "none"}
        panel.plot(middles.index, middles, label="median over other keys", **look)
    lost = points["lost"].to_numpy()
    if lost.any():
        edge: dict[str, Any] = {"clip_on": False, "label": "no finite value"}
        edge |= {"transform": panel.get_xaxis_transform()}
        panel.scatter(
            at[lost], np.ones(lost.sum()), marker="x", color="tab:red", **edge
        )
    panel.margins(x=0.12)
    panel.grid(alpha=0.3, linewidth=0.4)


def _draw_map(
    panel: "Axes", points: pd.DataFrame, keys: list[str], logarithmic: set[str]
) -> None:
    """Draws medians as colours over two keys: cells of a grid, else points."""
    median = points["median"]
    scale = "log" if axes.spans(median) else "linear"
    look: dict[str, Any] = {"cmap": "viridis_r", "norm": scale}
    codes = [pd.factorize(points[key], use_na_sentinel=False) for key in keys]
    shape = [len(found) for _, found in codes]
    if len(points) < math.prod(shape):
        y, x = (
            _show_places(panel, way, points[key], logarithmic)
            for way, key in zip("yx", keys, strict=True)
        )
        panel.scatter(x, y, c=median, **look)
        return
    cells = np.full(shape, np.nan)
    cells[codes[0][0], codes[1][0]] = median
    drawn = panel.pcolormesh(cells, **look)
    for way, key, (_, found) in zip("yx", keys, codes, strict=True):
        axis = getattr(panel, f"{way}axis")
        axis.set_label_text(key, parse_math=False)
        names = [f"{x:g}" if np.isreal(x) else str(x) for x in found]
        axis.set_ticks(np.arange(len(found)) + 0.5, names, parse_math=False)
    if cells.size <= _TOLD:
        _write_cells(panel, cells, drawn.norm)


def _write_cells(panel: "Axes", cells: np.ndarray, norm: Any) -> None:
    """Writes numbers into the cells of a map, so that they can be read."""
    for (row, column), value in np.ndenumerate(cells):
        told = f"{value:.3g}" if np.isfinite(value) else "none"
        dark = np.isfinite(value) and norm(value) > _DARK
        place = {"ha": "center", "va": "center", "fontsize": "small"}
        colour = "white" if dark else "black"
        panel.text(column + 0.5, row + 0.5, told, color=colour, **place)
