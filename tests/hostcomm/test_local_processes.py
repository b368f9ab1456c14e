"""Processes that are asked: they answer, and nobody waits for the dead."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost
from hpcjax.hostcomm import local_processes

ROOT = pathlib.Path(__file__).parents[2]
WORKER = "tests.hostcomm.echo_process"


def test_too_few_cores_are_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert local_processes.free_cores(2) == (3, 5)
    with pytest.raises(ConfigError, match=r"3 processes need a core each.*may use 2"):
        local_processes.free_cores(3)
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match="cannot be pinned"):
        local_processes.free_cores(1)


def start(**patience):
    # The same core twice: here nobody measures time.
    core = min(os.sched_getaffinity(0))
    return local_processes.start_processes(
        WORKER, [core, core], folder=ROOT, **patience
    )


@pytest.mark.processes
def test_ranks_answer_and_reach_each_other():
    with start() as crew:
        replies = crew.ask("echo", [{"text": "a"}, {"text": "b"}])
        assert [r.options for r in replies] == [
            {"rank": 0, "text": "a", "jax": False},
            {"rank": 1, "text": "b", "jax": False},
        ]
        core = min(os.sched_getaffinity(0))
        assert [r.arrays["cores"].tolist() for r in replies] == [[core], [core]]
        replies = crew.ask("exchange", [{}, {}])
        assert [r.options["got"] for r in replies] == ["from 1", "from 0"]
        processes = crew.processes
    assert all(process.returncode is not None for process in processes)


@pytest.mark.processes
def test_an_error_comes_with_its_traceback_and_before_what_followed():
    with start() as crew:
        with pytest.raises(HpcjaxError, match=r"rank 1 failed.*(?s:.)*odd number") as e:
            crew.ask("fail", [{}, {}])
        assert not isinstance(e.value, ProcessLost)
        ended = [process.wait(30) for process in crew.processes]
    assert ended == [ProcessLost.exit_code, 1]


@pytest.mark.processes
def test_a_dead_rank_is_named_with_its_signal():
    with start() as crew:
        crew.ask("echo", [{"text": ""}] * 2)
        crew.processes[1].kill()
        crew.processes[1].wait(30)
        with pytest.raises(ProcessLost) as error:
            crew.ask("exchange", [{}, {}])
    assert "rank 0: rank 1 has ended" in str(error.value)
    assert "rank 1 was killed by SIGKILL" in str(error.value)


@pytest.mark.processes
def test_a_rank_that_hangs_is_named():
    with start(patience=1.0, grace=0.5) as crew:
        crew.ask("echo", [{"text": ""}] * 2)
        crew.processes[1].send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessLost) as error:
            crew.ask("exchange", [{}, {}])
    assert "rank 0: rank 1 has sent nothing for 1 s" in str(error.value)
    assert "rank 1: no answer to 'exchange': it is dead or hangs" in str(error.value)


@pytest.mark.processes
def test_all_that_hang_are_named():
    with start(answer_patience=1.0) as crew:
        for process in crew.processes:
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessLost, match=r"0: no answer.*; rank 1: no answer"):
            crew.ask("echo", [{"text": ""}] * 2)


@pytest.mark.processes
def test_what_a_process_printed_last_is_told():
    core = min(os.sched_getaffinity(0))
    with (
        local_processes.start_processes(
            "tests.hostcomm.no_such", [core], folder=ROOT
        ) as crew,
        pytest.raises(ProcessLost, match=r"they printed last:\n.*No module named"),
    ):
        crew.ask("echo", [{}])


@pytest.mark.processes
def test_ranks_end_when_nobody_is_left_to_ask():
    code = (
        "import os, pathlib, sys; from hpcjax import hostcomm;"
        "here = pathlib.Path.cwd();"
        "crew = hostcomm.start_processes(sys.argv[1], [int(sys.argv[2])], folder=here);"
        "made = crew.__enter__(); made.ask('echo', [{'text': ''}]);"
        "print(made.processes[0].pid, flush=True); os.kill(os.getpid(), 9)"
    )
    core = str(min(os.sched_getaffinity(0)))
    words = subprocess.run(
        [sys.executable, "-c", code, WORKER, core],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=60,
    )
    assert words.returncode == -signal.SIGKILL
    assert ended(int(words.stdout), 30)


def ended(pid: int, seconds: float) -> bool:
    import psutil

    try:
        process = psutil.Process(pid)
        process.wait(seconds)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return process.status() == psutil.STATUS_ZOMBIE
    return True
