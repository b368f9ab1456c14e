import os
import threading
import time

import pytest

from hpcjax.train import watchdog
from hpcjax.train.watchdog import Watchdog, blame


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
        watched.expect("step")
        watched.beat(7)
        assert wait(lambda: ticking)
    assert ticking == [7]
    err = capfd.readouterr().err
    assert "step stands still for" in err
    assert "process 2 is behind at 6" in err
    assert "test_watchdog.py" in err  # the stack of the main thread


def test_where_the_main_thread_waits_is_told_of_any_number_of_threads(
    tmp_path, ticking, capfd
):
    """faulthandler tells of a hundred, the newest first."""
    end = threading.Event()
    others = [threading.Thread(target=end.wait, daemon=True) for _ in range(120)]
    for other in others:
        other.start()
    watched = Watchdog(tmp_path, 0, 0.001)
    watched.expect("step")
    let_pass(watched, 4)
    end.set()
    assert ticking == [7]
    assert "in test_where_the_main_thread_waits" in capfd.readouterr().err


class Ticks:
    """An event that is waited for `count` times, at no time at all."""

    def __init__(self, count):
        self.count = count

    def wait(self, seconds):
        self.count -= 1
        return self.count < 0


def let_pass(watched, ticks):
    """Is the thread of `watched` for so many ticks: no machine is too slow for it."""
    watched._end = Ticks(ticks)
    watched._watch()


def test_steps_keep_it_quiet(tmp_path, ticking):
    watched = Watchdog(tmp_path, 0, 0.2)
    watched.expect("step")
    for step in range(1, 40):
        watched.beat(step)
        let_pass(watched, 19)
    assert not ticking
    let_pass(watched, 2)
    assert ticking == [7]


def test_checkpoints_may_take_half_an_hour(tmp_path, ticking, monkeypatch):
    monkeypatch.setattr(watchdog, "_TICK", 1.0)
    watched = Watchdog(tmp_path, 0, 0.005)
    let_pass(watched, 1800)  # reads one
    watched.expect("step")
    for step in range(1, 5):
        watched.beat(step)
    watched.expect("checkpoint")
    let_pass(watched, 1800)
    assert not ticking
    let_pass(watched, 1)
    assert ticking == [7]


@pytest.mark.parametrize("what", ["step", "validation"])
def test_one_that_never_begins_is_found(tmp_path, ticking, what):
    """Nor does its first data come: it is told as the one behind all others."""
    (tmp_path / "1").write_text("1\n")
    with Watchdog(tmp_path, 0, 0.001, count=2) as watched:
        watched.expect(what)
        assert wait(lambda: ticking)
        assert "process 0 is behind at 0" in watched.describe_stall()


class Clock:
    """Stands where it is put."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(watchdog, "time", made)
    return made


@pytest.mark.parametrize("what", ["step", "validation"])
def test_how_long_each_may_take(tmp_path, clock, what):
    watched = Watchdog(tmp_path, 0, 60.0)
    assert watched.limit() == 1800.0
    watched.expect(what)
    limits = []
    for number, seconds in enumerate((900.0, 1.0, 10.0, 11.0), 1):
        watched.beat(number, number if what == "validation" else 0)
        assert watched._waited == 0.0
        limits.append(watched.limit())
        clock.now += seconds
    # The first compiles; then, before a median is known; then that of 900, 1 and 10.
    assert limits == [1800.0, 600.0, 600.0, 200.0]
    watched.expect("checkpoint")
    assert watched.limit() == 1800.0
    watched.expect(what)
    assert watched.limit() == 20 * 10.5
    other = {"step": "validation", "validation": "step"}[what]
    watched.expect(other)
    assert watched.limit() == 1800.0


def test_what_ends_with_something_else_has_taken_its_time_too(tmp_path, clock):
    """As where every step is followed by a validation of one batch, and a save."""
    watched = Watchdog(tmp_path, 0, 60.0)
    for step in range(1, 4):
        watched.expect("step")
        clock.now += 1000.0  # waits for data
        watched.beat(step)
        clock.now += 4.0
        watched.expect("validation")
        watched.beat(step, 1)
        clock.now += 5.0
        watched.expect("checkpoint")
        clock.now += 1000.0
    watched.expect("step")
    assert watched.limit() == 80.0
    watched.expect("validation")
    assert watched.limit() == 100.0


def test_files_of_an_earlier_attempt_are_forgotten(tmp_path):
    for name in ("0", "1", "2", "3"):
        (tmp_path / name).write_text("40\n")
    with Watchdog(tmp_path, 0, 60.0, count=2) as watched:
        watched.beat(9)
        assert blame(tmp_path) == "process 0 is behind at 9"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_who_is_behind(tmp_path):
    assert blame(tmp_path) == "process  is behind at 0"
    for index, text in enumerate(["5\n", "4\n", "4\n", "", "?"]):
        (tmp_path / str(index)).write_text(text)
    (tmp_path / "note.txt").write_text("9")
    assert blame(tmp_path) == "process 1, 2 is behind at 4"
    (tmp_path / "1").write_text("4 2\n")  # in the validation after it
    assert blame(tmp_path) == "process 2 is behind at 4"
    (tmp_path / "2").write_text("4 10\n")
    assert blame(tmp_path) == "process 1 is behind at 4"


def test_a_process_that_is_stopped_is_to_blame_though_it_is_ahead(tmp_path):
    for index, step in enumerate((7, 8, 7)):
        (tmp_path / str(index)).write_text(f"{step}\n")
        os.utime(tmp_path / str(index), (1000.0, 1000.0))
    os.utime(tmp_path / "0", (1002.5, 1002.5))
    assert blame(tmp_path) == "process 0, 2 is behind at 7"
    os.utime(tmp_path / "0", (1006.0, 1006.0))
    os.utime(tmp_path / "2", (1005.5, 1005.5))
    assert blame(tmp_path) == "process 1 shows no sign of life, last at 8"


def test_a_living_process_touches_its_file(tmp_path, ticking):
    watched = Watchdog(tmp_path, 0, 60.0)
    watched.beat(1)
    os.utime(tmp_path / "0", (1000.0, 1000.0))
    let_pass(watched, 1)
    assert (tmp_path / "0").stat().st_mtime > 1000.0
