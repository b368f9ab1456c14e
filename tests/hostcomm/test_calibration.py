"""Ping-pong and the line through it."""

import itertools

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import MessageCost, connected, fit_cost, ping_pong
from tests.hostcomm.threads import in_threads


def test_a_line_is_found():
    sizes = [1, 1000, 10**5, 10**7]
    cost = fit_cost(sizes, [3e-5 + 2e-9 * n for n in sizes])
    assert (cost.alpha, cost.beta) == pytest.approx((3e-5, 2e-9), rel=1e-9)
    assert cost.bytes_per_s == pytest.approx(5e8)
    assert cost.seconds(500.0) == pytest.approx(3.1e-5)
    assert cost.seconds(500.0, messages=3) == pytest.approx(9.1e-5)


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


def test_messages_tell_alpha_from_beta_too():
    """Collectives of 3 and 6 messages, exact; then such as cannot have been."""
    sizes, messages = [4.0, 4096.0, 2.0**20, 2.0**20], [3.0, 6.0, 3.0, 6.0]
    took = [3e-4 * m + 5e-9 * n for n, m in zip(sizes, messages, strict=True)]
    found = fit_cost(sizes, took, messages)
    assert (found.alpha, found.beta) == pytest.approx((3e-4, 5e-9))
    # A line would begin below zero, or fall.
    assert fit_cost([1000, 2000], [1.0, 4.0]).alpha == 0
    assert fit_cost([1000, 2000], [2.0, 1.0]).beta == 0


def test_what_does_not_tell_two_numbers_is_refused():
    for sizes, messages in (
        ([], None),
        ([5], None),
        ([5, 5], None),
        ([0, 0], None),
        ([5, 10], [1.0, 2.0]),
    ):
        with pytest.raises(ConfigError, match="tell alpha from beta"):
            fit_cost(sizes, [1.0] * len(sizes), messages)
    with pytest.raises(ConfigError, match="alike in number"):
        fit_cost([5, 6], [1.0])
    for took in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ConfigError, match="seconds must be finite and > 0"):
            fit_cost([5, 6], [took, 1.0])


def test_costs_are_not_negative():
    assert MessageCost.of_rate(np.inf).seconds(1e12) == 0
    assert MessageCost.of_rate(np.inf).bytes_per_s == np.inf
    for rate in (0.0, -1.0, np.nan):
        with pytest.raises(ConfigError, match="bytes_per_s must be > 0"):
            MessageCost.of_rate(rate)
    with pytest.raises(ConfigError, match="alpha must be finite and >= 0"):
        MessageCost(-1.0, 0.0)
