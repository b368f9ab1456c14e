"""How ranks find each other, and who is not let in."""

import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, ProcessLost
from hpcjax.hostcomm import TcpTransport, allreduce, connect, rendezvous
from hpcjax.hostcomm.channels import Message, frame
from hpcjax.hostcomm.reception import hear, say
from hpcjax.hostcomm.rendezvous import _gather, _read, call, listen, meet
from tests.hostcomm.threads import in_threads


def environment(rank, size, port, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "HPCJAX_JOB": "one",
        **more,
    }


def free_port():
    with listen() as listener:
        return listener.getsockname()[1]


def all_of(calls):
    """Runs the calls at once; returns results or errors."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        made = [threads.submit(call) for call in calls]
    return [each.exception() or each.result() for each in made]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_environment_connects_all(size):
    port = free_port()
    calls = [
        lambda rank=rank: connect(
            environment=environment(rank, size, port), patience=20.0
        )
        for rank in range(size)
    ]
    transports = all_of(calls)
    assert [each.rank for each in transports] == list(range(size))

    def rank(transport):
        return allreduce(transport, np.array([transport.rank])).tolist()

    assert in_threads(rank, transports) == [[sum(range(size))]] * size


def test_rank_0_may_come_last():
    port = free_port()
    came = threading.Event()

    def late():
        came.wait(20)
        return connect(environment=environment(0, 2, port), patience=20.0)

    def early():
        threading.Timer(0.2, came.set).start()
        return connect(environment=environment(1, 2, port), patience=20.0)

    transports = all_of([late, early])
    in_threads(lambda transport: transport.rank, transports)


@pytest.mark.parametrize(
    "missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_missing_variable_is_named(missing):
    given = environment(0, 2, 1234)
    del given[missing]
    with pytest.raises(ConfigError, match=f"also set {missing}: RANK, WORLD_SIZE"):
        connect(environment=given)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", "two", "must be numbers"),
        ("RANK", "2", "RANK must be one of the ranks"),
        ("WORLD_SIZE", "0", "WORLD_SIZE must be an integer >= 1"),
        ("MASTER_PORT", "65536", "MASTER_PORT must be a port"),
    ],
)
def test_wrong_variables_are_refused(name, value, words):
    given = environment(0, 2, 1234)
    given[name] = value
    with pytest.raises(ConfigError, match=words):
        connect(environment=given)


def test_who_does_not_come_is_named():
    with pytest.raises(ProcessLost, match=r"ranks \[1, 2\] have not come"):
        connect(environment=environment(0, 3, free_port()), patience=0.1)
    with pytest.raises(ProcessLost, match=r"rank 0 is not there, at 127\.0\.0\.1"):
        connect(environment=environment(1, 3, free_port()), patience=0.1)


def test_two_of_one_rank_or_another_size_are_told():
    port = free_port()
    errors = all_of(
        [
            lambda: connect(environment=environment(0, 3, port), patience=1.0),
            lambda: connect(environment=environment(1, 2, port), patience=1.0),
        ]
    )
    assert str(errors[0]) == "ranks [1, 2] have not come"
    assert "WORLD_SIZE is 3 here, not 2" in str(errors[1])
    port = free_port()
    errors = all_of(
        [
            lambda rank=rank: connect(
                environment=environment(rank, 3, port), patience=1.0
            )
            for rank in (0, 1, 1)
        ]
    )
    assert str(errors[0]) == "ranks [2] have not come"
    assert any("rank 1 is here already" in str(error) for error in errors[1:])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"HPCJAX_JOB": "two"}, "this is job 'one', not 'two'"),
        ({"HPCJAX_SECRET": "guessed"}, "HPCJAX_SECRET is another one"),
        ({}, "HPCJAX_SECRET is another one"),
    ],
)
def test_two_jobs_at_one_port_do_not_become_one(other, why):
    """The other job's rank calls first; the job is complete without it."""
    port, told = free_port(), []
    own = {"HPCJAX_SECRET": "known"}

    def stranger():
        with pytest.raises(ProcessLost) as caught:
            connect(environment=environment(1, 2, port, **other), patience=20.0)
        told.append(str(caught.value))

    def late():
        calling = threading.Thread(target=stranger)
        calling.start()
        calling.join(20)
        return connect(environment=environment(1, 2, port, **own), patience=20.0)

    first = lambda: connect(  # noqa: E731
        environment=environment(0, 2, port, **own), patience=20.0
    )
    transports = all_of([first, late])
    total = in_threads(lambda t: allreduce(t, np.ones(1)).tolist(), transports)
    assert total == [[2.0], [2.0]]
    assert len(told) == 1
    assert why in told[0]


