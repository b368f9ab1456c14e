"""Pictures of runs and of tables.

Of runs: validation error against steps and against training time. Of tables, whose runs
need not be there: their cells with intervals.
"""

import io
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
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
# Values that differ by more than this factor are drawn on a logarithmic axis.
_WIDE = 30


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
    (line,) = axes.plot(x, row[metric].median("seed"), linewidth=1.5, **style)
    if row.sizes["seed"] > 1:
        low, high = row[metric].min("seed"), row[metric].max("seed")
        colour = line.get_color()
        axes.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)


def draw_cells(table: xr.Dataset, columns: Mapping[str, str]) -> "Figure | None":
    """Draws a table's cells: a dot for each row, its interval, and its single seeds.

    Shown are the columns that have an interval, at most two of them, and otherwise the
    first one of numbers. A target that was missed, an infinite cell, is said in words.
    An interval without an end goes to the panel's edge, with an arrow.

    Args:
      table: with dimension `row`; `<column>_low` and `_high` are the interval of a
        column, `<column>_by_seed` with dimension `seed` the seeds that it is of.
      columns: headings of the columns that may be shown, in order.

    Returns:
      The figure; None if no column can be drawn.
    """
    from matplotlib.figure import Figure

    names = _columns_to_draw(table, columns)
    if not names:
        return None
    size = (3.2 + 3.4 * len(names), 1.0 + 0.24 * table.sizes["row"])
    figure = Figure(figsize=size, layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(names), sharey=True))
    for name, axes in zip(names, panels, strict=True):
        _dots(axes, table, name)
        axes.set_xlabel(columns[name].replace("$", r"\$"))
        axes.grid(alpha=0.3, linewidth=0.4)
    rows = [str(row).replace("$", r"\$") for row in table["row"].values]
    panels[0].set_yticks(range(len(rows)), rows)
    return figure


def _columns_to_draw(table: xr.Dataset, columns: Mapping[str, str]) -> list[str]:
    numbers = [
        name
        for name in columns
        if name in table
        and table[name].dims == ("row",)
        and table[name].dtype.kind in "if"
        and np.isfinite(table[name]).any()
    ]
    measured = [name for name in numbers if f"{name}_low" in table]
    return measured[:2] or numbers[:1]


def _dots(axes: "Axes", table: xr.Dataset, name: str) -> None:
    """Draws one column against the numbers of its rows."""
    values = table[name].values.astype(float)
    low, high = (table.get(f"{name}_{end}", table[name]) for end in ("low", "high"))
    shown = np.concatenate([values, low.values, high.values])
    shown = shown[np.isfinite(shown)]
    if shown.min() > 0 and shown.max() > _WIDE * shown.min():
        axes.set_xscale("log")
    axes.plot(values, range(len(values)), "o", color="C0", markersize=5)
    if f"{name}_by_seed" in table:
        seeds = table[f"{name}_by_seed"].transpose("row", ...).values
        rows = np.broadcast_to(np.arange(len(seeds))[:, None], seeds.shape)
        seen = np.isfinite(seeds)
        axes.plot(seeds[seen], rows[seen], "|", color="C1", markersize=9)
        shown = np.concatenate([shown, seeds[seen]])
    axes.update_datalim([(shown.min(), 0), (shown.max(), 0)])
    axes.autoscale_view()
    axes.set(xlim=axes.get_xlim(), ylim=(len(values) - 0.5, -0.5))
    for row, (value, *ends) in enumerate(
        zip(values, low.values, high.values, strict=True)
    ):
        if np.isfinite(value):
            _interval(axes, row, *ends)
        else:
            missed = "missed" if value == np.inf else "missing"
            place = {"transform": axes.get_yaxis_transform(), "va": "center"}
            axes.text(0.99, row, missed, ha="right", fontsize="small", **place)


def _interval(axes: "Axes", row: int, low: float, high: float) -> None:
    """Draws an interval, to the right edge and with an arrow if it has no end."""
    edge = axes.get_xlim()[1]
    axes.plot([low, min(high, edge)], [row, row], color="C0", linewidth=2)
    if high > edge:
        axes.plot([edge], [row], ">", color="C0", clip_on=False)


def save(figure: "Figure", path: pathlib.Path, of: Iterable[str] = ()) -> None:
    """Writes a figure; the format is the path's suffix.

    Args:
      figure: what is drawn.
      path: the file.
      of: ids of the runs that are drawn; a PNG tells them as its `Description`.
    """
    form = path.suffix.removeprefix(".")
    about = {"Description": " ".join(of)} if form == "png" else {}
    write_atomic(path, encode(figure, form, about))


def encode(
    figure: "Figure", form: str, about: Mapping[str, str] | None = None
) -> bytes:
    """Returns a figure as the bytes of a file of format `form`, such as `"svg"`.

    `about` is written into the file as its metadata.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form, dpi=150, metadata=dict(about or {}))
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
