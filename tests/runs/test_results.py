import collections
import contextlib
import errno
import math
import os
import pathlib
import tempfile

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from hpcjax.core import DataFormatError, DiskFull, Diverged
from hpcjax.perf import intervals
from hpcjax.runs import metrics, results, targets


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
    history = results.history(records(), "measured")
    assert history["step"].values.tolist() == [1, 2, 3]
    assert history["loss"].values.tolist() == [3.0, 2.0, 1.0]
    assert history["eval_step"].values.tolist() == [2]
    assert history["val_loss"].item() == 2.5
    assert history["eval_seconds"].item() == 0.2
    assert history["compile_seconds"].item() == 2.0
    assert np.isnan(history["learning_rate"].values[:2]).all()


def test_a_result_comes_back_as_it_was_written(tmp_path):
    history = results.history(records(), "measured")
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
    with pytest.raises(ValueError, match=r"runs\.measured.*None"):
        results.write(xr.Dataset(), tmp_path / "r.nc", {})
    assert not list(tmp_path.iterdir())


def test_a_truncated_result_is_a_format_error(tmp_path):
    path = tmp_path / "result.nc"
    results.write(results.history(records(), "measured"), path, {})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataFormatError, match=r"result\.nc"):
        results.read(path)


def test_a_device_without_room_is_a_full_disk(tmp_path, monkeypatch):
    """The real error of the library that writes netCDF, from a device always full."""
    full = pathlib.Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    path = tmp_path / "result.nc"
    small = results.measured({"a": ("x", [1.0])})
    results.write(small, path, {})

    def linked(**names):
        (names["dir"] / "linked").symlink_to(full)
        return os.open(full, os.O_WRONLY), str(names["dir"] / "linked")

    monkeypatch.setattr(tempfile, "mkstemp", linked)
    with pytest.raises(DiskFull):
        results.write(results.measured({"a": ("x", [2.0] * 10_000)}), path, {})
    xr.testing.assert_equal(results.read(path), small)
    assert [p.name for p in tmp_path.iterdir()] == ["result.nc"]


def test_a_result_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "result.nc"
    small = results.measured({"a": ("x", [1.0])})
    results.write(small, path, {})

    def full(handle):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match=r"result\.nc"):
        results.write(results.measured({"a": ("x", [2.0])}), path, {})
    xr.testing.assert_equal(results.read(path), small)
    assert [p.name for p in tmp_path.iterdir()] == ["result.nc"]


def run_of(losses, steps=None):
    steps = steps or list(range(10, 10 * len(losses) + 1, 10))
    return results.history(
        [{"step": 0, "compile_seconds": 1.0}]
        + [
            {"step": s, "seconds": s / 100, "val_loss": v}
            for s, v in zip(steps, losses, strict=True)
        ],
        "measured",
    )


def rows():
    base = {0: run_of([3, 2, 1.0, 1.1]), 1: run_of([3, 2, 1.6, 1.5])}
    fast = {0: run_of([2, 1.4, 1.2, 1.0]), 1: run_of([1.3, 1.2, 1.2, 1.0])}
    never = {0: run_of([3, 3, 3, 3]), 1: run_of([3, 1.0, 3, 3])}
    return {
        name: results.over_seeds(seeds)
        for name, seeds in {"base": base, "fast": fast, "never": never}.items()
    }


def test_the_target_is_the_median_of_the_baselines_best():
    table = targets.time_to_target(rows(), "base")
    # best of the two baseline seeds: 1.0 and 1.5, of which the worse one
    assert table["target"].item() == 1.5
    by_seed = table["steps_by_seed"]
    assert by_seed.sel(row="base").values.tolist() == [30, 40]
    assert by_seed.sel(row="fast").values.tolist() == [20, 10]
    assert table["ratio"].sel(row="fast").item() == pytest.approx(
        (20 / 30 + 10 / 40) / 2
    )
    assert table["seconds"].sel(row="fast").item() == pytest.approx(0.15)


def test_a_lucky_validation_does_not_reach_a_target_of_means():
    lucky = run_of([3, 0.9, 3, 1.4, 1.2])
    row = results.over_seeds({0: lucky, 1: run_of([3, 2, 1.6, 1.5, 1.5])})
    found = {n: targets.time_to_target({"base": row}, "base", smooth=n) for n in (1, 2)}
    steps = {n: table["steps_by_seed"].values.tolist() for n, table in found.items()}
    assert steps == {1: [[20, 40]], 2: [[50, 50]]}
    assert [found[n]["target"].item() for n in (1, 2)] == [1.5, 1.5]
    assert found[2]["best"].item() == pytest.approx((1.3 + 1.5) / 2)


