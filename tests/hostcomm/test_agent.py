"""The agent: strictly in order, and nobody misses an error."""

import threading
import time

import numpy as np
import pytest

from hpcjax.core.errors import HpcjaxError
from hpcjax.hostcomm import Agent, Tag, allreduce, connected
from tests.hostcomm.threads import in_threads


def test_work_is_done_in_order():
    seen = []
    with Agent() as agent:
        work = [agent.submit(seen.append, number) for number in range(100)]
        assert work[-1].result() is None
    assert seen == list(range(100))
    assert all(each.done() for each in work)


def test_the_owner_goes_on():
    go = threading.Event()
    agent = Agent()
    first, second = agent.submit(go.wait, 20), agent.submit(pow, 2, exp=3)
    assert not first.done()
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        second.result(0.01)
    go.set()
    assert second.result() == 8
    agent.close()


def test_an_error_is_raised_by_all_who_wait_and_ends_the_work():
    seen = []
    agent = Agent()
    go = threading.Event()
    agent.submit(go.wait, 20)
    bad = agent.submit(int, "three")
    after = agent.submit(seen.append, 1)
    go.set()
    for each in (after, bad, bad):
        with pytest.raises(ValueError, match="three"):
            each.result()
    with pytest.raises(ValueError, match="three"):
        agent.submit(seen.append, 2)
    agent.close()  # it was told
    assert seen == []


def test_an_error_nobody_has_seen_is_raised_at_the_end():
    with pytest.raises(ValueError, match="three"), Agent() as agent:
        agent.submit(int, "three")


def test_after_an_error_of_the_owner_the_rest_is_left():
    seen, go, begun = [], threading.Event(), threading.Event()

    def hold():
        begun.set()
        go.wait(20)

    def own():
        with Agent() as agent:
            agent.submit(hold)
            begun.wait(20)
            made.extend([agent.submit(seen.append, 1), agent])
            raise KeyError

    made = []
    with pytest.raises(KeyError):
        own()
    rest, agent = made
    with pytest.raises(HpcjaxError, match="aborted"):
        rest.result()
    go.set()
    agent._thread.join(20)
    assert seen == []


def test_a_closed_agent_takes_nothing():
    agent = Agent()
    agent.close()
    agent.close()
    with pytest.raises(HpcjaxError, match="this agent is closed"):
        agent.submit(int)


def test_buckets_are_reduced_while_the_owner_computes():
    def rank(transport):
        with Agent() as agent:
            buckets = []
            for number in range(4):
                time.sleep(0.001 * transport.rank)
                bucket = np.full(5, float(number))
                tag = Tag("bucket", number)
                buckets.append(agent.submit(allreduce, transport, bucket, tag=tag))
            return [each.result()[0] for each in buckets]

    got = in_threads(rank, connected(3, patience=20.0))
    assert got == [[0.0, 3.0, 6.0, 9.0]] * 3
