"""Channels: arrays arrive as they are, and nobody waits for the dead."""

import math
import socket

import ml_dtypes
import numpy as np
import pytest

from hpcjax.core.errors import ProcessLost
from hpcjax.hostcomm.channels import Channel, Message


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


def test_infinite_patience_is_none_of_the_socket():
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "rank 1", patience=math.inf)
    assert ours.gettimeout() is None
    theirs.close()
    channel.close()
