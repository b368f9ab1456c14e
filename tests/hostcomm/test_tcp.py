"""The transport over sockets: the contract, and what becomes of the dead and silent."""

import math
import socket
import threading
import time

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError, HpcjaxError, ProcessLost
from hpcjax.hostcomm import Tag, TcpTransport, Traffic, barrier, connected
from hpcjax.hostcomm.channels import Channel, Message
from hpcjax.hostcomm.link import Link
from hpcjax.hostcomm.mailbox import Arrived, Mailbox
from tests.hostcomm import contract
from tests.hostcomm.threads import close_all, in_threads


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("program", contract.PROGRAMS)
def test_contract(program, size):
    in_threads(program, connected(size, patience=20.0))


def test_one_rank_needs_no_other():
    (alone,) = connected(1)
    with alone:
        contract.what_is_sent_to_oneself_is_a_copy(alone)
        contract.collectives_agree(alone)


@pytest.fixture
def trio():
    transports = connected(3, patience=20.0)
    yield transports
    close_all(transports)


def in_thread(call):
    """Starts a call that raises; returns how to get what it has raised."""
    caught = []

    def run():
        try:
            call()
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(20)
        assert caught, "it has raised nothing"
        return caught[0]

    return result


def test_an_end_without_goodbye_is_an_end_for_all(trio):
    a, b, c = trio
    tag = Tag("bread")
    pending = a.irecv(2, tag)
    waiting = [
        in_thread(lambda: a.receive(1, tag)),
        in_thread(lambda: a.receive(2, tag)),  # another rank's
        in_thread(lambda: a.receive_any(tag)),
        in_thread(lambda: a.wait_any([a.irecv(2, tag)])),
        in_thread(lambda: barrier(c)),
    ]
    b.abort()
    for result in waiting:
        error = result()
        assert isinstance(error, ProcessLost)
        assert str(error) == "rank 1 has ended"
    assert pending.test()
    for later in (
        lambda: a.send(2, tag, np.zeros(1)),
        lambda: a.isend(2, tag, np.zeros(1)),
        lambda: a.receive(2, tag),
        a.receive_any,
        pending.wait,
    ):
        with pytest.raises(ProcessLost, match="rank 1 has ended"):
            later()
    with pytest.raises(HpcjaxError, match="this transport is closed"):
        b.receive(0, tag)


def test_who_is_lost_is_told_on(trio):
    """Rank 2 learns whom rank 0 has lost, not only that rank 0 has ended."""
    a, _, c = trio
    waiting = in_thread(lambda: c.receive(1, Tag("bread")))
    a.abort(ProcessLost("rank 1 has sent nothing for 5 s"))
    assert str(waiting()) == "rank 1 has sent nothing for 5 s"


def test_an_error_in_the_block_aborts(trio):
    a, b, _ = trio
    waiting = in_thread(lambda: a.receive(1, Tag("bread")))

    def fail():
        with b:
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert str(waiting()) == "rank 1 has ended"


def test_an_end_in_the_middle_of_a_message_is_an_end(trio):
    """What was being sent must not be mixed with the reason."""
    a, b, c = trio
    with b._outboxes[0]._writing:
        b._channels[0]._connection.send((10**6).to_bytes(8, "big"))
        waiting = in_thread(lambda: a.receive(1, Tag("bread")))
        b.abort(ProcessLost("a reason"))
    assert str(waiting()) == "rank 1 has ended"
    with pytest.raises(ProcessLost, match="a reason"):
        c.receive(1, Tag("bread"))


def test_who_has_said_goodbye_is_missed_only_by_who_waits_for_it(trio):
    a, b, c = trio
    b.send(0, Tag("last"), np.array(5))
    waiting = in_thread(lambda: a.receive(1, Tag("more")))
    b.close(linger=0.0)
    assert str(waiting()) == "rank 1 has closed its transport"
    arrived = a.receive_any()
    assert (arrived.source, arrived.tag, int(arrived.array)) == (1, Tag("last"), 5)
    with pytest.raises(ProcessLost, match="rank 1 has closed its transport"):
        a.send(1, Tag("more"), np.zeros(1))
    never = a.irecv(1, Tag("more"))
    assert never.test()
    c.send(0, Tag("alive"), np.array(6))
    alive = a.irecv(2, Tag("alive"))
    assert a.wait_any([never, alive]) == 1
    assert alive.wait() == 6


