"""Channels and pinned processes: arrays arrive, and nobody waits for the dead."""

import math
import os
import pathlib
import signal
import socket
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost
from hpcjax.sharding import local_processes
from hpcjax.sharding.channels import Channel, Message

ROOT = pathlib.Path(__file__).parents[2]
WORKER = "tests.sharding.echo_process"


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    ends = Channel(ours, "rank 1", patience=0.2), Channel(theirs, "rank 0")
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(6, dtype=np.int64).reshape(2, 3).T,
        np.zeros((0, 4)),
        np.array(3, np.uint8),
        np.array(["2026-11-22"], "datetime64[D]"),
        np.ones(3, ml_dtypes.bfloat16),
        np.ones(3, ml_dtypes.float8_e4m3fn),
        np.ones((1200, 1000)),  # more than a socket holds: the receiver takes it in
    ],
)
def test_an_array_arrives_as_it_is(pair, array):
    a, b = pair
    a.send(Message("some", {"number": 0.1, "list": [1, None]}, {"x": array}))
    got = b.receive("it")
    assert (got.name, got.options) == ("some", {"number": 0.1, "list": [1, None]})
    assert got.arrays["x"].dtype == array.dtype
    np.testing.assert_array_equal(got.arrays["x"], array)


def test_messages_keep_their_order(pair):
    a, b = pair
    for number in range(5):
        a.send(Message("next", {"number": number}))
    assert [b.receive("it").options["number"] for _ in range(5)] == list(range(5))
    assert not b.arrived()


@pytest.mark.parametrize("array", [np.array([{}]), np.zeros(2, [("a", np.float32)])])
def test_objects_and_records_are_not_sent(pair, array):
    with pytest.raises(ValueError, match=r"arrays of objects or records.*'x'"):
        pair[0].send(Message("some", arrays={"x": array}))


def test_silence_is_named(pair):
    with pytest.raises(ProcessLost, match=r"rank 1 has sent nothing for 0.2 s.*bread"):
        pair[0].receive("bread")


def test_an_end_is_seen_every_time(pair):
    a, b = pair
    b.send(Message("last"))
    b.close()
    assert a.receive("it").name == "last"
    for _ in range(2):
        with pytest.raises(ProcessLost, match="rank 1 has ended, waited for bread"):
            a.receive("bread")
    assert a.arrived()


def test_a_message_that_is_cut_off_is_none():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 1")
    theirs.sendall((100).to_bytes(8, "big") + b"[")
    theirs.close()
    with pytest.raises(ProcessLost, match="has ended"):
        channel.receive("it")
    channel.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((5).to_bytes(8, "big") + b"xxxxx", "JSONDecodeError"),
        ((4).to_bytes(8, "big") + b"null", "TypeError"),
        ((2**62).to_bytes(8, "big"), "a header of 4611686018427387904 bytes"),
    ],
)
def test_what_is_no_message_is_named(content, words):
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 1", patience=5.0)
    theirs.sendall(content)
    for _ in range(2):
        with pytest.raises(ProcessLost, match=f"rank 1 has sent what is no.*{words}"):
            channel.receive("it")
    channel.close()
    theirs.close()


def test_who_takes_nothing_in_is_named():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 1", patience=0.2)
    with pytest.raises(ProcessLost, match=r"rank 1 has taken nothing for 0.2 s"):
        channel.send(Message("large", arrays={"x": np.ones(10**6)}))
    channel.close()
    theirs.close()


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


@pytest.mark.system
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


@pytest.mark.system
def test_an_error_comes_with_its_traceback_and_before_what_followed():
    with start() as crew:
        with pytest.raises(HpcjaxError, match=r"rank 1 failed.*(?s:.)*odd number") as e:
            crew.ask("fail", [{}, {}])
        assert not isinstance(e.value, ProcessLost)
        ended = [process.wait(30) for process in crew.processes]
    assert ended == [ProcessLost.exit_code, 1]


@pytest.mark.system
def test_a_dead_rank_is_named_with_its_signal():
    with start() as crew:
        crew.ask("echo", [{"text": ""}] * 2)
        crew.processes[1].kill()
        crew.processes[1].wait(30)
        with pytest.raises(ProcessLost) as error:
            crew.ask("exchange", [{}, {}])
    assert "rank 0: rank 1 has ended" in str(error.value)
    assert "rank 1 was killed by SIGKILL" in str(error.value)


@pytest.mark.system
def test_a_rank_that_hangs_is_named():
    with start(patience=1.0, grace=0.5) as crew:
        crew.ask("echo", [{"text": ""}] * 2)
        crew.processes[1].send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessLost) as error:
            crew.ask("exchange", [{}, {}])
    assert "rank 0: rank 1 has sent nothing for 1 s" in str(error.value)
    assert "rank 1: no answer to 'exchange': it is dead or hangs" in str(error.value)


@pytest.mark.system
def test_all_that_hang_are_named():
    with start(answer_patience=1.0) as crew:
        for process in crew.processes:
            process.send_signal(signal.SIGSTOP)
        with pytest.raises(ProcessLost, match=r"0: no answer.*; rank 1: no answer"):
            crew.ask("echo", [{"text": ""}] * 2)


@pytest.mark.system
def test_what_a_process_printed_last_is_told():
    core = min(os.sched_getaffinity(0))
    with (
        local_processes.start_processes(
            "tests.sharding.no_such", [core], folder=ROOT
        ) as crew,
        pytest.raises(ProcessLost, match=r"they printed last:\n.*No module named"),
    ):
        crew.ask("echo", [{}])


@pytest.mark.system
def test_ranks_end_when_nobody_is_left_to_ask():
    code = (
        "import os, pathlib, sys; from hpcjax import sharding;"
        "here = pathlib.Path.cwd();"
        "crew = sharding.start_processes(sys.argv[1], [int(sys.argv[2])], folder=here);"
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


def test_infinite_patience_is_none_of_the_socket():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 1", patience=math.inf)
    assert ours.gettimeout() is None
    theirs.close()
    channel.close()
