"""Times and volumes of averages of models, against figures known otherwise."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from hpcjax.core.errors import ConfigError
from hpcjax.cost import (
    averaging_cost,
    simulate_groups,
    simulate_neighbours,
    simulate_rounds,
)
from hpcjax.hostcomm import MessageCost, butterfly_groups, inject_delays


def draws(seeds, steps=40, ranks=8):
    delays = [
        inject_delays("random_one", steps, ranks, delay=0.2, seed=seed)
        for seed in range(seeds)
    ]
    return 0.02 + np.array(delays)


def test_waiting_for_nobody_pays_as_much_as_was_derived():
    """300 seeds, 8 processes, S = 4, tau = 10: 1st percentiles 2.3 and 1.6."""
    compute = draws(300)
    sync = simulate_neighbours("allreduce", compute)[..., -1, :].max(-1)
    avoiding, waiting = (
        simulate_groups(compute, group_size=4, wait_avoiding=each).total()
        for each in (True, False)
    )
    assert np.percentile(sync / avoiding, 1) == pytest.approx(2.3, abs=0.15)
    assert np.percentile(waiting / avoiding, 1) == pytest.approx(1.6, abs=0.15)


def by_hand(compute, group_size, tau, seconds, global_seconds):
    """Round by round and group by group, with the models that are taken."""
    steps, ranks = compute.shape
    left, ended = [0.0] * ranks, [0.0] * ranks
    arrivals, written = [[] for _ in range(ranks)], np.zeros((steps, ranks), int)
    for t in range(steps):
        here = [left[i] + compute[t, i] for i in range(ranks)]
        for i in range(ranks):
            arrivals[i].append(here[i])
        if (t + 1) % tau == 0:
            end = max(here) + global_seconds
            end = max(end, max(ended) + global_seconds)
            ended, left = [end] * ranks, [end] * ranks
            written[t] = t
            continue
        for group in butterfly_groups(ranks, group_size, t):
            begun = {i: max(min(here), ended[i]) for i in group}
            end = max(begun.values()) + seconds
            for i in group:
                written[t, i] = sum(time <= begun[i] for time in arrivals[i]) - 1
                ended[i], left[i] = end, max(here[i], end)
    return np.array(left), written


@pytest.mark.parametrize(("group_size", "tau"), [(2, 5), (4, 3), (8, 4)])
def test_rounds_are_followed_as_by_hand(group_size, tau):
    rng = np.random.default_rng(group_size)
    compute = rng.exponential(0.1, (40, 8))
    times = simulate_groups(
        compute, group_size=group_size, tau=tau, seconds=0.02, global_seconds=0.05
    )
    left, written = by_hand(compute, group_size, tau, 0.02, 0.05)
    np.testing.assert_allclose(times.leave[-1], left)
    trace = times.trace()
    np.testing.assert_array_equal(trace.written, written)
    assert 0 < trace.staleness().max() <= tau - 1
    many = simulate_groups(
        np.stack([compute, compute[::-1]]),
        group_size=group_size,
        tau=tau,
        seconds=0.02,
        global_seconds=0.05,
    )
    np.testing.assert_array_equal(many.leave[0], times.leave)
    with pytest.raises(ConfigError, match="of one run"):
        many.trace()


def test_rounds_of_all_are_those_of_synchronous_sums():
    compute = np.random.default_rng(0).exponential(0.1, (20, 8))
    want = simulate_rounds(compute, mode="sync", seconds=0.03).leave
    times = simulate_groups(compute, group_size=2, tau=1, global_seconds=0.03)
    np.testing.assert_allclose(times.leave, want)
    times = simulate_groups(
        compute, group_size=8, tau=None, seconds=0.03, wait_avoiding=False
    )
    np.testing.assert_allclose(times.leave, want)
    got = simulate_neighbours("allreduce", compute, seconds=0.03)
    np.testing.assert_allclose(got, want)
    assert not times.trace().late().any()


def test_without_groups_there_is_nothing_to_wait_for_but_the_period():
    compute = np.random.default_rng(0).exponential(0.1, (12, 4))
    times = simulate_groups(compute, group_size=1, tau=4, seconds=9.0)
    want = simulate_neighbours("local_sgd", compute, period=4)
    np.testing.assert_allclose(times.leave, want)
    alone = simulate_neighbours("adpsgd", compute)
    np.testing.assert_allclose(alone, np.cumsum(compute, 0))


def test_a_delay_spreads_as_far_as_the_messages_do():
    compute = np.zeros((2, 8))
    compute[0, 0] = 1.0
    ring = simulate_neighbours("dpsgd", compute)
    assert (ring[0] > 0).nonzero()[0].tolist() == [0, 1, 7]
    assert (ring[1] > 0).nonzero()[0].tolist() == [0, 1, 2, 6, 7]
    pushed = simulate_neighbours("sgp", compute)
    assert (pushed[0] > 0).nonzero()[0].tolist() == [0, 1, 2]


def test_volumes_are_those_of_the_table():
    n, ranks = 1000, 16
    words = {
        "allreduce": 2 * n * 15 / 16,
        "local_sgd": 2 * n * 15 / 16 / 5,
        "dpsgd": 2 * n,
        "adpsgd": n,
        "sgp": 2 * n,
        "wagma": 0.9 * n * 2 + n * 4 / 10,
    }
    for method, want in words.items():
        cost = averaging_cost(method, n, ranks, period=5, group_size=4, tau=10)
        assert cost.words == pytest.approx(want)
    more = averaging_cost("wagma", n, 1024, group_size=4, tau=None)
    assert (more.words, more.waits_for) == (2 * n, "first arriver")
    assert more.seconds(MessageCost(1.0, 0.5)) == 2 + 0.5 * 4 * 2 * n
    with pytest.raises((ConfigError, TypeCheckError), match="wagma"):
        averaging_cost("wagner", n, 8)
    with pytest.raises(ConfigError, match="tau must be an integer >= 1"):
        averaging_cost("wagma", n, 8, group_size=4, tau=0)