def test_who_does_not_know_the_secret_is_no_rank_0():
    """It would let anybody in, and be told what all others have."""
    port = free_port()
    errors = all_of(
        [
            lambda: connect(environment=environment(0, 2, port), patience=1.0),
            lambda: connect(
                environment=environment(1, 2, port, HPCJAX_SECRET="known"),
                patience=1.0,
            ),
        ]
    )
    assert "HPCJAX_SECRET is another one" in str(errors[1])
    assert str(errors[0]) == "ranks [1] have not come"


def test_a_taken_port_is_told():
    with listen() as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="another process listens there"):
            connect(environment=environment(0, 2, port), patience=1.0)
    given = environment(0, 2, port) | {"MASTER_ADDR": "192.0.2.1"}
    with pytest.raises(ConfigError, match="or set HPCJAX_LISTEN"):
        connect(environment=given, patience=1.0)
    here = {**given, "HPCJAX_LISTEN": "127.0.0.1"}
    with pytest.raises(ProcessLost, match=r"ranks \[1\] have not come"):
        connect(environment=here, patience=0.1)


def test_jobs_without_a_name_are_refused():
    given = environment(0, 2, 1234)
    del given["HPCJAX_JOB"]
    with pytest.raises(ConfigError, match="also set HPCJAX_JOB"):
        connect(environment=given)
    with pytest.raises(ProcessLost, match="have not come"):
        connect(
            environment={**given, "MASTER_PORT": str(free_port()), "SLURM_JOB_ID": "7"},
            patience=0.1,
        )


def test_rank_0_listens_where_it_is_called_alone():
    listening = []

    class Listener:
        def __init__(self, *given, **options):
            listening.append(given[0])
            raise OSError("no more than this was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", Listener)
        with pytest.raises(ConfigError, match="no more than this was asked"):
            connect(environment=environment(0, 2, 1234))
    assert listening == [("127.0.0.1", 1234)]


@pytest.mark.processes
def test_silent_and_dripping_callers_do_not_outlast_the_deadline():
    """Twenty of them, each of which would be waited for for seconds."""
    port, stop = free_port(), threading.Event()

    def drip(connection):
        while not stop.wait(0.02):
            with contextlib.suppress(OSError):
                connection.sendall(b"\0")

    def call_in():
        with contextlib.ExitStack() as stack:
            for number in range(20):
                for _ in range(500):
                    with contextlib.suppress(ConnectionError):
                        made = socket.create_connection(("127.0.0.1", port))
                        break
                    time.sleep(0.01)
                stack.enter_context(made)
                if number % 2:
                    threading.Thread(target=drip, args=(made,), daemon=True).start()
            transports = all_of(
                [lambda: connect(environment=environment(1, 2, port), patience=20.0)]
            )
            stop.wait(20)
        return transports[0]

    def first():
        begin = time.monotonic()
        made = connect(environment=environment(0, 2, port), patience=60.0)
        stop.set()
        # They are called before rank 1 is: in turns each would take five seconds.
        assert time.monotonic() - begin < 50
        return made

    made = all_of([first, call_in])
    in_threads(lambda transport: transport.rank, made)
    stop.clear()
    begin = time.monotonic()
    with listen() as listener:
        callers = [socket.create_connection(listener.getsockname()) for _ in range(4)]
        with pytest.raises(ProcessLost, match=r"ranks \[1\] have not come"):
            _gather(listener, _read(environment(0, 2, 1)), begin + 0.3)
    assert time.monotonic() - begin < 4
    for each in callers:
        each.close()


