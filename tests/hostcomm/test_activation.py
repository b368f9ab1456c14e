"""Who starts a round, who is woken by it, and that rounds run in order."""

import threading

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, ProcessLost
from hpcjax.hostcomm import RoundAgent, Tag, connected, initiators
from hpcjax.hostcomm.activation import tree_children
from tests.hostcomm.threads import close_all, in_threads

START = "x start"


def agent(transport, seen, **options):
    """An agent that notes its rounds and exchanges nothing."""
    options = {"frames": lambda number: [Tag("data", number)], **options}
    return RoundAgent(
        transport, lambda number, last: seen.append((number, last)), kind="x", **options
    )


@pytest.mark.parametrize("size", range(1, 18))
def test_a_tree_reaches_every_rank_once_in_few_hops(size):
    for root in range(size):
        reached, wave, hops = [root], [root], -1
        while wave:
            wave = [c for rank in wave for c in tree_children(rank, root, size)]
            reached += wave
            hops += 1
        assert sorted(reached) == list(range(size))
        assert hops <= (size - 1).bit_length()


def test_initiators_are_drawn_evenly_and_more_begin_with_the_same():
    many = initiators(3, 8, 8000)
    np.testing.assert_array_equal(initiators(3, 8, 17), many[:17])
    assert abs(np.bincount(many) - 1000).max() < 150
    assert (initiators(4, 8, 100) != many[:100]).any()


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_first_arrival_wakes_all_though_they_exchange_nothing(size):
    """As groups need it: no message of the round comes from most ranks."""
    transports, seen = connected(size, patience=20.0), [[] for _ in range(size)]
    agents = [agent(t, s) for t, s in zip(transports, seen, strict=True)]
    for number in range(3):
        agents[number % size].check_next(agents[number % size].arrived + 1)
        agents[number % size].arrive()
        for each in agents:
            each.wait(agents[number % size].arrived, 20.0)
    close_all(transports)
    assert len({tuple(each) for each in seen}) == 1


def test_a_message_of_the_round_wakes_too_and_is_left_for_the_round():
    a, b = connected(2, patience=20.0)
    got = []

    def run(number, last):
        got.append(a.receive(1, Tag("data", number)).item())

    woken = RoundAgent(a, run, kind="x", frames=lambda n: [Tag("data", n)])
    b.send(0, Tag("data", 0), np.array(7))
    woken.wait(0, 20.0)
    b.send(0, Tag("data", 1), np.array(8))
    woken.wait(1, 20.0)
    assert got == [7, 8]
    assert a.counters().total_sent().messages == 0  # it passes on nothing
    close_all([a, b])


def test_a_number_is_acted_on_once():
    transports = connected(4, patience=20.0)
    seen = []
    ours = agent(transports[1], seen)
    for _ in range(3):
        transports[0].send(1, Tag(START, 2), np.array(0, np.int32))
    transports[2].send(1, Tag(START, 1), np.array(2, np.int32))
    ours.wait(2, 20.0)
    ours.arrive()  # late: it starts nothing
    transports[0].send(1, Tag(START, 3), np.array(0, np.int32))
    ours.wait(3, 20.0)
    assert seen == [(number, False) for number in range(4)]
    # Rank 1 has one child, 3, in the tree of rank 0; 2 and 3 were passed on, no other.
    for number in (2, 3):
        assert transports[3].receive(1, Tag(START, number), timeout=20.0) == 0
    assert transports[1].counters().total_sent().messages == 2
    close_all(transports)


def test_a_folded_rank_is_told_by_its_partner_whatever_woke_that():
    transports = connected(3, patience=20.0)
    ours = agent(transports[0], [])
    transports[1].send(0, Tag("data", 0), np.zeros(1))
    ours.wait(0, 20.0)
    root = transports[2].receive(0, Tag(START, 0), timeout=20.0)
    assert root == -1
    assert transports[0].counters().total_sent().messages == 1
    close_all(transports)


def test_a_round_that_waits_for_its_owner_is_started_by_nobody_else():
    a, b = connected(2, patience=20.0)
    ours = agent(a, [], waits=lambda number: number == 1)
    b.send(0, Tag(START, 1), np.array(1, np.int32))
    b.send(0, Tag("data", 1), np.zeros(1))
    ours.wait(0, 20.0)
    with pytest.raises(TimeoutError, match=r"round 1 has not ended within 0\.05 s"):
        ours.wait(1, 0.05)
    ours.arrive()
    with pytest.raises(TimeoutError):
        ours.wait(1, 0.05)
    ours.arrive()
    ours.wait(1, 20.0)
    close_all([a, b])


def test_only_who_may_start_does():
    a, b = connected(2, patience=20.0)
    agents = [agent(t, [], starter=lambda n: n % 2) for t in (a, b)]
    agents[1].arrive()
    with pytest.raises(TimeoutError):
        agents[0].wait(0, 0.05)
    agents[0].arrive()
    for each in agents:
        each.wait(0, 20.0)
    close_all([a, b])


