"""What is drawn, read back from the figure."""

import numpy as np
import pytest
from PIL import Image

from hpcjax.runs import curves, results


def run_of(values, seconds=1.0):
    return results.history(
        {"step": 10 * n, "seconds": n * seconds, "val_error": v, "val_loss": 2 * v}
        for n, v in enumerate(values, 1)
    )


@pytest.fixture
def rows():
    seeds = {0: run_of([0.5, 0.3]), 1: run_of([0.7, 0.1]), 2: run_of([0.6, 0.2])}
    unlike = {0: run_of([0.4, 0.2, 0.1], 2.0), 1: run_of([0.6, 0.4])}
    return {"sgd": results.over_seeds(seeds), "jorge": results.over_seeds(unlike)}


def test_medians_against_steps_and_seconds(rows):
    by_steps, by_time = curves.draw(rows).axes
    sgd, jorge = by_steps.get_lines()
    np.testing.assert_allclose(sgd.get_xdata(), [10, 20])
    np.testing.assert_allclose(sgd.get_ydata(), [0.6, 0.2])
    np.testing.assert_allclose(jorge.get_ydata(), [0.5, 0.3, 0.1])
    np.testing.assert_allclose(by_time.get_lines()[0].get_xdata(), [1, 2])
    assert by_steps.get_xlabel() == "optimizer steps"
    assert by_steps.get_ylabel() == "validation error"
    assert [t.get_text() for t in by_time.get_legend().get_texts()] == ["sgd", "jorge"]


def test_the_band_is_the_range_over_seeds(rows):
    by_steps, _ = curves.draw({"sgd": rows["sgd"]}).axes
    (band,) = by_steps.collections
    corners = band.get_paths()[0].vertices
    at_ten = corners[corners[:, 0] == 10][:, 1]
    assert at_ten.min() == pytest.approx(0.5)
    assert at_ten.max() == pytest.approx(0.7)


def test_rows_without_the_metric_are_left_out(rows):
    others = {"timed": rows["sgd"][["compile_seconds"]]} | rows
    by_steps, _ = curves.draw(others, "val_loss").axes
    assert [line.get_label() for line in by_steps.get_lines()] == ["sgd", "jorge"]


def test_files_by_suffix(rows, tmp_path):
    figure = curves.draw(rows)
    curves.save(figure, tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.format == "PNG"
    curves.save(figure, tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    assert curves.encode(figure, "pdf").startswith(b"%PDF")
    assert len(list(tmp_path.iterdir())) == 2