def test_what_was_posted_is_sent_before_the_goodbye(trio):
    a, b, _ = trio
    for number in range(3):
        a.isend(1, Tag("data"), np.full(300_000, number))
    a.close(linger=0.0)
    assert [b.receive(0, Tag("data"))[0] for _ in range(3)] == [0, 1, 2]


def test_the_silent_are_named_and_lost():
    transports = connected(3, patience=0.2)
    a = transports[0]
    with pytest.raises(ProcessLost, match=r"rank 1 has sent nothing for 0.2 s"):
        a.receive(1, Tag("bread"))
    with pytest.raises(ProcessLost, match="rank 1 has sent nothing"):
        a.send(2, Tag("bread"), np.zeros(1))
    close_all(transports)


def test_who_waits_for_a_silent_rank_is_not_taken_for_it():
    """Rank 0 waits for 1, that then waits for 2: both learn that it is rank 2."""
    transports = connected(3, patience=1.0)
    a, b, _ = transports
    before = b.counters()
    first = in_thread(lambda: a.receive(1, Tag("x")))
    time.sleep(0.1)

    def wait():
        with b:
            b.receive(2, Tag("x"))

    second = in_thread(wait)
    assert str(second()) == str(first()) == "rank 2 has sent nothing for 1 s"
    assert b.counters() == before
    close_all(transports)


def test_all_that_are_waited_for_must_be_silent():
    transports = connected(3, patience=0.2)
    a = transports[0]
    with pytest.raises(ProcessLost, match=r"rank 1, rank 2 have sent nothing"):
        a.wait_any([a.irecv(2, Tag("x")), a.irecv(1, Tag("x"))])
    close_all(transports)


def test_nobody_in_particular_may_be_silent_for_long():
    transports = connected(2, patience=0.05)
    with pytest.raises(TimeoutError):
        transports[0].receive_any(timeout=0.2)
    with pytest.raises(TimeoutError):
        transports[0].receive(0, Tag("mine"), timeout=0.2)
    close_all(transports)


def test_who_sends_something_is_not_silent():
    """A large array may take longer than the patience."""
    mailbox = Mailbox(patience=0.05, latency=0.0, heard=lambda _: time.monotonic())
    with pytest.raises(TimeoutError):
        mailbox.ask(1, ()).wait(0.2)


def test_a_part_of_a_message_is_heard():
    ours, theirs = socket.socketpair()
    transport = TcpTransport(0, {1: ours}, patience=5.0)
    begin = transport._heard(1)
    theirs.send(b"\0")
    end = time.monotonic() + 10
    while transport._heard(1) == begin and time.monotonic() < end:
        time.sleep(0.01)
    assert transport._heard(1) > begin
    transport.abort()
    theirs.close()


def test_who_takes_nothing_in_is_lost():
    ours, theirs = socket.socketpair()
    transport = TcpTransport(0, {1: ours}, patience=0.2)
    with pytest.raises(ProcessLost, match=r"rank 1 has taken nothing for 0.2 s"):
        transport.send(1, Tag("large"), np.ones(10**6))
    with pytest.raises(ProcessLost, match="rank 1 has taken nothing"):
        transport.receive(1, Tag("small"))
    transport.abort()
    theirs.close()


def test_the_error_of_a_posted_send_is_raised_by_who_waits():
    ours, theirs = socket.socketpair()
    transport = TcpTransport(0, {1: ours}, patience=0.2)
    with pytest.raises(ValueError, match=r"objects.*'bad'"):  # at once
        transport.isend(1, Tag("bad"), np.array([{}]))
    lost = transport.isend(1, Tag("large"), np.ones(10**6))
    with pytest.raises(ProcessLost, match="rank 1 has taken nothing"):
        lost.wait(10.0)
    transport.abort()
    theirs.close()


