"""Pictures of sweeps: what is on which axis, of numbers that are known."""

import numpy as np
import pytest
import xarray as xr

from hpcjax.runs import sweeps
from hpcjax.runs.sweeps import axes

RATES, WORDS, SEEDS = [0.01, 0.1, 1.0], ["sgd", "jorge"], [3, 4, 5]


def dataset(*names, **attrs):
    """Returns a grid of the axes named, whose values are 1, 2, 3 and so on."""
    known = {"lr": RATES, "optimizer": WORDS, "seed": SEEDS, "wd": [0.1, 0.2]}
    sizes = [len(known[name]) for name in names]
    values = np.arange(1.0, 1 + np.prod(sizes)).reshape(sizes)
    attrs = {"axes": " ".join(names), "by": "val_error", "logarithmic": "lr", **attrs}
    coords = {name: known[name] for name in names}
    return xr.Dataset({"value": (names, values)}, coords=coords, attrs=attrs)


def bars(panel):
    """Returns `{place: (low, high)}` of the bars of a panel."""
    (drawn,) = panel.containers
    (lines,) = drawn.lines[2]
    return {round(x, 6): (low, high) for (x, low), (_, high) in lines.get_segments()}


def test_seeds_are_repetitions_of_a_point():
    figure = sweeps.draw(dataset("lr", "seed"))
    (panel,) = figure.axes
    assert panel.get_xlabel() == "lr"
    assert panel.get_ylabel() == "validation error (share)\nmedian and range of seeds"
    (drawn,) = panel.containers
    assert drawn.lines[0].get_ydata().tolist() == [2.0, 5.0, 8.0]
    assert bars(panel) == {0.01: (1, 3), 0.1: (4, 6), 1.0: (7, 9)}
    assert panel.get_xscale() == "log"
    assert [text.get_text() for text in panel.get_xticklabels()] == ["0.01", "0.1", "1"]


def test_a_swept_key_has_its_unit_on_every_axis():
    figure = sweeps.draw(dataset("lr", "wd", units="wd=MB/s"))
    named = [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
    assert [name for name, _ in named[:2]] == ["lr", "wd (MB/s)"]
    assert named[2] == ("wd (MB/s)", "lr")


def test_two_keys_have_a_panel_each_and_a_map_with_a_name():
    grid = dataset("lr", "optimizer", "seed", by="seconds")
    grid["value"][2, 1] = np.nan
    first, second, shown, bar = sweeps.draw(grid).axes
    assert [first.get_xlabel(), second.get_xlabel()] == ["lr", "optimizer"]
    assert (shown.get_xlabel(), shown.get_ylabel()) == ("optimizer", "lr")
    assert bar.get_ylabel() == "seconds (s), median over seeds"
    cells = shown.collections[0].get_array()
    np.testing.assert_array_equal(cells, [[2, 5], [8, 11], [14, np.nan]])
    assert [text.get_text() for text in shown.texts][-2:] == ["14", "none"]
    assert [text.get_text() for text in second.get_xticklabels()] == WORDS
    assert (first.get_yscale(), second.get_xscale()) == ("log", "linear")
    (legend,) = first.figure.legends
    assert {"no finite value", "median over other keys"} < {
        text.get_text() for text in legend.texts
    }


def test_three_keys_have_no_map_and_seeds_alone_are_an_axis():
    panels = sweeps.draw(dataset("lr", "optimizer", "wd")).axes
    assert [panel.get_xlabel() for panel in panels] == ["lr", "optimizer", "wd"]
    (alone,) = sweeps.draw(dataset("seed")).axes
    assert alone.get_xlabel() == "seed"
    assert [text.get_text() for text in alone.get_xticklabels()] == ["3", "4", "5"]


def test_points_of_ranges_are_a_map_of_points():
    places = {"lr": [0.01, 0.02, 0.5], "wd": [0.1, 0.3, 0.2]}
    drawn = xr.Dataset(
        {"value": ("trial", [1.0, 2.0, 3.0])},
        coords={name: ("trial", each) for name, each in places.items()},
        attrs={"axes": "lr wd", "by": "val_loss", "logarithmic": "lr"},
    )
    _, _, shown, bar = sweeps.draw(drawn).axes
    pairs = shown.collections[0].get_offsets().tolist()
    assert pairs == [[0.1, 0.01], [0.3, 0.02], [0.2, 0.5]]
    assert (shown.get_yscale(), shown.get_xscale()) == ("log", "linear")
    assert bar.get_ylabel() == "validation loss"


@pytest.mark.parametrize(
    ("written", "logarithmic"),
    [
        *[
            ("0.01,0.1", True),
            ("0.1,0.3", False),
            ("0,10", False),
            ("sgd,jorge", False),
        ],
        *[("log(0.1,0.3)", True), ("uniform(0.01,1)", False), ("logint(1,4)", True)],
    ],
)
def test_an_axis_is_logarithmic_if_given_so_or_wide(written, logarithmic):
    ((axis,), _) = axes.parse({"lr": written})
    assert axis.logarithmic is logarithmic