def test_a_seed_of_the_baseline_that_fails_does_not_set_the_target():
    failed = run_of([3, 2.9, 2.9, 2.9])
    base = results.over_seeds(
        {0: run_of([3, 2, 1.0, 1.1]), 1: run_of([3, 2, 1.6, 1.5]), 2: failed}
    )
    other = results.over_seeds(dict.fromkeys((0, 1, 2), run_of([2, 1.6, 1.4, 1.4])))
    table = targets.time_to_target({"base": base, "other": other}, "base")
    assert table["target"].item() == 1.5
    steps = table["steps_by_seed"]
    assert steps.sel(row="base").values.tolist() == [30, 40, math.inf]
    # A baseline that misses it counts with its whole length.
    assert table["ratio"].sel(row="other").item() == pytest.approx(30 / 40)


def test_a_missed_target_is_infinite_not_missing():
    table = targets.time_to_target(rows(), "base")
    assert table["steps_by_seed"].sel(row="never").values.tolist() == [math.inf, 20]
    assert table["ratio"].sel(row="never").item() == math.inf
    assert table["ratio_high"].sel(row="never").item() == math.inf


def test_every_task_has_a_target_of_its_own():
    given = rows()
    runs = {f"a/{name}": row for name, row in given.items()}
    runs |= {f"b/{name}": row for name, row in given.items()}
    table = targets.time_to_targets(runs, {"a": "base", "b": "fast"})
    assert list(table["row"].values) == list(runs)
    for task, baseline in (("a", "base"), ("b", "fast")):
        alone = targets.time_to_target(given, baseline)
        own = table.sel(row=[f"{task}/{name}" for name in given])
        assert set(own["target"].values) == {alone["target"].item()}
        for column in ("ratio", "best", "steps_by_seed"):
            assert own[column].values.tolist() == alone[column].values.tolist()


def compared(base, other, **options):
    runs = {"base": base, "other": other}
    joined = {
        row: results.over_seeds({seed: run_of(v) for seed, v in enumerate(seeds)})
        for row, seeds in runs.items()
    }
    return targets.time_to_target(joined, "base", **options)


NAN = math.nan


def test_a_validation_that_is_nan_reaches_nothing():
    table = compared([[3, NAN, 2.0]], [[NAN, 2.5, 1.0]])
    assert table["target"].item() == 2.0
    assert table["steps_by_seed"].values.ravel().tolist() == [30, 30]
    table = compared([[3, 2.0]], [[NAN, NAN]])
    other = table.sel(row="other")
    for column in ("steps", "ratio", "ratio_low", "ratio_high", "best", "seconds"):
        assert other[column].item() == math.inf, column


def test_a_baseline_seed_without_a_number_has_no_say_in_the_target():
    lost = [NAN, NAN, NAN, NAN]
    table = compared(
        [[3, 2, 1.0, 1.1], [3, 1.5, 2, 2], lost, lost],
        [[1.5, 1, 1, 1], [3, 3, 3, 3], [2, 1.5, 1, 1], [3, 3, 3, 3]],
    )
    assert table["target"].item() == 1.5
    steps = table["steps_by_seed"]
    assert steps.sel(row="base").values.tolist() == [30, 20, math.inf, math.inf]
    assert steps.sel(row="other").values.tolist() == [10, math.inf, 20, math.inf]
    # 10 / 30; missed; 20 of at least 40; missed by both
    assert table["ratio"].sel(row="other").item() == math.inf
    assert table["ratio_low"].sel(row="other").item() == pytest.approx(1 / 3)
    # 1, 1, and twice missed
    assert table["ratio"].sel(row="base").item() == math.inf
    assert table["best"].sel(row="base").item() == math.inf
    assert not table.isnull().any().to_array().any()


def test_of_a_baseline_that_misses_a_given_target_a_bound_is_shown():
    table = compared([[3, 3, 3, 3]], [[3, 2, 1, 1]], target=2.0)
    assert table["ratio"].sel(row="base").item() == math.inf
    assert table["ratio"].sel(row="other").item() == 20 / 40


def test_a_run_that_ended_before_a_validation_missed_the_target():
    begun = results.history([{"step": 1, "seconds": 0.1, "loss": 3.0}], "measured")
    base = results.over_seeds({0: run_of([2, 1.0]), 1: run_of([2, 1.0])})
    for first in ({}, {0: run_of([1.0, 1.0])}):
        row = results.over_seeds({**first, 1: begun})
        table = targets.time_to_target({"base": base, "other": row}, "base")
        steps = table["steps_by_seed"].sel(row="other")
        assert steps.sel(seed=1).item() == math.inf
        assert table["seconds"].sel(row="other").item() == math.inf
        assert table["best"].sel(row="other").item() == math.inf


