"""What the panels of all pictures of tables share: axes, looks, bounds, verdicts."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.runs import curves
from hpcjax.runs import pictures as kinds
from hpcjax.runs.curves import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcjax.runs.tables import TableResult

# Legible on white and on black.
OTHER, FAILED = "#808080", "#D55E00"
HATCHES = ("", "////", "....", r"\\\\", "xxxx", "----", "++++")
# Inches: a page's column, a row of dots, a group of bars, and what stands around.
WIDTH, ROW, GROUP, AROUND = 7.0, 0.21, 0.12, 0.75
# Values that differ by more than this factor are drawn on a logarithmic axis.
_WIDE = 30
SMALL = 8
# Inches of a line of small text, and its letters in a panel.
LINE, LETTERS = 0.14, 90


def tell_verdicts(figure: "Figure", text: str, passed: bool) -> None:
    """Writes above a picture which claims hold; panels become no lower for it."""
    colour = OTHER if passed else FAILED
    if text:
        width, height = figure.get_size_inches()
        figure.set_size_inches(width, height + LINE * text.count("\n"))
        place = {"x": 0.01, "ha": "left", "fontsize": SMALL}
        figure.suptitle(plain(text), color=colour, **place)


def tell_missing(axes: "Axes", said: Sequence[str]) -> None:
    """Writes above a panel what is not drawn in it."""
    if said:
        more = [f"and {len(said) - 8} more"] if len(said) > 8 else []
        text = textwrap.fill(", ".join([*said[:8], *more]), LETTERS)
        axes.set_title(plain(text), loc="left", fontsize=SMALL)


def word_of(value: float) -> str:
    """Returns what stands in the place of a value that is not finite."""
    return "missed" if value == np.inf else "missing"


def open_figure(height: float, columns: int = 1, rows: int = 1, **options: Any) -> Any:
    """Returns an empty figure of a page's width, and its panels `[rows, columns]`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _tick(value: float, _: int = 0) -> str:
    """Returns a number in few letters, as beside a tick."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def set_scale(
    axis: Any, values: Iterable[Any], log: bool | None, ticks: int = 6
) -> None:
    """Makes an axis logarithmic where asked, or where values are far apart.

    One that is asked for is linear between the least positive value and its negative,
    if there are others: zero has a place.
    """
    from matplotlib import ticker

    shown = np.concatenate([np.ravel(each) for each in values]).astype(float)
    shown = shown[np.isfinite(shown)]
    least, most = (shown.min(), shown.max()) if shown.size else (1, 1)
    if log is None:
        log = least > 0 and most > _WIDE * least
    above = shown[shown > 0]
    if log and least <= 0 and above.size:
        linear = {"linthresh": above.min()}
        getattr(axis.axes, f"set_{axis.axis_name}scale")("symlog", **linear)
        axis.set_major_locator(ticker.SymmetricalLogLocator(base=10, **linear))
        axis.get_major_locator().set_params(numticks=ticks)
    elif log and above.size:
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        subs = (1, 2, 5) if most < 40 * max(least, 1e-300) else (1,)
        axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=ticks))
        axis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.set_major_locator(ticker.MaxNLocator(ticks, steps=(1, 2, 2.5, 5, 10)))
    axis.set_major_formatter(ticker.FuncFormatter(_tick))
    axis.set_tick_params(labelsize=SMALL)
    axis.axes.grid(visible=True, axis=axis.axis_name, alpha=0.3, linewidth=0.4)


def label_of(picture: kinds.Picture, name: str, result: "TableResult") -> str:
    """Returns the label of the axis that a column stands on."""
    return plain(picture.label or kinds.heading(name, result.table.columns))


def draw_bound(
    axes: "Axes", picture: kinds.Picture, result: "TableResult", up: bool
) -> list[float]:
    """Draws a claim's bound, across (`up` False) or from the bottom to the top.

    Returns:
      The bound, if there is one.
    """
    verdict = next((v for v in result.verdicts if v.name == picture.bound), None)
    value, said, holds = picture.bound, f"{picture.bound}", True
    if verdict is not None:
        claim = result.table.tier(result.tier).claims[verdict.name]
        value = next(b for b in (claim.at_most, claim.at_least) if b is not None)
        said, holds = verdict.bound, verdict.holds
    if isinstance(value, str):
        return []
    said += "\nFAILS" * (not holds)
    look = {"color": "#000000" if holds else FAILED}
    line = {**look, "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1}
    words = {**look, "fontsize": SMALL}
    if up:
        axes.axvline(value, **line)
        place = {"transform": axes.get_xaxis_transform(), "ha": "center"}
        axes.text(value, 1.01, said.replace("\n", " "), va="bottom", **words, **place)
    else:
        axes.axhline(value, **line)
        place = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.01, value, said, **words, **place)
    return [value]


def look_of_part(place: int) -> dict[str, Any]:
    """Returns how a bar of the kind at a place is filled."""
    colour = curves.COLOURS[place % len(curves.COLOURS)]
    hatch = HATCHES[place % len(HATCHES)]
    face = "none" if hatch else colour  # on its own colour no hatching would be seen
    return {"facecolor": face, "edgecolor": colour, "hatch": hatch, "linewidth": 0.8}


def look_of(role: kinds.Role) -> dict[str, Any]:
    """Returns colours of a marker by what its row is to the claims."""
    colour = OTHER if role == "other" else curves.COLOURS[0]
    name = {"about": "in the claims", "control": "negative control", "other": "others"}[
        role
    ]
    hollow = {"markerfacecolor": "none"} if role == "control" else {}
    marker = "s" if role == "other" else "o"
    return {"color": colour, "label": name, "marker": marker, **hollow}
