"""One rank of four is asleep for most of each step: the others do not wait for it."""

import threading

import numpy as np
import pytest

from hpcjax.hostcomm import GroupAllreduce, PartialAllreduce, connected
from tests.hostcomm.threads import in_threads

RANKS, SLEEPER = 4, 2
STEPS, LONG = 60, 20  # of the others; how many of theirs one of the sleeper's lasts


class Pace:
    """Counts steps, and holds the sleeper until the others have made theirs."""

    def __init__(self):
        self.done = [0] * RANKS
        self._changed = threading.Condition()

    def sleep(self, step):
        """Returns once all others have made what they do in the sleeper's step."""
        until = min((step + 1) * LONG, STEPS)
        others = [rank for rank in range(RANKS) if rank != SLEEPER]
        with self._changed:
            awake = self._changed.wait_for(
                lambda: all(self.done[rank] >= until for rank in others), 20.0
            )
        assert awake, f"the others have waited: {self.done}"

    def end_step(self, rank):
        """Counts one of the steps of a rank; returns how many the sleeper has made."""
        with self._changed:
            self.done[rank] += 1
            self._changed.notify_all()
            return self.done[SLEEPER]


def eager(transport):
    return PartialAllreduce(transport, 3, mode="solo", limiter=0)


def wagma(transport):
    groups = GroupAllreduce(transport, 3, 2, None)
    groups.start(np.zeros(3))
    return groups


@pytest.mark.faults(15)
@pytest.mark.parametrize("make", [eager, wagma])
def test_the_others_lose_no_step_to_one_that_sleeps_in_each_of_its_own(make):
    """A sleep of 5 s where a step takes a quarter of one, without a clock.

    The sleeper goes on only when the others have made 20 steps: would they wait for it
    even once in between, nobody could go on. Rounds of all (limiter, tau) wait by
    definition, and so there are none here.
    """
    pace = Pace()

    def rank(transport):
        averaging, seen = make(transport), 0
        for step in range(STEPS):
            if transport.rank == SLEEPER:
                pace.sleep(step)
            averaging.post(step, np.ones(3))
            averaging.result(step, 20.0)
            seen = pace.end_step(transport.rank)
        averaging.finish(20.0)
        return seen

    made = in_threads(rank, connected(RANKS, patience=20.0))
    assert made.pop(SLEEPER) == STEPS
    # When they had made all of theirs, the sleeper had made no more than two.
    assert max(made) <= STEPS // LONG - 1
