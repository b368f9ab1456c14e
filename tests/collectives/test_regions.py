"""Regions: ascending, from 0 to n, and balanced where that can be."""

import numpy as np
import pytest

from hpcjax.collectives import Entries, HostGroup, OkTopkConfig, regions
from hpcjax.hostcomm import connected
from tests.collectives.exchanges import on_hosts, on_mesh
from tests.hostcomm.threads import in_threads

MEMBERS = (2, 4, 5, 8)


def cuts(how, indices, n):
    """Returns the regions that all ranks agree on, by each rank's sorted indices."""

    def rank(transport):
        own = np.asarray(indices[transport.rank], np.int32)
        found = Entries(own, np.ones(len(own), np.float32), np.int32(len(own)))
        return how(HostGroup(transport), found, n)

    made = in_threads(rank, connected(len(indices)))
    for each in made[1:]:
        np.testing.assert_array_equal(each, made[0])
    return made[0]


def received(starts, indices):
    """Returns how many entries each region gets."""
    everything = np.concatenate(indices)
    return np.histogram(everything, bins=np.asarray(starts))[0]


@pytest.mark.acceptance("oktopk", 4)
@pytest.mark.parametrize("members", MEMBERS)
@pytest.mark.parametrize("how", [regions.mean_cuts, regions.pooled_cuts])
@pytest.mark.parametrize("seed", range(3))
def test_regions_ascend_and_cover_the_vector(members, how, seed):
    draws, n = np.random.default_rng(seed), 1000
    indices = [
        np.sort(draws.choice(n, draws.integers(0, 60), replace=False))
        for _ in range(members)
    ]
    starts = cuts(how, indices, n)
    assert starts.dtype == np.int32
    assert (starts[0], starts[-1]) == (0, n)
    assert len(starts) == members + 1
    assert (np.diff(starts) >= 0).all()


@pytest.mark.acceptance("oktopk", 4)
@pytest.mark.parametrize("members", [4, 8])
def test_one_repartition_balances_entries_at_one_place(members):
    n, k = 100_000, 600
    draws = np.random.default_rng(1)
    last = np.arange(n - n // 100, n)
    indices = [np.sort(draws.choice(last, k, replace=False)) for _ in range(members)]
    even = received(np.linspace(0, n, members + 1), indices)
    assert even.max() / even.mean() >= members / 1.01
    got = received(cuts(regions.mean_cuts, indices, n), indices)
    assert got.max() <= 1.25 * got.mean()


@pytest.mark.acceptance("oktopk", 4)
@pytest.mark.parametrize("members", [4, 8])
def test_pooled_cuts_balance_entries_at_two_places(members):
    n, k = 100_000, 600
    draws = np.random.default_rng(2)
    places = np.arange(n // 100), np.arange(n - n // 100, n)
    indices = [
        np.sort(draws.choice(places[rank >= members // 2], k, replace=False))
        for rank in range(members)
    ]
    mean = received(cuts(regions.mean_cuts, indices, n), indices)
    assert mean.max() >= members / 2.1 * mean.mean()
    got = received(cuts(regions.pooled_cuts, indices, n), indices)
    assert got.max() <= 1.25 * got.mean()


def test_pooled_cuts_are_the_quantiles_of_all():
    indices = [[0, 1, 2, 3], [10, 11, 12, 13], [90, 91, 92, 93]]
    assert cuts(regions.pooled_cuts, indices, 100).tolist() == [0, 4, 14, 100]


def test_who_has_nothing_proposes_even_cuts():
    assert cuts(regions.mean_cuts, [[], []], 100).tolist() == [0, 50, 100]
    # (50 + 11) // 2: entry 2 of 4 is at 11.
    assert cuts(regions.mean_cuts, [[], [9, 10, 11, 12]], 100).tolist() == [0, 30, 100]


def test_sums_of_cuts_beyond_int32_are_right():
    n = 2**31 - 10
    place = n - 5
    indices = [[place - 1, place, place + 1, place + 2]] * 3
    assert cuts(regions.mean_cuts, indices, n).tolist() == [0, place, place + 1, n]


@pytest.mark.quick("pooled-on_hosts", "mean-on_hosts")
@pytest.mark.parametrize("backend", [on_mesh, on_hosts])
@pytest.mark.parametrize("repartition", ["mean", "pooled"])
def test_an_exchange_uses_its_regions(backend, repartition):
    """Large entries in one hundredth: in the second step nobody gets far more."""
    n, members, k = 4000, 4, 80
    draws = np.random.default_rng(3)
    given = draws.normal(size=(2, members, n)).astype(np.float32)
    given[..., -n // 50 :] *= 1000
    even = OkTopkConfig(density=k / n, repartition="even", capacity_factor=16.0)
    own = OkTopkConfig(density=k / n, repartition=repartition, capacity_factor=16.0)
    worst = [
        backend(config, given)[-1].stats.received_words.max() for config in (even, own)
    ]
    assert worst[1] <= worst[0] / 1.5
