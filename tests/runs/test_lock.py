"""Who holds a folder, when clocks are set and numbers of processes come again."""

import os
import shutil
import subprocess
import time

import psutil
import pytest

from hpcjax.runs import lock

HOUR = 3600.0
linux = pytest.mark.skipif(not psutil.LINUX, reason="reads /proc")


@pytest.fixture
def sign(tmp_path):
    path = tmp_path / "lock"
    path.touch()
    return path


def set_clock(monkeypatch, by):
    """Has the time of every start be another one, as after the clock was set."""
    honest = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: honest(self) + by)


@linux
@pytest.mark.parametrize("by", [-HOUR, HOUR])
def test_a_clock_that_is_set_takes_no_lock_away(sign, monkeypatch, by):
    me = lock.me()
    set_clock(monkeypatch, by)
    assert lock._is_alive(me, sign)


@linux
def test_a_number_that_came_again_is_another_process(sign):
    boot, ticks = lock.me()["started"].split()
    assert lock._is_alive(lock.me(), sign)
    for started in (f"{boot} {int(ticks) - 1}", f"another {ticks}", ""):
        assert not lock._is_alive(lock.me() | {"started": started}, sign)


@linux
@pytest.mark.parametrize("name", ["sleep", "a) S 1 (b", "1 2 3"])
def test_the_start_is_the_one_that_psutil_tells(tmp_path, name):
    """Whatever a process is called: its name stands before, in brackets."""
    shutil.copy(shutil.which("sleep"), tmp_path / name)
    process = subprocess.Popen([tmp_path / name, "600"])
    try:
        while psutil.Process(process.pid).name() != name:
            time.sleep(0.01)
        ticks = int(lock._started(process.pid).split()[1])
        seconds = psutil.boot_time() + ticks / os.sysconf("SC_CLK_TCK")
        told = psutil.Process(process.pid).create_time()
        assert seconds == pytest.approx(told, abs=1.5)  # both read a rounded boot
    finally:
        process.kill()
        process.wait()
    with pytest.raises(psutil.NoSuchProcess):
        lock._started(process.pid)


def test_without_proc_the_clock_tells(sign, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_PROC", tmp_path / "none")
    me = lock.me()
    assert isinstance(me["started"], float)
    assert lock._is_alive(me, sign)
    assert lock._is_alive({**me, "started": me["started"] - 1}, sign)
    assert not lock._is_alive({**me, "started": me["started"] - HOUR}, sign)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not lock._is_alive({**me, "pid": gone.pid}, sign)
