"""Curves of runs, and how all pictures look, are written and put into pages.

Validation error against steps and against training time; tables' are in `pictures`.
"""

import html
import io
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

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
# Rows differ in all three, so that they can be told apart without colour, too: the
# colours of Okabe and Ito but for the palest, which those see who do not see all.
# Numbers without a common factor: 140 rows go by before two are alike.
COLOURS = (
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
# Letters of the longest name, which leaves room for what it names.
_LONGEST = 60


def plain(text: Any) -> str:
    """Returns a text as matplotlib is to print it, without formulas."""
    return str(text).replace("$", r"\$")


def shorten(name: Any) -> str:
    """Returns a name of a row as it is printed: of a long one, both ends."""
    text = str(name)
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}…{text[1 - half :]}"


def style(place: int) -> dict[str, Any]:
    """Returns how the line of the row at a place is drawn, for `Axes.plot`.

    Rows side by side differ in colour, dashes and markers. Markers of two rows on the
    same curve do not cover each other.
    """
    return {
        "color": COLOURS[place % len(COLOURS)],
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
        shorten(name): handle
        for each in named
        for handle, name in zip(*each, strict=True)
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
        [plain(name) for name in handles],
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


def inline(figure: "Figure", name: str, said: str = "") -> str:
    """Returns a figure as SVG for a page, in the page's text colour."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    if said:
        label = html.escape(said)
        text = text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
    for pattern, new in _SHORTER:
        text = re.sub(pattern, new, text, flags=re.DOTALL)
    return re.sub(r' d="[^"]*"', lambda d: re.sub(_DIGITS, r"\1", d[0]), text).strip()