@pytest.mark.parametrize("target", [None, 1.0])
def test_a_baseline_without_any_number_cannot_be_compared_with(target):
    with pytest.raises(Diverged, match="'base', the baseline, has a finite val_loss"):
        compared([[NAN, math.inf]], [[2, 1.0]], target=target)
    with pytest.raises(Diverged, match="finite val_error"):
        compared([[2, 1.0]], [[2, 1.0]], target=target, metric="val_error")


def test_medians_and_intervals_agree_with_numpy_on_finite_samples():
    sample = np.random.default_rng(3).normal(size=15)
    low, high = intervals.bootstrap_median(sample)
    assert low <= np.median(sample) <= high
    assert intervals.median(sample[None])[0] == np.median(sample)
    assert intervals.median(np.array([[1.0, np.inf], [2.0, 4.0]])).tolist() == [
        np.inf,
        3.0,
    ]


class Killed(Exception):
    pass


STEPS = 8
SECONDS = st.integers(0, 9).map(float)
STEP = st.tuples(SECONDS, SECONDS, SECONDS, SECONDS)
SESSION = st.fixed_dictionaries(
    {
        "init": st.tuples(SECONDS, SECONDS),
        "steps": st.lists(STEP, min_size=STEPS, max_size=STEPS),
        "killed": st.integers(0, 25),
        "back": st.integers(0, 2),
    }
)


def session(log, start, plan):
    """Writes the records of a session as the loop does, until it is killed.

    Returns what was told of: `(step, what, seconds)`; and the steps that were saved.
    """
    trained, waited, saved = log.rewind(start), 0.0, []
    told, untold, written = [], [], []

    def write(step, **values):
        if plan["killed"] == len(written):
            raise Killed
        written.append(step)
        log.write({"step": step, **values})
        told.extend(untold)
        untold.clear()

    with contextlib.suppress(Killed):
        compiling, other = plan["init"]
        untold.append((start, "init", compiling + other))
        write(start, compile_seconds=compiling, spent_init_seconds=compiling + other)
        for step in range(start + 1, STEPS + 1):
            data, compute, validation, checkpoint = plan["steps"][step - 1]
            waited, trained = waited + data, trained + data + compute
            untold.append((step, "training", data + compute))
            write(step, seconds=trained, loss=1.0)
            if step % 2 == 0:
                untold.append((step, "validation", validation))
                spent = {"spent_data_seconds": waited}
                write(step, **spent, spent_validation_seconds=validation)
                write(step, seconds=trained, val_loss=1.0)
                waited = 0.0
            if step % 3 == 0:
                saved.append(step)
                untold.append((step, "checkpoint", checkpoint))
                spent = {"spent_data_seconds": waited}
                write(step, **spent, spent_checkpoint_seconds=checkpoint)
                waited = 0.0
    return told, saved


@given(plans=st.lists(SESSION, min_size=1, max_size=4))
def test_the_split_adds_up_to_the_time_of_all_sessions(plans):
    """Wherever a session is killed, and however far back the next one begins."""
    kept, saved, lost, whole = [], [0], 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        log = metrics.Metrics(pathlib.Path(folder) / "metrics.jsonl")
        for plan in plans:
            saved = saved[: max(1, len(saved) - plan["back"])]  # the newest are damaged
            lost += sum(s for step, _, s in kept if step > saved[-1])
            kept = [each for each in kept if each[0] <= saved[-1]]
            told, more = session(log, saved[-1], plan)
            whole += sum(seconds for *_, seconds in told)
            kept, saved = kept + told, saved + more
        split = results.time_split(results.history(log.read(), "measured"))
    wanted = collections.Counter({"lost": lost})
    for _, what, seconds in kept:
        wanted[what] += seconds
    split["init"] = split.get("init", 0.0) + split.pop("compile")
    split["training"] = split.pop("compute", 0.0) + split.pop("data", 0.0)
    assert {what for what, seconds in split.items() if seconds < 0} == set()
    assert collections.Counter(split) == wanted
    assert sum(split.values()) == whole


def test_metrics_named_like_times_are_metrics():
    records = [
        {"step": 1, "seconds": 0.1, "loss": 2.0, "lost_share": 0.5},
        {"step": 1, "lost_seconds": 4.0},
        {"step": 2, "seconds": 0.2, "loss": 1.0, "lost_share": 0.25},
    ]
    history = results.history(records, "measured")
    assert history["loss"].values.tolist() == [2.0, 1.0]
    assert history["lost_share"].values.tolist() == [0.5, 0.25]
    assert history["lost_seconds"].item() == 4.0
