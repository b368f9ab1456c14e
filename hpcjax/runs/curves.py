"""Pictures of runs: validation error against steps and against training time."""

import io
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from hpcjax.core.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What is removed from an SVG in a page: styles, which would apply to the whole page;
# names of groups, which are the same in all figures and not referred to; and fonts.
_SHORTER = (
    (r"<(metadata|style).*?</\1>|<!--.*?-->", ""),
    (r'<g id="[^"]*"', "<g"),
    (r"font-family: [^;\"]*;? ?", ""),
    (r"\s*\n\s*", "\n"),
)
_DIGITS = r"(\.\d\d)\d+"
# More lines than these have their legend below the panels.
_CROWD = 4


def draw(
    rows: Mapping[str, xr.Dataset],
    metric: str = "val_error",
    against: Sequence[Literal["steps", "seconds"]] = ("steps", "seconds"),
) -> "Figure":
    """Draws `metric` of each row: median over seeds as a line, their range as a band.

    Args:
      rows: `{row: history with dimension seed}`; those without the metric are left out.
      metric: a variable with dimensions `seed` and `eval_step`.
      against: what each panel shows it against: optimizer steps, training seconds.
    """
    from matplotlib.figure import Figure

    drawn = select_rows(rows, metric)
    below = len(drawn) > _CROWD
    height = 3.6 + below * 0.2 * math.ceil(len(drawn) / 3)
    figure = Figure(figsize=(4.5 * len(against), height), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(against), sharey=True))
    for what, axes in zip(against, panels, strict=True):
        for place, (name, row) in enumerate(drawn.items()):
            # Colours repeat after ten lines.
            style = {"label": name, "linestyle": ("-", "--", ":")[place // 10 % 3]}
            _line(axes, row, metric, what, 0.06 if below else 0.15, style)
        axes.set(xlabel="optimizer steps" if what == "steps" else "training seconds")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
    panels[0].set_ylabel(metric.replace("val_", "validation "))
    if below:
        lines, names = panels[-1].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False)
    elif len(drawn) > 1:
        panels[-1].legend(frameon=False)
    return figure


def select_rows(rows: Mapping[str, xr.Dataset], metric: str) -> dict[str, xr.Dataset]:
    """Returns the rows in which `metric` is a curve and not a single number."""
    return {
        name: row
        for name, row in rows.items()
        if metric in row and "eval_step" in row[metric].dims
    }


def _line(
    axes: "Axes",
    row: xr.Dataset,
    metric: str,
    against: str,
    alpha: float,
    style: Mapping[str, Any],
) -> None:
    x = row["eval_step"]
    if against == "seconds":
        x = row["eval_seconds"].median("seed")
    axes.plot(x, row[metric].median("seed"), linewidth=1.5, **style)
    if row.sizes["seed"] > 1:
        low, high = row[metric].min("seed"), row[metric].max("seed")
        axes.fill_between(x, low, high, alpha=alpha, linewidth=0)


def save(figure: "Figure", path: pathlib.Path) -> None:
    """Writes a figure; the format is the path's suffix."""
    write_atomic(path, encode(figure, path.suffix.removeprefix(".")))


def encode(figure: "Figure", form: str) -> bytes:
    """Returns a figure as the bytes of a file of format `form`, such as `"svg"`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150)
    return buffer.getvalue()


def inline(figure: "Figure", name: str) -> str:
    """Returns a figure as SVG for a page, in the page's text colour.

    Args:
      figure: drawn in black on white.
      name: a different one for each figure of a page, so that ids in them differ.
    """
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    for pattern, new in _SHORTER:
        text = re.sub(pattern, new, text, flags=re.DOTALL)
    return re.sub(r' d="[^"]*"', lambda d: re.sub(_DIGITS, r"\1", d[0]), text).strip()
