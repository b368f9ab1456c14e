"""Neighbours' averages keep the sum, and lead to agreement."""

import time

import numpy as np
import pytest

from hpcjax.hostcomm import (
    PairAverages,
    PushSum,
    Tag,
    connected,
    exponential_offsets,
    neighbour_mean,
)
from tests.hostcomm.threads import in_threads


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_ring_takes_the_mean_of_three(ranks):
    def rank(transport):
        mine = np.full(2, float(transport.rank), np.float32)
        return neighbour_mean(transport, mine, Tag("ring"))

    got = in_threads(rank, connected(ranks, patience=20.0))
    for own, mean in enumerate(got):
        near = {(own - 1) % ranks, own, (own + 1) % ranks}
        np.testing.assert_allclose(mean, np.mean(list(near)), rtol=1e-6)


def test_who_has_the_mean_may_change_what_it_gave():
    """Though it may not have been sent to everybody yet."""
    sent = []

    def rank(transport):
        begin = transport.isend

        def isend(to, tag, array):
            sent.append(array)
            return begin(to, tag, array)

        transport.isend = isend
        mine = np.ones(2, np.float32)
        neighbour_mean(transport, mine, Tag("ring"))
        assert not any(np.shares_memory(mine, array) for array in sent)

    in_threads(rank, connected(2, patience=20.0))
    assert len(sent) == 2


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_offsets_differ_and_go_through_all_powers(ranks):
    seen = set()
    for step in range(8):
        offsets = exponential_offsets(ranks, step)
        assert len(set(offsets)) == len(offsets) == min(2, (ranks - 1).bit_length())
        seen |= set(offsets)
    assert seen == {1 << j for j in range((ranks - 1).bit_length())}


@pytest.mark.acceptance("wagma", 10)
@pytest.mark.parametrize(("ranks", "overlap"), [(1, 0), (4, 0), (8, 2), (5, 3)])
def test_no_weight_is_lost_though_messages_are_late(ranks, overlap):
    """Rank 0 is late in every step; each step's sum has those on their way in it."""
    steps = 60

    def rank(transport):
        push = PushSum(transport, overlap=overlap)
        values = np.array([transport.rank, 1.0], np.float32)
        weight, seen = 1.0, []
        for step in range(steps):
            time.sleep(0.002 * (transport.rank == 0))
            values, weight = push.push(step, values, weight)
            seen.append((weight, push.sent, push.received))
        values, weight = push.finish(values, weight)
        return np.array(seen), values / np.float32(weight), weight

    found = in_threads(rank, connected(ranks, patience=20.0))
    weights, sent, received = np.sum([seen for seen, *_ in found], axis=0).T
    np.testing.assert_allclose(weights + sent - received, ranks, atol=1e-6)
    assert sum(weight for *_, weight in found) == pytest.approx(ranks, abs=1e-6)
    if overlap:
        assert max(abs(own[:, 0] - 1).max() for own, *_ in found) > 0.1
    for _, mean, _ in found:
        np.testing.assert_allclose(mean, [(ranks - 1) / 2, 1], rtol=1e-4)


@pytest.mark.parametrize("change", [0.0, 0.5])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_pairs_keep_the_sum_and_what_was_added_meanwhile(ranks, change):
    steps = 40

    def rank(transport):
        start = np.full(3, float(transport.rank))
        pairs = PairAverages(transport, start)
        rng = np.random.default_rng(transport.rank)
        for _ in range(steps):
            time.sleep(float(rng.exponential(0.001)))
            pairs.add(np.full(3, change))
        while transport.rank % 2 == 0 and ranks > 1 and pairs._asked < 3:
            pairs.add(np.zeros(3))
        return pairs.finish()

    found = in_threads(rank, connected(ranks, patience=20.0))
    want = sum(range(ranks)) + change * steps * ranks
    np.testing.assert_allclose(sum(found), want)
    if ranks > 1 and not change:  # they have come nearer to each other
        assert np.var([model[0] for model in found]) < 0.9 * np.var(range(ranks))