def test_a_quorum_counts_those_that_arrive_in_time():
    transports = connected(4, patience=20.0)
    agents = [agent(transport, [], quorum=2) for transport in transports]
    agents[3].arrive()
    with pytest.raises(TimeoutError):
        agents[0].wait(0, 0.05)
    agents[1].arrive()
    for each in agents:
        each.wait(0, 20.0)
    agents[0].arrive()  # too late to count, for round 0 and for the next
    agents[3].arrive()
    with pytest.raises(TimeoutError):
        agents[0].wait(1, 0.05)
    agents[2].arrive()  # late, too
    agents[2].arrive()
    for each in agents:
        each.wait(1, 20.0)
    transports[3].send(0, Tag("x report", 1), np.zeros(0))  # later than its round
    agents[0].arrive()
    with pytest.raises(TimeoutError):
        agents[0].wait(2, 0.05)
    assert 1 not in agents[0]._reports
    close_all(transports)
    with pytest.raises(ConfigError, match=r"quorum must be in 1\.\.4: got quorum=5"):
        agent(transports[0], [], quorum=5)


def silent(rank, seconds):
    return f"rank {rank} has sent nothing for {seconds} s"


def test_a_starter_of_which_nothing_is_heard_is_lost_once_somebody_waits():
    """What wakes may come from anybody, but without the starter from nobody."""
    transports = connected(3, patience=0.2)
    ours = agent(transports[0], [], starter=lambda _: 2)
    with pytest.raises(TimeoutError):
        ours.wait(0, 0.5)  # our own worker has not arrived: nobody waits
    ours.arrive()
    with pytest.raises(ProcessLost, match=silent(2, 0.2)):
        ours.wait(0, 20.0)
    close_all(transports)


def test_a_starter_that_has_left_is_not_waited_for():
    transports = connected(3, patience=60.0)
    ours = agent(transports[0], [], starter=lambda _: 2)
    ours.arrive()
    transports[2].close(linger=0.0)
    with pytest.raises(ProcessLost, match="rank 2 has closed its transport"):
        ours.wait(0, 20.0)
    close_all(transports)


def test_a_quorum_that_does_not_come_is_lost():
    """Who counts names who is missing; the others know only who counts."""
    transports = connected(4, patience=0.2)
    agents = [agent(transport, [], quorum=3) for transport in transports[:2]]
    agents[1].arrive()
    with pytest.raises(ProcessLost, match=silent(0, 0.2)):
        agents[1].wait(0, 20.0)
    agents[0].arrive()
    with pytest.raises(ProcessLost, match=r"rank 2, rank 3 have sent nothing"):
        agents[0].wait(0, 20.0)
    close_all(transports)


def test_the_last_round_may_be_waited_for_again():
    a, b = connected(2, patience=20.0)
    agents = [agent(transport, [], waits=lambda _: True) for transport in (a, b)]
    late = threading.Event()
    agents[0]._run = lambda number, last: late.wait(20.0)
    with pytest.raises(TimeoutError, match="round 0 has not ended"):
        agents[0].finish(0.05)
    late.set()
    assert agents[0].finish(20.0) == 0
    with pytest.raises(ConfigError, match="has ended"):
        agents[0].finish(20.0)
    close_all([a, b])


@pytest.mark.parametrize("quorum", [1, 2])
def test_all_end_together_after_the_same_number_of_rounds(quorum):
    """The slow one is in the last round with the others, and in none after it."""
    ended = threading.Barrier(3)

    def rank(transport):
        seen = []
        ours = agent(transport, seen, quorum=quorum)
        for number in range(5):
            ours.check_next(number)
            ours.arrive()
            ours.wait(number, 20.0)
        if transport.rank == 0:  # which counts a quorum
            with pytest.raises(TimeoutError):
                ours.wait(5, 0.1)
        assert ours.finish(20.0) == 5
        ended.wait(20.0)
        with pytest.raises(ConfigError, match="has ended"):
            ours.check_next(6)
        return seen

    want = [(number, number == 5) for number in range(6)]
    assert in_threads(rank, connected(3, patience=20.0)) == [want] * 3


def test_a_worker_arrives_in_order():
    a, b = connected(2, patience=20.0)
    ours = agent(a, [], starter=lambda _: 1)
    with pytest.raises(ConfigError, match="round 0 is next: got number=1"):
        ours.check_next(1)
    ours.arrive()
    with pytest.raises(ConfigError, match="round 0 must be waited for first"):
        ours.check_next(1)
    close_all([a, b])


def test_errors_reach_the_worker():
    (alone,) = connected(1)

    def fail(number, last):
        raise KeyError("strange")

    ours = RoundAgent(alone, fail, kind="x", frames=lambda _: ())
    ours.arrive()
    for call in (lambda: ours.wait(0, 20.0), lambda: ours.check_next(1)):
        with pytest.raises(KeyError, match="strange"):
            call()
    a, b = connected(2, patience=20.0)
    ours = agent(a, [], starter=lambda _: 1)
    b.abort()
    with pytest.raises(ProcessLost, match="rank 1"):
        ours.wait(0, 20.0)
    a.close(linger=0.0)
