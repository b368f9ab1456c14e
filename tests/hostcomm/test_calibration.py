"""Ping-pong and the line through it."""

import itertools

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import connected, fit_cost, ping_pong
from tests.hostcomm.threads import in_threads


def test_a_line_is_found():
    sizes = [1, 1000, 10**5, 10**7]
    cost = fit_cost(sizes, [3e-5 + 2e-9 * n for n in sizes])
    assert cost == pytest.approx((3e-5, 2e-9), rel=1e-9)
    assert cost.seconds(500.0) == pytest.approx(3.1e-5)


def test_all_sizes_count_alike():
    """A tenth more for the largest must not change alpha by much."""
    sizes = [1, 1000, 10**5, 10**7]
    times = [3e-5 + 2e-9 * n for n in sizes]
    times[-1] *= 1.1
    assert fit_cost(sizes, times).alpha == pytest.approx(3e-5, rel=0.02)


@pytest.mark.parametrize("size", [2, 3])
def test_half_of_there_and_back_in_all_ranks(size):
    ticks = itertools.count()  # only rank 0 looks at what it has read

    def rank(transport):
        clock = (lambda: next(ticks) * 4.0) if transport.rank == 0 else (lambda: 0.0)
        return ping_pong(transport, [0, 100], repetitions=3, warmup=1, clock=clock)

    got = in_threads(rank, connected(size, patience=20.0))
    np.testing.assert_array_equal(got, [[2.0, 2.0]] * size)


def test_messages_have_the_size():
    def rank(transport):
        ping_pong(transport, [10, 100], repetitions=2, warmup=1)
        return transport.counters().sent[1 - transport.rank]

    a, b = in_threads(rank, connected(2, patience=20.0))
    assert a.payload - b.payload == 2 * 8  # what all are told at last
    assert b.payload == 3 * 110


def test_wrong_arguments_are_refused():
    (alone,) = connected(1)
    with alone, pytest.raises(ConfigError, match="two ranks"):
        ping_pong(alone, [1])
    a, b = connected(2)
    for wrong in ([], [-1]):
        with pytest.raises(ConfigError, match="sizes must be >= 0"):
            ping_pong(a, wrong)
    a.abort()
    b.abort()
    with pytest.raises(ConfigError, match="two different sizes"):
        fit_cost([5, 5], [1.0, 1.0])
    with pytest.raises(ConfigError, match="times must be > 0"):
        fit_cost([5, 6], [0.0, 1.0])