def said(options):
    """What a stranger sends that knows how messages look."""
    header = json.dumps(["hello", options, []]).encode()
    return len(header).to_bytes(8, "big") + header


STRANGE = [
    said(options)
    for options in (
        {"rank": 1, "token": "guessed"},
        {"rank": 1, "token": "gu\u00e9ssed"},
        {"rank": 1, "token": "\ud800"},
        {"rank": [1], "token": "secret"},
        {"rank": 1, "size": 2},
        ["rank"],
    )
]


@pytest.mark.processes
def test_strangers_do_not_disturb_who_gathers():
    with listen() as listener, contextlib.ExitStack() as stack:
        for word in STRANGE:
            stranger = stack.enter_context(
                socket.create_connection(listener.getsockname())
            )
            stranger.sendall(word)
        with pytest.raises(ProcessLost, match=r"ranks \[1\] have not come"):
            _gather(listener, _read(environment(0, 2, 1)), time.monotonic() + 0.3)


def test_strangers_are_not_let_in():
    listeners = [listen(), listen()]
    addresses = [each.getsockname() for each in listeners]
    words = [b"GET / HTTP/1.1\r\n\r\n", b"", *STRANGE]
    with contextlib.ExitStack() as stack:
        for word in words:
            stranger = stack.enter_context(socket.create_connection(addresses[0]))
            stranger.sendall(word)
            stranger.shutdown(socket.SHUT_WR)
        made = all_of(
            [
                lambda rank=rank: TcpTransport(
                    rank,
                    meet(rank, listeners[rank], addresses, "secret", patience=20.0),
                )
                for rank in (0, 1)
            ]
        )
        total = in_threads(lambda t: allreduce(t, np.ones(1)).tolist(), made)
    assert total == [[2.0], [2.0]]


def test_a_port_may_be_used_again_at_once():
    port = free_port()
    for _ in range(3):
        transports = all_of(
            [
                lambda rank=rank: connect(
                    environment=environment(rank, 2, port), patience=20.0
                )
                for rank in range(2)
            ]
        )
        assert in_threads(lambda transport: transport.rank, transports) == [0, 1]


def test_who_only_knows_the_job_holds_up_nobody():
    """Three who never answer the question for the secret; each has seconds to."""
    port, secret = free_port(), {"HPCJAX_SECRET": "known"}
    hello = {"rank": 1, "size": 2, "port": 1, "job": "one", "nonce": ""}

    def late():
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                sham = stack.enter_context(
                    call(
                        ("127.0.0.1", port), "rank 0", time.monotonic() + 20, retry=True
                    )
                )
                sham.sendall(said(hello))
                sham.recv(1)  # of the question
            return connect(environment=environment(1, 2, port, **secret), patience=4.0)

    made = all_of(
        [
            lambda: connect(
                environment=environment(0, 2, port, **secret), patience=20.0
            ),
            late,
        ]
    )
    assert in_threads(lambda transport: transport.rank, made) == [0, 1]


def test_a_first_word_is_short():
    for long in (
        {"rank": 1, "text": "x" * 2**17},
        {"rank": 1},
    ):
        arrays = {} if "text" in long else {"x": np.zeros(2**15)}
        blocks = frame(Message("hello", long, arrays))
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(blocks[0][: 2**12])
            with pytest.raises(ValueError, match="bytes"):
                hear(theirs, time.monotonic() + 20)


def test_a_rank_that_ends_before_it_is_welcomed_is_named(monkeypatch):
    port = free_port()

    def refuse(connection, message):
        if message.name == "welcome":
            raise ConnectionResetError(104, "reset by peer")
        say(connection, message)

    monkeypatch.setattr(rendezvous, "say", refuse)
    errors = all_of(
        [
            lambda rank=rank: connect(
                environment=environment(rank, 2, port), patience=1.0
            )
            for rank in range(2)
        ]
    )
    assert "rank 1 has ended" in str(errors[0])
    assert isinstance(errors[1], ProcessLost)
