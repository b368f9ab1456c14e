"""The response of a sweep's value to its axes, as a table and as a picture."""

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import xarray as xr
from rich.console import Group, RenderableType

from hpcjax.runs import curves, show
from hpcjax.runs.sweeps.driver import SEED, SweepResult, kept_values

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# An axis whose ends differ by more than this factor is logarithmic.
_SPREAD = 20.0


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
    table = show.frame(f"{result.name}: {title}", columns, rows[:best])
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
    """Draws `value` against every axis, one panel each, and a map of the first two.

    A panel shows all trials as points, and for listed values the median over all
    others as a line. Trials without a finite value are marked at the upper edge.

    Args:
      dataset: what `gather` returned.
    """
    from matplotlib.figure import Figure

    names = _axes(dataset)
    flat = dataset[["value"]].stack(cell=dataset["value"].dims).reset_index("cell")
    mapped = len(names) > 1 and dataset["value"].ndim > 1
    panels = len(names) + mapped
    figure = Figure(figsize=(1 + 3.4 * panels, 3.4), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, panels))
    for name, panel in zip(names, axes, strict=False):
        _panel(panel, flat[name].values, flat["value"].values, name)
        panel.set_ylabel(str(dataset.attrs.get("by", "value")))
    if axes[0].get_legend_handles_labels()[1]:  # the same in every panel
        axes[0].legend(frameon=False)
    if mapped:
        _map(figure, axes[-1], dataset["value"], names)
    return figure


def _panel(panel: "Axes", places: np.ndarray, values: np.ndarray, name: str) -> None:
    texts = places.dtype.kind not in "fi"
    known = list(dict.fromkeys(map(str, places)))
    at = np.array([known.index(str(p)) for p in places]) if texts else places
    good = np.isfinite(values)
    panel.scatter(at[good], values[good], s=14, alpha=0.6)
    if not good.all() and good.any():
        panel.scatter(
            at[~good],
            np.full((~good).sum(), values[good].max()),
            marker="x",
            color="tab:red",
            label="no finite value",
        )
    listed = np.unique(at[good])
    if len(listed) < good.sum():
        middles = [np.median(values[good & (at == place)]) for place in listed]
        panel.plot(listed, middles, linewidth=1.5)
    panel.set_xlabel(name)
    if texts:
        panel.set_xticks(range(len(known)), known, parse_math=False)
    elif places.size and places.min() > 0 and places.max() / places.min() > _SPREAD:
        panel.set_xscale("log")
    panel.grid(alpha=0.3, linewidth=0.4)


def _map(
    figure: "Figure", panel: "Axes", value: xr.DataArray, names: list[str]
) -> None:
    first, second, *others = names
    finite = value.where(np.isfinite(value))
    shown = finite.median(others) if others else finite
    image = panel.imshow(
        shown.transpose(first, second).values, aspect="auto", cmap="viridis_r"
    )
    for axis, name in ((panel.yaxis, first), (panel.xaxis, second)):
        labels = [f"{x:g}" if np.isreal(x) else str(x) for x in shown[name].values]
        axis.set_ticks(range(len(labels)), labels, parse_math=False)
    panel.set(ylabel=first, xlabel=second)
    figure.colorbar(image)
