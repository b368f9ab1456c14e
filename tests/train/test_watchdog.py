import time

import pytest

from hpcjax.train import watchdog
from hpcjax.train.watchdog import Watchdog, behind


@pytest.fixture
def ticking(monkeypatch):
    """A fast clock, and exit statuses in place of exits."""
    monkeypatch.setattr(watchdog, "_TICK", 0.01)
    monkeypatch.setattr(watchdog, "_LAST_WORDS", 0.0)
    exits = []
    monkeypatch.setattr(watchdog.os, "_exit", exits.append)
    return exits


def wait(condition, seconds=10.0):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.005)
    return condition()


def test_a_run_that_stands_still_is_ended_and_says_who(tmp_path, ticking, capfd):
    (tmp_path / "1").write_text("7\n")
    (tmp_path / "2").write_text("6\n")
    with Watchdog(tmp_path, 0, 0.01, count=3) as watched:
        watched.beat(6)
        watched.beat(7)
        assert wait(lambda: ticking)
    assert ticking == [7]
    err = capfd.readouterr().err
    assert "process 2 is behind at 6" in err
    assert "test_watchdog.py" in err  # the stack of the main thread


def test_steps_keep_it_quiet(tmp_path, ticking):
    with Watchdog(tmp_path, 0, 0.2) as watched:
        for step in range(1, 40):
            watched.beat(step)
            time.sleep(0.01)
    assert not ticking


def test_neither_the_first_step_nor_a_pause_counts(tmp_path, ticking):
    with Watchdog(tmp_path, 0, 0.005) as watched:
        watched.beat(1)
        time.sleep(0.3)  # compiles
        assert not ticking
        watched.beat(2)
        with watched.paused():
            time.sleep(0.3)
        assert not ticking
        assert wait(lambda: ticking)


def test_slow_steps_raise_the_limit(tmp_path):
    watched = Watchdog(tmp_path, 0, 60.0)
    assert watched.limit() == 600.0  # before a median is known
    watched._steps.extend([1.0, 10.0, 11.0])
    assert watched.limit() == 200.0


def test_files_of_an_earlier_attempt_are_forgotten(tmp_path):
    for name in ("0", "1", "2", "3"):
        (tmp_path / name).write_text("40\n")
    with Watchdog(tmp_path, 0, 60.0, count=2) as watched:
        watched.beat(9)
        assert behind(tmp_path) == (9, "0")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_who_is_behind(tmp_path):
    assert behind(tmp_path) == (0, "")
    for index, text in enumerate(["5\n", "4\n", "4\n", "", "?"]):
        (tmp_path / str(index)).write_text(text)
    (tmp_path / "note.txt").write_text("9")
    assert behind(tmp_path) == (4, "1, 2")
