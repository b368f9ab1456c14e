"""How ranks find each other, and who is not let in."""

import concurrent.futures
import contextlib
import json
import socket
import threading

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, ProcessLost
from hpcjax.hostcomm import TcpTransport, allreduce, connect
from hpcjax.hostcomm.rendezvous import _gather, listen, meet
from tests.hostcomm.threads import in_threads


def environment(rank, size, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
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
    assert "another with this RANK, or another WORLD_SIZE" in str(errors[1])


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


def test_strangers_do_not_disturb_who_gathers():
    with listen() as listener, contextlib.ExitStack() as stack:
        for word in STRANGE:
            stranger = stack.enter_context(
                socket.create_connection(listener.getsockname())
            )
            stranger.sendall(word)
        with pytest.raises(ProcessLost, match=r"ranks \[1\] have not come"):
            _gather(listener, 2, 0.2)


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
