"""The response of a sweep's value to its axes, as a table and as a picture."""

import pathlib
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import xarray as xr
from rich.console import Group, RenderableType

from hpcjax.runs import curves, show
from hpcjax.runs.sweeps.driver import SweepResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# An axis whose ends differ by more than this factor is logarithmic.
_SPREAD = 20.0


def summary(result: SweepResult, best: int = 10) -> RenderableType:
    """Returns a table of the best trials, and counts of the others by status."""
    dataset = result.dataset
    names = dataset.attrs["axes"].split()
    frame = ranking(dataset)
    shown = frame[frame["value"].notna()].head(best)
    title = f"{result.name}: the best of {len(frame)} trials by {dataset.attrs['by']}"
    rows = [
        [*(str(row[name]) for name in names), f"{row['value']:.6g}", row["run"]]
        for _, row in shown.iterrows()
    ]
    counts = frame["status"].value_counts()
    lines = [", ".join(f"{count} {status}" for status, count in counts.items())]
    failed = frame[frame["error"] != ""]
    lines += sorted(
        f"{count} failed: {error}"
        for error, count in failed["error"].value_counts().items()
    )
    lines.append(f"sweep      {result.name}\ndirectory  {result.directory}")
    return Group(show.frame(title, [*names, "value", "run"], rows), "\n".join(lines))


def ranking(dataset: xr.Dataset) -> pd.DataFrame:
    """Returns one line per trial, best first: axes, value, status, run and error."""
    cells = dataset[["value", "status", "run", "error"]].to_dataframe().reset_index()
    return cells.sort_values("value", kind="stable")


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

    names = dataset.attrs["axes"].split()
    flat = dataset[["value"]].stack(cell=dataset["value"].dims).reset_index("cell")
    mapped = len(names) > 1 and dataset["value"].ndim > 1
    panels = len(names) + mapped
    figure = Figure(figsize=(1 + 3.4 * panels, 3.4), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, panels))
    for name, panel in zip(names, axes, strict=False):
        _panel(panel, flat[name].values, flat["value"].values, name)
        panel.set_ylabel(str(dataset.attrs.get("by", "value")))
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
        panel.legend(frameon=False)
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
