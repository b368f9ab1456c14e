import math

import numpy as np
import pytest
import xarray as xr

from hpcjax.core import DataFormatError
from hpcjax.runs import results, targets


def records():
    return [
        {"step": 0, "compile_seconds": 1.5},
        {"step": 1, "seconds": 0.1, "loss": 3.0},
        {"step": 2, "seconds": 0.2, "loss": 2.0},
        {"step": 2, "seconds": 0.2, "val_loss": 2.5, "val_error": 0.5},
        {"step": 3, "seconds": 0.4, "loss": 1.0, "learning_rate": 0.1},
        {"step": 0, "compile_seconds": 0.5},
    ]


def test_history_splits_steps_and_validations():
    history = results.history(records())
    assert history["step"].values.tolist() == [1, 2, 3]
    assert history["loss"].values.tolist() == [3.0, 2.0, 1.0]
    assert history["eval_step"].values.tolist() == [2]
    assert history["val_loss"].item() == 2.5
    assert history["eval_seconds"].item() == 0.2
    assert history["compile_seconds"].item() == 2.0
    assert np.isnan(history["learning_rate"].values[:2]).all()


def test_a_result_comes_back_as_it_was_written(tmp_path):
    history = results.history(records())
    path = tmp_path / "result.nc"
    results.write(history, path, {"git_commit": "abc"})
    back = results.read(path)
    xr.testing.assert_equal(back, history)
    assert back.attrs["source"] == "measured"
    assert '"abc"' in back.attrs["provenance"]
    assert [p.name for p in tmp_path.iterdir()] == ["result.nc"]


def test_a_result_of_unknown_source_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"source must be one of.*'guessed'"):
        results.write(xr.Dataset(attrs={"source": "guessed"}), tmp_path / "r.nc", {})
    assert not list(tmp_path.iterdir())


def test_a_truncated_result_is_a_format_error(tmp_path):
    path = tmp_path / "result.nc"
    results.write(results.history(records()), path, {})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataFormatError, match=r"result\.nc"):
        results.read(path)


def run_of(losses, steps=None):
    steps = steps or list(range(10, 10 * len(losses) + 1, 10))
    return results.history(
        [{"step": 0, "compile_seconds": 1.0}]
        + [
            {"step": s, "seconds": s / 100, "val_loss": v}
            for s, v in zip(steps, losses, strict=True)
        ]
    )


def rows():
    base = {0: run_of([3, 2, 1.0, 1.1]), 1: run_of([3, 2, 1.6, 1.5])}
    fast = {0: run_of([2, 1.4, 1.2, 1.0]), 1: run_of([1.3, 1.2, 1.2, 1.0])}
    never = {0: run_of([3, 3, 3, 3]), 1: run_of([3, 1.0, 3, 3])}
    return {
        name: results.over_seeds(seeds)
        for name, seeds in {"base": base, "fast": fast, "never": never}.items()
    }


def test_the_target_is_the_worst_of_the_baselines_best():
    table = targets.time_to_target(rows(), "base")
    # best of the two baseline seeds: 1.0 and 1.5; both seeds must reach the worse one
    assert table["target"].item() == 1.5
    by_seed = table["steps_by_seed"]
    assert by_seed.sel(row="base").values.tolist() == [30, 40]
    assert by_seed.sel(row="fast").values.tolist() == [20, 10]
    assert table["ratio"].sel(row="fast").item() == pytest.approx(
        (20 / 30 + 10 / 40) / 2
    )
    assert table["seconds"].sel(row="fast").item() == pytest.approx(0.15)


def test_a_missed_target_is_infinite_not_missing():
    table = targets.time_to_target(rows(), "base")
    assert table["steps_by_seed"].sel(row="never").values.tolist() == [math.inf, 20]
    assert table["ratio"].sel(row="never").item() == math.inf
    assert table["ratio_high"].sel(row="never").item() == math.inf


def test_medians_and_intervals_agree_with_numpy_on_finite_samples():
    sample = np.random.default_rng(3).normal(size=15)
    low, high = targets.bootstrap_median(sample)
    assert low <= np.median(sample) <= high
    assert targets.median(sample[None])[0] == np.median(sample)
    assert targets.median(np.array([[1.0, np.inf], [2.0, 4.0]])).tolist() == [
        np.inf,
        3.0,
    ]
