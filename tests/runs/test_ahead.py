"""Runs of a table made several at a time."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from hpcjax.core import ConfigError, environment
from hpcjax.runs import ahead, build, directory, execute
from tests.runs import papers, roots


@pytest.mark.slow
@pytest.mark.processes
def test_a_table_made_side_by_side_is_the_same(tmp_path):
    both = [papers.make(tmp_path / name) for name in ("one", "two")]
    alone, together = (
        build.build_table("curves/holds", root=root, progress=False, parallel=n)
        for n, root in enumerate(both, 1)
    )
    assert together.dataset.identical(alone.dataset)
    assert together.tuned == alone.tuned
    made = {run.id for run in directory.list_runs(both[1])}
    assert made == {run["id"] for run in together.runs}
    assert not any(run["used_again"] for run in together.runs)
    again = build.build_table("curves/holds", root=both[1], progress=False, parallel=2)
    assert all(run["used_again"] for run in again.runs)
    assert {run.id for run in directory.list_runs(both[1])} == made


@pytest.mark.slow
def test_fresh_runs_are_made_anew_and_equal_ones_once(tmp_path):
    root = papers.make(tmp_path)
    options = {"root": root, "progress": False, "parallel": 2}
    first = build.build_table("curves/holds", **options)
    fresh = build.build_table("curves/holds", fresh=True, **options)
    held = {run["id"] for run in first.runs}
    assert not held & {run["id"] for run in fresh.runs}
    assert len(directory.list_runs(root)) == 2 * len(held)
    assert not any(run["used_again"] for run in fresh.runs)
    # Rows that are runs of the same configs, whatever their overrides say.
    before = len(directory.list_runs(root))
    build.build_table("curves/twice", **options)
    assert len(directory.list_runs(root)) == before + 2


class Odd(Exception):
    """An error that no other process can make of what it is told."""

    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def test_an_error_that_cannot_be_handed_over_is_told_in_words(monkeypatch):
    def fails(*args, **kwargs):
        raise Odd("this", "that")

    monkeypatch.setattr(execute, "ensure", fails)
    with pytest.raises(ahead.WorkerLost, match="this and that"):
        ahead._ensure("curves/plain", {}, None, 1, False)


@pytest.mark.slow
@pytest.mark.processes
def test_a_signal_ends_the_runs_and_begins_no_other(tmp_path):
    """The parent is told to stop while its workers wait in their first runs."""
    root = papers.make(tmp_path)
    roots.write(root, "experiments/curves/experiment.py", WAITS)
    child = subprocess.Popen(
        [sys.executable, "-m", "hpcjax", "table", "curves/holds", "--parallel", "2"],
        cwd=root,
        env=environment.child(),
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list(root.glob("began-*"))) < 2:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, told = child.communicate(timeout=60)
    assert child.returncode == 75, told
    began = list(root.glob("began-*"))
    assert len(began) == 2
    for each in began:  # no worker outlives it
        with pytest.raises(ProcessLookupError):
            os.kill(int(each.name.removeprefix("began-")), 0)


WAITS = (
    papers.EXPERIMENT
    + """
import os, pathlib, time

def run(cfg, ctx):
    pathlib.Path(f"began-{os.getpid()}").touch()
    while True:
        time.sleep(0.02)
"""
)


def test_cores_are_shared_out(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    assert ahead.share_cores(2) == [cores[::2], cores[1::2] or cores]


def test_pieces_share_a_program_and_begin_with_different_ones():
    wanted = [
        ahead.Wanted("paper/config", {"lr": lr, "seed": str(seed)})
        for lr in "12"
        for seed in range(5)
    ]
    pieces = ahead._by_program(wanted, 1)
    assert sorted(map(len, pieces)) == [2, 2, 3, 3]
    assert sorted(itertools.chain(*pieces), key=str) == sorted(wanted, key=str)
    for piece in pieces:
        assert len({each.overrides["lr"] for each in piece}) == 1
    assert [piece[0].overrides["lr"] for piece in pieces] == ["1", "2", "1", "2"]
    assert ahead._by_program(wanted[:1], 2) == [wanted[:1]]


@pytest.mark.processes
def test_a_process_that_dies_is_told(tmp_path):
    root = papers.make(tmp_path)
    roots.write(root, "configs/curves/dies.py", "import os; os._exit(9)")
    wanted = [ahead.Wanted("curves/dies", {})]
    with pytest.raises(ahead.WorkerLost, match="died"):
        ahead.make_runs(wanted, 1, root=root, devices=1)


@pytest.mark.parametrize(
    ("parallel", "benchmark", "why"),
    [(0, False, "at least 1"), (2, True, "measures time")],
)
def test_what_cannot_be_made_side_by_side_is_refused(parallel, benchmark, why):
    with pytest.raises(ConfigError, match=why):
        ahead.check_parallel(parallel, benchmark, "paper/table")
