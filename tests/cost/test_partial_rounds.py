"""The event model against a plain one, known figures, and what a trace must hold."""

import heapq

import numpy as np
import pytest

from hpcjax.core.errors import ConfigError
from hpcjax.cost import round_seconds, simulate_rounds
from hpcjax.hostcomm import MessageCost, initiators, inject_delays

MODES = ("solo", "majority", "sync", 3)


def by_events(compute, mode, seconds, limiter, seed):
    """One run, event after event: arrivals and ends of rounds in a heap."""
    steps, ranks = compute.shape
    drawn = initiators(seed, ranks, steps)
    events = [(compute[0, rank], 0, rank) for rank in range(ranks)]
    heapq.heapify(events)
    at, running, waiting = [0] * ranks, False, set()
    here, start, end, number = {}, [], [], 0
    leave = np.zeros(compute.shape)

    def go_on(rank, now):
        leave[at[rank], rank] = now
        at[rank] += 1
        if at[rank] < steps:
            heapq.heappush(events, (now + compute[at[rank], rank], 0, rank))

    while events:
        now, ends, rank = heapq.heappop(events)
        if ends:
            end.append(now)
            running, number = False, number + 1
            for each in sorted(waiting):
                if at[each] < number:
                    waiting.discard(each)
                    go_on(each, now)
        else:
            here[at[rank], rank] = now
            if at[rank] < number:
                go_on(rank, now)
            else:
                waiting.add(rank)
        if running or number == steps:
            continue
        arrived = [rank for rank in range(ranks) if (number, rank) in here]
        if mode == "sync" or (limiter and number % (limiter + 1) == limiter):
            ready = len(arrived) == ranks
        elif mode == "majority":
            ready = drawn[number] in arrived
        else:
            ready = len(arrived) >= (1 if mode == "solo" else mode)
        if ready:
            running = True
            start.append(now)
            heapq.heappush(events, (now + seconds, 1, -1))
    return start, end, leave


@pytest.mark.parametrize("limiter", [0, 4])
@pytest.mark.parametrize("mode", MODES)
def test_it_does_what_a_plain_simulation_does(mode, limiter):
    rng = np.random.default_rng(0)
    compute = rng.exponential(0.1, (2, 40, 5))
    got = simulate_rounds(compute, mode=mode, seconds=0.03, limiter=limiter, seed=7)
    start, end, leave = by_events(compute[0], mode, 0.03, limiter, 7)
    np.testing.assert_allclose(got.start[0], start)
    np.testing.assert_allclose(got.end[0], end)
    np.testing.assert_allclose(got.leave[0], leave)
    np.testing.assert_allclose(got.total()[0], leave.max())


@pytest.mark.acceptance("eager-sgd", 5)
def test_a_majority_is_fresh_on_average():
    """Whoever is late: who is drawn does not depend on it. (P + 1) / 2."""
    delays = inject_delays("linear_skew", 2000, 8, delay=0.05)
    rng = np.random.default_rng(0)
    for compute in (delays, rng.exponential(1.0, (2000, 8))):
        times = simulate_rounds(compute, mode="majority", seconds=0.01, seed=3)
        assert abs(times.fresh().mean() - 4.5) < 0.2
        drawn = initiators(3, 8, 2000)
        assert (times.start >= times.arrive[np.arange(2000), drawn]).all()


def test_speed_with_one_late_process_is_as_foretold():
    """300 tables of delays: 3.4 and 2.2 times as fast in the median (specification)."""
    table = [
        inject_delays("random_one", 25, 8, delay=0.2, seed=seed) for seed in range(300)
    ]
    compute = 0.02 + np.array(table)
    for seconds in (0.005, 0.04):
        total = {
            mode: simulate_rounds(compute, mode=mode, seconds=seconds).total()
            for mode in ("sync", "majority", "solo")
        }
        for mode, least, median in (("solo", 2.4, 3.4), ("majority", 1.6, 2.2)):
            faster = total["sync"] / total[mode]
            assert np.quantile(faster, 0.01) >= least
            assert np.median(faster) == pytest.approx(median, rel=0.05)


@pytest.mark.parametrize("missed", ["apply_all", "newest"])
@pytest.mark.parametrize("mode", MODES)
def test_a_trace_holds_every_gradient_once_and_in_time(mode, missed):
    rng = np.random.default_rng(1)
    compute = rng.exponential(0.1, (60, 4))
    limiter = 5
    times = simulate_rounds(compute, mode=mode, seconds=0.02, limiter=limiter)
    trace = times.trace(missed)
    assert 0 <= trace.staleness().min() <= trace.staleness().max() <= limiter
    np.testing.assert_array_equal(trace.fresh(), times.fresh())
    first, end = trace.applied[..., 0], trace.applied[..., 1]
    assert (end[:-1] > np.arange(60)[:, None]).all()  # its own round, if nothing later
    assert (end[-1] == 60 + (trace.contributed == 60).any()).all()
    if missed == "apply_all":
        np.testing.assert_array_equal(first[1:], end[:-1])
    else:
        assert set(np.unique(end - first)) <= {0, 1}
    # What a worker has contributed was computed after all that it had applied.
    assert (trace.contributed[1:] >= end[:-2]).all()


def test_a_round_is_priced_by_its_messages():
    cost = MessageCost(alpha=1e-3, beta=1e-8)
    assert round_seconds(cost, 1000, 16) == pytest.approx(4 * (2e-3 + 4e-5))
    assert round_seconds(cost, 1000, 5) == pytest.approx(3 * (2e-3 + 4e-5))
    assert round_seconds(cost, 1000, 1) == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match=r"mode must be in 1\.\.2"):
        simulate_rounds(np.zeros((3, 2)), mode=3)
    with pytest.raises(ConfigError, match="compute must be"):
        simulate_rounds(np.zeros(3))
    with pytest.raises(ConfigError, match="of one run"):
        simulate_rounds(np.zeros((2, 3, 2))).trace()
