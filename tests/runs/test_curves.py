"""What is drawn, read back from the figure."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from hpcjax.runs import curves, results


def run_of(values, seconds=1.0):
    return results.history(
        (
            {"step": 10 * n, "seconds": n * seconds, "val_error": v, "val_loss": 2 * v}
            for n, v in enumerate(values, 1)
        ),
        "measured",
    )


@pytest.fixture
def rows():
    seeds = {0: run_of([0.5, 0.3]), 1: run_of([0.7, 0.1]), 2: run_of([0.6, 0.2])}
    unlike = {0: run_of([0.4, 0.2, 0.1], 2.0), 1: run_of([0.6, 0.4])}
    return {"sgd": results.over_seeds(seeds), "jorge": results.over_seeds(unlike)}


def test_medians_against_steps_and_seconds(rows):
    figure = curves.draw(rows)
    by_steps, by_time = figure.axes
    sgd, jorge = by_steps.get_lines()
    np.testing.assert_allclose(sgd.get_xdata(), [10, 20])
    np.testing.assert_allclose(sgd.get_ydata(), [0.6, 0.2])
    np.testing.assert_allclose(jorge.get_ydata(), [0.5, 0.3, 0.1])
    np.testing.assert_allclose(by_time.get_lines()[0].get_xdata(), [1, 2])
    assert by_steps.get_xlabel() == "optimizer steps"
    assert by_steps.get_ylabel() == "validation error (share)"
    assert by_time.get_xlabel() == "training time (s)"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["sgd", "jorge"]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_picture_has_one_legend_and_none_for_one_line(rows, count):
    figure = curves.draw({f"row {place}": rows["sgd"] for place in range(count)})
    shown = [panel.get_legend() for panel in figure.axes if panel.get_legend()]
    shown += figure.legends
    assert len(shown) == (count > 1)
    assert all(len(legend.get_texts()) == count for legend in shown)


def test_the_band_is_the_range_over_seeds(rows):
    by_steps, _ = curves.draw({"sgd": rows["sgd"]}).axes
    (band,) = by_steps.collections
    corners = band.get_paths()[0].vertices
    at_ten = corners[corners[:, 0] == 10][:, 1]
    assert at_ten.min() == pytest.approx(0.5)
    assert at_ten.max() == pytest.approx(0.7)


def test_a_band_has_the_colour_of_its_line(rows):
    for axes in curves.draw(rows).axes:
        lines = [to_rgb(line.get_color()) for line in axes.get_lines()]
        bands = [to_rgb(band.get_facecolor()[0]) for band in axes.collections]
        assert lines == bands
        assert len(set(lines)) == 2


def test_rows_can_be_told_apart_without_colour(rows):
    names = ("linestyle", "marker", "color")
    looks = [[curves.style(place)[name] for name in names] for place in range(140)]
    assert len({str(look) for look in looks}) == 140
    assert len({str(look[:2]) for look in looks[:20]}) == 20
    for one, following in itertools.pairwise(looks):
        assert all(a != b for a, b in zip(one, following, strict=True))
    by_steps, _ = curves.draw(rows).axes
    drawn = [(line.get_marker(), line.get_color()) for line in by_steps.get_lines()]
    assert drawn == [tuple(look[1:]) for look in looks[:2]]
    assert [line.is_dashed() for line in by_steps.get_lines()] == [False, True]


@pytest.mark.parametrize("against", [("steps",), ("steps", "seconds")])
@pytest.mark.parametrize("length", [3, 8, 14, 25, 45])
def test_a_legend_is_within_the_picture(rows, length, against):
    """Read from the picture as it is laid out, where its text has its size."""
    named = {f"{place}{'e' * (length - 1)}": rows["sgd"] for place in range(4)}
    figure = curves.draw(named, against=against)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, paper = legend.get_window_extent(), figure.bbox
    assert paper.x0 <= box.x0
    assert box.x1 <= paper.x1
    assert paper.y0 <= box.y0
    assert box.y1 <= figure.axes[0].get_tightbbox().y0


def test_rows_without_the_metric_are_left_out(rows):
    others = {"timed": rows["sgd"][["compile_seconds"]]} | rows
    by_steps, _ = curves.draw(others, "val_loss").axes
    assert [line.get_label() for line in by_steps.get_lines()] == ["sgd", "jorge"]


def test_files_by_suffix(rows, tmp_path):
    figure = curves.draw(rows)
    curves.save(figure, tmp_path / "a.png", ["run-1", "run-2"])
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
        assert image.info["Description"] == "run-1 run-2"
    curves.save(figure, tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    assert curves.encode(figure, "pdf").startswith(b"%PDF")
    assert len(list(tmp_path.iterdir())) == 2
