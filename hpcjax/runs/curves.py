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
# More rows than these have paler bands.
_CROWD = 4
# Values that differ by more than this factor are drawn on a logarithmic axis.
_WIDE = 30
# Rows differ in all three, so that they can be told apart without colour, too: the
# colours of Okabe and Ito but for the palest, which those see who do not see all.
# Numbers without a common factor: 140 rows go by before two are alike.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#666666",
)
_DASHES = ("solid", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
_MARKERS = "os^DX"
# Markers stand so far apart along a line, in parts of the panel's diagonal.
_APART = 0.12
# Units of figures whose names end so.
_UNITS = {"error": "share", "seconds": "s", "bytes": "bytes"}
# Inches: small, for then text of ten points can be read where a picture is shown small.
_PANEL = (3.4, 2.8)
# Of a legend: a letter, the line beside a name with the space around it, a line of it.
_LETTER, _SAMPLE, _LINE = 0.087, 0.85, 0.21


def style(place: int) -> dict[str, Any]:
    """Returns how the line of the row at a place is drawn, for `Axes.plot`.

    Rows side by side differ in colour, dashes and markers. Markers of two rows on the
    same curve do not cover each other.
    """
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "linestyle": _DASHES[place % len(_DASHES)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "markevery": (_APART * (place % len(_MARKERS)) / len(_MARKERS), _APART),
        "markersize": 5,
        "linewidth": 1.6,
    }


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
    drawn = select_rows(rows, metric)
    width, height = _PANEL
    figure, panels = _open(len(against), width * len(against), height)
    for what, axes in zip(against, panels, strict=True):
        for place, (name, row) in enumerate(drawn.items()):
            alpha = 0.06 if len(drawn) > _CROWD else 0.15
            _line(axes, row, metric, what, alpha, {"label": name, **style(place)})
        steps = what == "steps"
        axes.set(xlabel="optimizer steps" if steps else "training time (s)")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both", linewidth=0.4)
    panels[0].set_ylabel(describe(metric))
    add_legend(figure)
    return figure


def describe(figure: str) -> str:
    """Returns the name of a figure in words, with its unit if the name tells it.

    Examples:
      >>> describe("val_error"), describe("step_seconds")
      ('validation error (share)', 'step seconds (s)')
    """
    words = figure.replace("val_", "validation ").replace("_", " ")
    units = [unit for end, unit in _UNITS.items() if figure.endswith(end)]
    return f"{words} ({units[0]})" if units else words


def _open(count: int, width: float, height: float) -> "tuple[Figure, Sequence[Axes]]":
    """Returns an empty figure of so many inches, and its panels side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, count, sharey=True, squeeze=False)[0]


def add_legend(figure: "Figure") -> None:
    """Names what is drawn once, below all panels, which become no lower for it.

    One thing alone needs no name.
    """
    named = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {
        name: handle for each in named for handle, name in zip(*each, strict=True)
    }
    if len(handles) < 2:
        return
    width, height = figure.get_size_inches()
    column = _SAMPLE + _LETTER * max(map(len, handles))
    columns = min(len(handles), max(1, int(width / column)))
    lines = math.ceil(len(handles) / columns)
    figure.set_size_inches(max(width, column), height + _LINE * lines)
    figure.legend(
        list(handles.values()),
        [name.replace("$", r"\$") for name in handles],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=3,
    )


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
    look: Mapping[str, Any],
) -> None:
    x = row["eval_step"]
    if against == "seconds":
        x = row["eval_seconds"].median("seed")
    axes.plot(x, row[metric].median("seed"), **look)
    if row.sizes["seed"] > 1:
        low, high = row[metric].min("seed"), row[metric].max("seed")
        axes.fill_between(x, low, high, color=look["color"], alpha=alpha, linewidth=0)


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
    names = _columns_to_draw(table, columns)
    if not names:
        return None
    width, height = 2.4 + 2.8 * len(names), 0.9 + 0.22 * table.sizes["row"]
    figure, panels = _open(len(names), width, height)
    for name, axes in zip(names, panels, strict=True):
        _dots(axes, table, name)
        axes.set_xlabel(columns[name].replace("$", r"\$"))
        axes.grid(alpha=0.3, linewidth=0.4)
    rows = [str(row).replace("$", r"\$") for row in table["row"].values]
    panels[0].set_yticks(range(len(rows)), rows)
    add_legend(figure)
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
    dot = {"color": _COLOURS[0], "markersize": 5, "label": "estimate"}
    axes.plot(values, range(len(values)), "o", **dot)
    if f"{name}_by_seed" in table:
        seeds = table[f"{name}_by_seed"].transpose("row", ...).values
        rows = np.broadcast_to(np.arange(len(seeds))[:, None], seeds.shape)
        seen = np.isfinite(seeds)
        tick = {"color": _COLOURS[1], "markersize": 9, "label": "one seed"}
        axes.plot(seeds[seen], rows[seen], "|", **tick)
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
    name = "interval" if low < high else ""
    bar = {"color": _COLOURS[0], "linewidth": 2, "label": name}
    axes.plot([low, min(high, edge)], [row, row], **bar)
    if high > edge:
        axes.plot([edge], [row], ">", color=_COLOURS[0], clip_on=False)


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