def test_other_words_are_no_message():
    ours, theirs = socket.socketpair()
    transport = TcpTransport(0, {1: ours}, patience=5.0)
    other = Channel(theirs, "rank 0")
    other.send(Message("something"))
    with pytest.raises(ProcessLost, match="rank 1 has sent what is no message"):
        transport.receive(1, Tag("x"))
    transport.abort()
    other.close()


def test_every_rank_needs_a_socket():
    ours, theirs = socket.socketpair()
    with pytest.raises(ConfigError, match="a socket per other rank"):
        TcpTransport(0, {2: ours})
    ours.close()
    theirs.close()


def test_small_messages_leave_at_once():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    a, b = TcpTransport(0, {1: ours}), TcpTransport(1, {0: theirs})
    assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    in_threads(contract.requests_are_done_later, [a, b])


@pytest.mark.parametrize("linger", [0.0, 5.0])
def test_nothing_is_left_open(linger):
    """Who does not wait for the others leaves it to the threads."""
    transports = connected(3, patience=math.inf)
    sockets = [
        channel._connection for t in transports for channel in t._channels.values()
    ]
    threads = [channel._thread for t in transports for channel in t._channels.values()]
    ends = [threading.Thread(target=each.close, args=(linger,)) for each in transports]
    for thread in ends:
        thread.start()
        if not linger:
            thread.join(10)
    for thread in ends:
        thread.join(10)
    for thread in threads:
        thread.join(10)
    assert [each.fileno() for each in sockets] == [-1] * 6
    assert transports[0].counters().sent[0] == Traffic()


def test_an_abort_leaves_no_thread():
    """Not that of what was posted, nor one in the middle of it."""
    ours, theirs = socket.socketpair()
    transport = TcpTransport(0, {1: ours}, patience=20.0)
    posted = [transport.isend(1, Tag("x"), np.zeros(10**6)) for _ in range(2)]
    transport.abort()
    theirs.close()
    for thread in (transport._outboxes[1]._thread, transport._channels[1]._thread):
        thread.join(10)
        assert not thread.is_alive()
    for request in posted:
        with pytest.raises(HpcjaxError):
            request.wait()


def test_latency_delays_who_receives_and_not_who_sends():
    transports = connected(2, link=Link(latency=3600.0))
    a, b = transports
    for number in range(3):  # an hour each, if anybody waited
        a.send(1, Tag("x"), np.array(number))
    a.send(0, Tag("mine"), np.array(7))
    assert a.receive(0, Tag("mine")) == 7  # no link between
    with pytest.raises(TimeoutError):
        b.receive(0, Tag("x"), timeout=0.2)
    assert b.counters().received[0].messages == 3  # but they are there
    close_all(transports)


def test_what_is_given_back_goes_to_who_also_waits():
    """It had come for a call that has timed out before it was delivered."""
    mailbox = Mailbox(patience=60.0, latency=0.05, heard=lambda _: math.inf)
    first = mailbox.ask(None, ())
    mailbox.deliver(Arrived(1, Tag("x"), np.array(5)))
    second, third = mailbox.ask(1, (Tag("x"),)), mailbox.ask(1, ("x",))
    mailbox.withdraw(first)
    assert second.wait(10.0) == 5
    mailbox.withdraw(third)
    mailbox.deliver(Arrived(1, Tag("x"), np.array(6)))
    assert mailbox.ask(1, ("x",)).wait(10.0) == 6


def test_latency_is_never_shorter_than_it_says():
    transports = connected(2, link=Link(latency=0.1))
    a, b = transports
    begin = time.monotonic()
    for number in range(5):
        a.send(1, Tag("x"), np.array(number))
    got = b.irecv(0, Tag("x"))
    assert not got.test()
    assert [int(got.wait()), *(int(b.receive(0, Tag("x"))) for _ in range(4))] == [
        *range(5)
    ]
    assert time.monotonic() - begin >= 0.1
    close_all(transports)
