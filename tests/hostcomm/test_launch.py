"""Processes that run a function: results by rank, errors by name, nothing left."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost
from hpcjax.hostcomm import Link, launch
from hpcjax.hostcomm.packing import pack, unpack
from tests.hostcomm import contract, ranks

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def nothing_left():
    """No process of ours and no descriptor is left over."""
    us = psutil.Process()
    before, descriptors = set(us.children(recursive=True)), us.num_fds()
    yield
    assert set(us.children(recursive=True)) <= before
    assert us.num_fds() <= descriptors


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.processes
def test_results_come_by_rank():
    """More processes than cores."""
    arguments = (2, np.arange(3.0), [True, None, ("a", 1.5)])
    got = launch(ranks.what_it_is, 4, arguments=arguments, link=Link(rate=1e9))
    for rank, (told, total, size, nothing) in enumerate(got):
        assert told.pop("wire") > 2 * 24
        assert told == {
            "rank": rank,
            "more": [True, None, ("a", 1.5)],
            "threads": "1",
            "jax": "cpu",
        }
        np.testing.assert_array_equal(total, np.arange(3.0) * 12)
        assert isinstance(size, np.float32)
        assert (float(size), nothing) == (4.0, None)


@pytest.mark.processes
def test_processes_keep_the_contract():
    names = [program.__name__ for program in contract.PROGRAMS]
    assert launch(ranks.keep_the_contract, 3, patience=30.0) == [names] * 3


@pytest.mark.processes
def test_an_error_comes_with_its_rank_and_traceback():
    with pytest.raises(HpcjaxError, match="rank 1 failed at 'fail'") as error:
        launch(ranks.fail, 3, arguments=(1,))
    assert not isinstance(error.value, ProcessLost)
    assert "KeyError: 'a strange key'" in str(error.value)
    assert "in fail\n" in str(error.value)


@pytest.mark.processes
def test_a_killed_rank_is_named_at_once():
    """By patience alone it would take for ever."""
    with pytest.raises(ProcessLost, match="rank 2 was killed by SIGKILL") as error:
        launch(ranks.die, 4, arguments=(2,), patience=math.inf)
    assert "rank 2 has ended" in str(error.value)


@pytest.mark.processes
def test_a_rank_that_stands_still_is_named():
    with pytest.raises(ProcessLost) as error:
        launch(ranks.stop, 2, arguments=(1,), patience=1.0)
    assert "rank 0: rank 1 has sent nothing for 1 s" in str(error.value)
    assert "rank 1: no answer to 'stop': it is dead or hangs" in str(error.value)


@pytest.mark.processes
def test_the_whole_may_be_limited():
    with pytest.raises(ProcessLost, match="rank 0: no answer to 'sleep'"):
        launch(ranks.sleep, 1, arguments=(600,), limit=0.5)


@pytest.mark.processes
def test_nothing_is_lost_by_leaving_early():
    assert launch(ranks.leave_early, 2) == [0, 7]


@pytest.mark.processes
def test_a_result_that_cannot_be_sent_is_named():
    with pytest.raises(HpcjaxError, match=r"(?s)rank 0 failed.*it cannot be sent"):
        launch(ranks.something_else, 1)


@pytest.mark.processes
def test_ranks_end_with_who_has_launched_them(tmp_path):
    """Though they do not look at it: they are in the middle of the function."""
    code = (
        "import sys; from hpcjax import hostcomm; from tests.hostcomm import ranks;"
        "hostcomm.launch(ranks.tell_and_wait, 2, arguments=(sys.argv[1],))"
    )
    path = str(tmp_path / "pid")
    us = subprocess.Popen([sys.executable, "-c", code, path], cwd=ROOT)
    files = [pathlib.Path(f"{path}{rank}") for rank in (0, 1)]
    try:
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        us.send_signal(signal.SIGKILL)
    finally:
        us.kill()
        us.wait(30)
    wait_for(lambda: not any(alive(int(file.read_text())) for file in files))


def alive(number):
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.05)


def test_what_cannot_be_imported_is_refused():
    for wrong in (lambda transport: 0, wait_for.__get__(0), alive.__call__):
        with pytest.raises(ConfigError, match="able to import the function"):
            launch(wrong, 1)


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="processes must be an integer >= 1"):
        launch(ranks.sleep, 0)
    with pytest.raises(ConfigError, match="must be > 0: got patience=0"):
        launch(ranks.sleep, 1, patience=0.0)
    with pytest.raises(ConfigError, match=r"it\['arguments'\]\[0\] cannot be sent"):
        launch(ranks.sleep, 1, arguments=(os,))


@pytest.mark.parametrize("value", [{1: 2}, {"a": [b"x"]}, np.array([{}]), {1, 2}, 1j])
def test_other_values_are_not_packed(value):
    with pytest.raises(ConfigError, match=r"it.* cannot be sent"):
        pack("x", value)


def test_values_survive():
    value = {"list": [1, {"mapping": ()}], "array": {"array": np.ones((2, 0))}}
    got = unpack(pack("x", value))
    np.testing.assert_array_equal(got["array"].pop("array"), np.ones((2, 0)))
    assert got == {"list": [1, {"mapping": ()}], "array": {}}
    scalar = unpack(pack("x", np.int8(3)))
    assert (type(scalar), int(scalar)) == (np.int8, 3)
