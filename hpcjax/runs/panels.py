"""What the panels of all pictures of tables share: axes, looks, bounds, verdicts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.runs import curves
from hpcjax.runs import pictures as kinds

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


def tell_verdicts(figure: "Figure", text: str, passed: bool) -> None:
    """Writes above a picture which claims hold."""
    colour = OTHER if passed else FAILED
    if text:
        place = {"x": 0.01, "ha": "left", "fontsize": SMALL}
        figure.suptitle(plain(text), color=colour, **place)


def open_figure(height: float, columns: int = 1, rows: int = 1, **options: Any) -> Any:
    """Returns an empty figure of a page's width, and its panels `[rows, columns]`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def plain(text: Any) -> str:
    """Returns a text as matplotlib is to print it, without formulas."""
    return str(text).replace("$", r"\$")


def _tick(value: float, _: int = 0) -> str:
    """Returns a number in few letters, as beside a tick."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.6g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def set_scale(
    axis: Any, values: Iterable[Any], log: bool | None, ticks: int = 6
) -> None:
    """Makes an axis logarithmic where asked, or where values are far apart."""
    from matplotlib import ticker

    shown = np.concatenate([np.ravel(each) for each in values]).astype(float)
    shown = shown[np.isfinite(shown)]
    least, most = (shown.min(), shown.max()) if shown.size else (1, 1)
    if log is None:
        log = least > 0 and most > _WIDE * least
    if log:
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
) -> None:
    """Draws a claim's bound, across (`up` False) or from the bottom to the top."""
    verdict = next((v for v in result.verdicts if v.name == picture.bound), None)
    if verdict is None:
        return
    claim = result.table.tier(result.tier).claims[picture.bound]
    value = float(next(b for b in (claim.at_most, claim.at_least) if b is not None))
    look = {"color": "#000000" if verdict.holds else FAILED}
    line = {**look, "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1}
    words = {**look, "fontsize": SMALL}
    if up:
        axes.axvline(value, **line)
        place = {"transform": axes.get_xaxis_transform(), "ha": "center"}
        axes.text(value, 1.01, verdict.bound, va="bottom", **words, **place)
    else:
        axes.axhline(value, **line)
        place = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.01, value, verdict.bound, **words, **place)


def look_of(role: kinds.Role) -> dict[str, Any]:
    """Returns colours of a marker by what its row is to the claims."""
    colour = OTHER if role == "other" else curves.COLOURS[0]
    name = {"about": "in the claims", "control": "negative control", "other": "others"}[
        role
    ]
    hollow = {"markerfacecolor": "none"} if role == "control" else {}
    marker = "s" if role == "other" else "o"
    return {"color": colour, "label": name, "marker": marker, **hollow}
