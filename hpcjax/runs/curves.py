"""Pictures of runs: validation error against steps and against training time."""

import io
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import xarray as xr

from hpcjax.core.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Mapping[str, xr.Dataset], metric: str = "val_error") -> "Figure":
    """Draws `metric` of each row: median over seeds as a line, their range as a band.

    Args:
      rows: `{row: history with dimension seed}`.
      metric: a variable with dimensions `seed` and `eval_step`.

    Returns:
      A figure of two panels: against optimizer steps, and against training seconds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    for name, row in rows.items():
        if metric not in row:
            continue
        middle = row[metric].median("seed")
        low, high = row[metric].min("seed"), row[metric].max("seed")
        seconds = row["eval_seconds"].median("seed")
        for axes, places in ((by_steps, row["eval_step"]), (by_time, seconds)):
            axes.plot(places, middle, label=name, linewidth=1.5)
            axes.fill_between(places, low, high, alpha=0.15, linewidth=0)
    by_steps.set(xlabel="optimizer steps", ylabel=metric.replace("val_", "validation "))
    by_time.set(xlabel="training seconds")
    for axes in (by_steps, by_time):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
    by_time.legend(frameon=False)
    return figure


def save(figure: "Figure", path: pathlib.Path) -> None:
    """Writes a figure; the format is the path's suffix."""
    write_atomic(path, encode(figure, path.suffix.removeprefix(".")))


def encode(figure: "Figure", form: str) -> bytes:
    """Returns a figure as the bytes of a file of format `form`, such as `"svg"`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150)
    return buffer.getvalue()
