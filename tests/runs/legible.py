"""What keeps a picture from being read, by matplotlib's own boxes."""

import itertools

import numpy as np
from matplotlib.patches import Patch
from matplotlib.text import Text

# Inches of a page's column, and points of the smallest letters in it.
PAGE, SMALLEST = 7.0, 7
# Pixels by which boxes may touch.
SLACK = 1.0


def find_faults(figure):
    """Returns what cannot be read in a figure, in words."""
    figure.draw_without_rendering()
    texts = {text: text.get_window_extent() for text in find_texts(figure)}
    shrink = min(1, PAGE / figure.get_figwidth())
    faults = [
        f"small: {text.get_text()!r}"
        for text in texts
        if text.get_fontsize() * shrink < SMALLEST
    ]
    faults += [f"cut: {t.get_text()!r}" for t, box in texts.items() if cut(box, figure)]
    for (one, box), (other, its) in itertools.combinations(texts.items(), 2):
        if meet(box, its):
            faults.append(f"overlap: {one.get_text()!r} and {other.get_text()!r}")
    return faults + find_alike(figure)


def find_texts(figure):
    """Returns the texts that are drawn."""
    ticks = {}
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
                place = tick.get_loc()
                inside = low <= place <= high or bool(
                    np.isclose(place, (low, high)).any()
                )
                shown = inside and axis.get_visible() and axes.get_visible()
                ticks |= {tick.label1: shown, tick.label2: shown}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_text().strip()
        and text.get_visible()
        and (text.axes is None or text.axes.get_visible())
        and ticks.get(text, True)
    ]


def cut(box, figure):
    paper = figure.bbox
    low = box.x0 < paper.x0 - SLACK or box.y0 < paper.y0 - SLACK
    return low or box.x1 > paper.x1 + SLACK or box.y1 > paper.y1 + SLACK


def meet(one, other):
    across = min(one.x1, other.x1) - max(one.x0, other.x0)
    along = min(one.y1, other.y1) - max(one.y0, other.y0)
    return across > SLACK and along > SLACK


def find_alike(figure):
    """Returns names in the legend that colour alone tells apart."""
    held = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {n: handle for hs, ns in held for handle, n in zip(hs, ns, strict=True)}
    looks = {name: look(handle) for name, handle in handles.items()}
    pairs = itertools.combinations(looks, 2)
    return [f"alike: {a!r} and {b!r}" for a, b in pairs if looks[a] == looks[b]]


def look(handle):
    """Returns how something is drawn, but for its colour."""
    first = handle.patches[0] if hasattr(handle, "patches") else handle
    if isinstance(first, Patch) or not hasattr(first, "get_marker"):
        face = np.ravel(first.get_facecolor())
        filled = bool(face.size) and bool(face[-1] != 0)
        seen = not filled or not np.allclose(face, np.ravel(first.get_edgecolor()))
        return first.get_hatch() if seen else None, filled
    hollow = first.get_markerfacecolor() == "none"
    dashes = getattr(first, "_dash_pattern", None)  # `get_linestyle` has but four
    return first.get_linestyle(), dashes, str(first.get_marker()), hollow
