"""Shaped links, by a clock of our own: bytes / rate, whoever gets them."""

import threading
import time

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import Clock, Link, Tag, connected
from hpcjax.hostcomm.link import PIECE, Egress
from tests.hostcomm.threads import close_all

RATE, MEGABYTE = 2e6, 10**6


class Virtual(Clock):
    """Passes when somebody sleeps, and no more; wakes everybody `late`."""

    def __init__(self, late=0.0):
        self.now, self.late, self.slept = 0.0, late, []
        self._lock = threading.Lock()

    def time(self):
        with self._lock:
            return self.now

    def sleep_until(self, moment):
        with self._lock:
            self.slept.append(moment)
            self.now = max(self.now, moment + self.late)


def shaped(clock, size=5):
    return connected(size, link=Link(rate=RATE), clock=clock)


@pytest.mark.parametrize("peers", [1, 4])
@pytest.mark.parametrize("late", [0.0, 0.01])
@pytest.mark.parametrize("post", ["send", "isend"])
def test_a_megabyte_takes_its_time(peers, late, post):
    """All of a process's peers share its rate; who is woken late catches up."""
    clock = Virtual(late)
    transports = shaped(clock)
    ours = transports[0]
    array = np.zeros(MEGABYTE, np.uint8)
    requests = [
        getattr(ours, post)(peer, Tag("x"), array) for peer in range(1, peers + 1)
    ]
    for peer in range(1, peers + 1):
        assert transports[peer].receive(0, Tag("x")).nbytes == MEGABYTE
    for request in requests:
        if request is not None:
            request.wait()
    wire = ours.counters().total_sent().wire
    assert peers * MEGABYTE < wire < peers * MEGABYTE * 1.001
    slack = late * peers  # a message may begin when the one before is seen to have left
    assert wire / RATE <= clock.now * (1 + 1e-9)
    assert clock.now <= wire / RATE + slack + 1e-6
    assert clock.now <= 1.05 * peers * MEGABYTE / RATE
    close_all(transports)


def test_pieces_are_small_and_in_turns():
    """Two messages at once: each gets half of the rate, in pieces of 64 KiB."""
    clock = Virtual()
    egress = Egress(RATE, clock)
    first, second = egress.begin(), egress.begin()
    for turn in range(1, 4):
        first = egress.let_out(PIECE, first)
        second = egress.let_out(PIECE, second)
        assert first == pytest.approx((2 * turn - 1) * PIECE / RATE)
        assert second == pytest.approx(2 * turn * PIECE / RATE)


def test_large_arrays_are_cut():
    clock = Virtual()
    a, b = transports = shaped(clock, 2)
    a.send(1, Tag("x"), np.zeros(10 * PIECE, np.uint8))
    assert len(clock.slept) == 11  # the header, then ten
    gaps = np.diff([0.0, *clock.slept])
    assert gaps.max() == pytest.approx(PIECE / RATE)
    assert b.receive(0, Tag("x")).nbytes == 10 * PIECE
    close_all(transports)


def test_an_idle_link_saves_nothing():
    clock = Virtual()
    egress = Egress(RATE, clock)
    clock.now = 100.0
    assert egress.let_out(PIECE, egress.begin()) == pytest.approx(100 + PIECE / RATE)


def test_lateness_is_made_up_for_by_a_burst_at_most():
    clock = Virtual()
    egress = Egress(RATE, clock)
    ready = egress.let_out(PIECE, egress.begin())
    clock.now = 100.0  # the sender was asleep
    assert egress.let_out(PIECE, ready) == pytest.approx(100.0)
    assert egress.let_out(PIECE, 100.0) == pytest.approx(100 + PIECE / RATE)


def test_it_is_never_faster_than_its_rate():
    """By the machine's own clock: a bound that no load can break."""
    transports = connected(3, link=Link(rate=10e6))
    begin = time.monotonic()
    requests = [
        transports[0].isend(peer, Tag("x"), np.zeros(MEGABYTE, np.uint8))
        for peer in (1, 2)
    ]
    for peer in (1, 2):
        transports[peer].receive(0, Tag("x"))
    assert time.monotonic() - begin >= 2 * MEGABYTE / 10e6
    for request in requests:
        request.wait()
    close_all(transports)


def test_wrong_links_are_refused():
    for wrong in ({"rate": 0.0}, {"rate": -1.0}, {"rate": float("nan")}):
        with pytest.raises(ConfigError, match="rate must be > 0"):
            Link(**wrong)
    for wrong in (-1.0, float("inf")):
        with pytest.raises(ConfigError, match="latency must be finite and >= 0"):
            Link(latency=wrong)
