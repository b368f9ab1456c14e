"""What every transport must do: programs that all ranks run, of two ranks or more.

Threads, processes and MPI run the same ones; asserts say what is wrong.
"""

import time

import ml_dtypes
import numpy as np
import pytest

from hpcjax import hostcomm
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import Tag

ARRAYS = (
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.arange(6, dtype=np.int64).reshape(2, 3).T,
    np.zeros((0, 4)),
    np.array(3, np.uint8),
    np.ones(3, ml_dtypes.bfloat16),
    np.arange(300_000, dtype=np.float64),
)


def around(transport):
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def arrays_arrive_as_they_are(transport):
    after, before = around(transport)
    for number, array in enumerate(ARRAYS):
        transport.send(after, Tag("data", number), array)
    for number, array in enumerate(ARRAYS):
        got = transport.receive(before, Tag("data", number))
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)
        got += 1  # it is ours


def a_tag_is_matched_and_keeps_its_order(transport):
    after, before = around(transport)
    for number in range(4):
        for phase in (0, 1):
            transport.send(after, Tag("data", 7, phase), np.array([number, phase]))
    for phase in (1, 0):
        for number in range(4):
            got = transport.receive(before, Tag("data", 7, phase))
            assert got.tolist() == [number, phase]


def what_is_sent_to_oneself_is_a_copy(transport):
    before, array = transport.counters(), np.ones(3)
    for post in (transport.send, transport.isend):
        post(transport.rank, Tag("mine"), array)
        array[:] = 2
        assert transport.receive(transport.rank, Tag("mine")).tolist() == [1, 1, 1]
        array[:] = 1
    added = transport.counters().since(before)
    assert added.sent[transport.rank] == hostcomm.Traffic()
    assert added.received[transport.rank] == hostcomm.Traffic()


def all_may_send_at_once(transport):
    """More than a socket holds: blocked, if nobody took in what comes."""
    array = np.full(2_000_000, transport.rank)
    others = [rank for rank in range(transport.size) if rank != transport.rank]
    for other in others:
        transport.send(other, Tag("large"), array)
    for other in others:
        assert (transport.receive(other, Tag("large")) == other).all()


def anything_can_be_waited_for(transport):
    for other in range(transport.size):
        transport.send(other, Tag("a", other), np.array(transport.rank))
        transport.send(other, Tag("b", other, 1), np.array(transport.rank))
    exact = Tag("a", transport.rank)
    seen = [transport.receive_any(exact) for _ in range(transport.size)]
    seen += [transport.receive_any("no", "b") for _ in range(transport.size)]
    assert sorted((e.source, e.tag) for e in seen) == sorted(
        (source, tag)
        for source in range(transport.size)
        for tag in (exact, Tag("b", transport.rank, 1))
    )
    assert all(int(each.array) == each.source for each in seen)


def requests_are_done_later(transport):
    after, before = around(transport)
    first, second = (transport.irecv(before, Tag("data")) for _ in range(2))
    never = transport.irecv(before, Tag("never"))
    assert not never.test()
    with pytest.raises(TimeoutError, match="nothing has come for"):
        never.wait(0.01)
    hostcomm.barrier(transport)
    sent = [
        transport.isend(after, Tag("data"), np.full(200_000, number))
        for number in (1, 2)
    ]
    transport.send(after, Tag("data"), np.array(3))  # behind these
    assert second.wait()[0] == 2  # who asked first gets the first
    assert first.test()
    assert transport.wait_any([never, first]) == 1
    assert first.wait()[0] == 1
    assert [each.wait() for each in sent] == [None, None]
    assert transport.wait_any([sent[1], never]) == 0
    assert transport.receive(before, Tag("data")) == 3
    hostcomm.barrier(transport)
    transport.send(after, Tag("never"), np.array(4))
    assert transport.wait_any([never]) == 0
    assert never.wait() == 4


def a_timeout_loses_nothing(transport):
    after, before = around(transport)
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        transport.receive(before, Tag("late"), timeout=0.01)
    with pytest.raises(TimeoutError):
        transport.receive_any("late", timeout=0.01)
    hostcomm.barrier(transport)
    transport.send(after, Tag("late"), np.array(1))
    assert transport.receive(before, Tag("late")) == 1


def what_is_sent_is_counted(transport):
    after, before = around(transport)
    start = transport.counters()
    hostcomm.barrier(transport)  # nobody's messages come before its reading
    for _ in range(3):
        transport.send(after, Tag("data"), np.zeros(1000, np.float32))
    for _ in range(3):
        transport.receive(before, Tag("data"))
    added = transport.counters().since(start)
    steps = (transport.size - 1).bit_length()  # of the barrier
    assert added.total_sent().messages == 3 + steps
    for way, peer in ((added.sent, after), (added.received, before)):
        assert [each.payload for each in way] == [
            12_000 * (rank == peer) for rank in range(transport.size)
        ]
        assert 12_000 < way[peer].wire < 12_000 * 1.05


def wrong_ranks_are_refused(transport):
    size = transport.size
    for wrong in (-1, size):
        with pytest.raises(ConfigError, match=f"to must be one of {size} ranks"):
            transport.send(wrong, Tag("x"), np.zeros(1))
        with pytest.raises(ConfigError, match="source must be"):
            transport.receive(wrong, Tag("x"))
    with pytest.raises(ConfigError, match="something must be waited for"):
        transport.wait_any([])


def collectives_agree(transport):
    rank, size = transport.rank, transport.size
    every = [np.arange(10.0) * (r + 1) for r in range(size)]
    total = sum(every)
    for method in ("doubling", "ring"):
        got = hostcomm.allreduce(transport, every[rank], method=method)
        np.testing.assert_array_equal(got, total)
    got = hostcomm.reduce_scatter(transport, every[rank])
    np.testing.assert_array_equal(got, np.array_split(total, size)[rank])
    stacked = hostcomm.allgather(transport, every[rank])
    np.testing.assert_array_equal(stacked, every)
    gathered = hostcomm.allgatherv(transport, np.full(rank, rank))
    assert [each.tolist() for each in gathered] == [[r] * r for r in range(size)]
    parts = [np.full(to + 1, rank) for to in range(size)]
    got = hostcomm.alltoallv(transport, parts)
    assert [each.tolist() for each in got] == [[r] * (rank + 1) for r in range(size)]
    for root in range(size):
        given = np.array([root, 5]) if rank == root else None
        assert hostcomm.broadcast(transport, given, root=root).tolist() == [root, 5]


def nobody_leaves_a_barrier_before_all_have_come(transport):
    """By the machine's clock, which all processes share."""
    if transport.rank == transport.size - 1:
        time.sleep(0.05)
    came = time.monotonic()
    hostcomm.barrier(transport)
    left = time.monotonic()
    assert left >= max(hostcomm.allgatherv(transport, np.array(came)))


PROGRAMS = (
    arrays_arrive_as_they_are,
    a_tag_is_matched_and_keeps_its_order,
    what_is_sent_to_oneself_is_a_copy,
    all_may_send_at_once,
    anything_can_be_waited_for,
    requests_are_done_later,
    a_timeout_loses_nothing,
    what_is_sent_is_counted,
    wrong_ranks_are_refused,
    collectives_agree,
    nobody_leaves_a_barrier_before_all_have_come,
)


def run_all(transport):
    """Runs all programs one after the other; returns their names."""
    for program in PROGRAMS:
        program(transport)
        hostcomm.barrier(transport)
    return [program.__name__ for program in PROGRAMS]
