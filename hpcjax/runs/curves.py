"""Pictures of runs: validation error against steps and against training time."""

import io
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import xarray as xr

from hpcjax.core.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a page does without: styles would hold for all of it, groups are named alike in
# every figure and nothing refers to them, and its font is the page's.
_SHORTER = (
    (r"<(metadata|style).*?</\1>|<!--.*?-->", ""),
    (r'<g id="[^"]*"', "<g"),
    (r"font-family: [^;\"]*;? ?", ""),
    (r"\s*\n\s*", "\n"),
)
_DIGITS = r"(\.\d\d)\d+"


def draw(
    rows: Mapping[str, xr.Dataset],
    metric: str = "val_error",
    against: Sequence[Literal["steps", "seconds"]] = ("steps", "seconds"),
) -> "Figure":
    """Draws `metric` of each row: median over seeds as a line, their range as a band.

    Args:
      rows: `{row: history with dimension seed}`.
      metric: a variable with dimensions `seed` and `eval_step`.
      against: what each panel shows it against: optimizer steps, training seconds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(against), 3.6), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(against), sharey=True))
    for what, axes in zip(against, panels, strict=True):
        for name, row in rows.items():
            if metric in row:
                _line(axes, name, row, metric, what)
        axes.set(xlabel="optimizer steps" if what == "steps" else "training seconds")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
    panels[0].set_ylabel(metric.replace("val_", "validation "))
    panels[-1].legend(frameon=False)
    return figure


def _line(axes: "Axes", name: str, row: xr.Dataset, metric: str, against: str) -> None:
    places = row["eval_step"]
    if against == "seconds":
        places = row["eval_seconds"].median("seed")
    axes.plot(places, row[metric].median("seed"), label=name, linewidth=1.5)
    low, high = row[metric].min("seed"), row[metric].max("seed")
    axes.fill_between(places, low, high, alpha=0.15, linewidth=0)


def save(figure: "Figure", path: pathlib.Path) -> None:
    """Writes a figure; the format is the path's suffix."""
    write_atomic(path, encode(figure, path.suffix.removeprefix(".")))


def encode(figure: "Figure", form: str) -> bytes:
    """Returns a figure as the bytes of a file of format `form`, such as `"svg"`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150)
    return buffer.getvalue()


def inline(figure: "Figure", name: str) -> str:
    """Returns a figure as SVG to be put into a page, whose text colour it takes.

    Args:
      figure: what is drawn, in black on white.
      name: differs between the figures of a page, so that their inner names do.
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
