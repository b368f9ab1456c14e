"""Orders of partitions against brute force and closed forms."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from hpcjax import graphs
from hpcjax.core.errors import ConfigError

SIZES = [(p, c) for p in range(2, 25) for c in range(2, p + 1)]


def rng(seed=0):
    return np.random.Generator(np.random.Philox(seed))


def beta_swaps(left, capacity):
    if not left:
        return 0
    done = min(capacity - 1, left)
    return left + done + beta_swaps(left - done, capacity)


def check_order(order, partitions, capacity, group=1):
    states = [set(state.tolist()) for state in order.states]
    assert all(len(state) == capacity for state in states)
    assert order.buckets.shape == (partitions, partitions)
    for (i, j), state in np.ndenumerate(order.buckets):
        assert {i, j} <= states[state]
    for one, other in itertools.pairwise(states):
        assert len(other - one) == group


def check_all(p, c):
    order = graphs.beta(p, c, rng(p * 100 + c))
    check_order(order, p, c)
    swaps = graphs.count_swaps(order.states)
    assert swaps == beta_swaps(p - c, c) == len(order.states) - 1
    assert swaps >= graphs.fewest_swaps(p, c)
    if c == 2:
        assert swaps == graphs.fewest_swaps(p, c) == math.comb(p, 2) - 1
    for state in range(len(order.states)):  # greedy: the first that holds both
        held = np.isin(np.arange(p), order.states[state])
        assert (order.buckets[np.ix_(held, held)] <= state).all()
    group = max(g for g in range(1, p) if p % g == c % g == 0 and c >= 2 * g)
    fine = graphs.comet(p, c, group, rng(p * 100 + c))
    check_order(fine, p, c, group)
    coarse = beta_swaps((p - c) // group, c // group)
    assert graphs.count_swaps(fine.states) == coarse * group


@pytest.mark.acceptance("marius", 4)
def test_every_order_trains_each_bucket_once_while_both_sides_are_resident():
    for p, c in SIZES:
        if p <= 12:
            check_all(p, c)


@pytest.mark.slow
@pytest.mark.acceptance("marius", 4)
def test_the_same_of_up_to_24_partitions():
    for p, c in SIZES:
        if p > 12:
            check_all(p, c)


@pytest.mark.acceptance("marius", 4)
def test_all_partitions_are_one_state_and_sequential_has_the_training_ones():
    whole = graphs.beta(1, 1, rng())
    assert whole.states.tolist() == whole.buckets.tolist() == [[0]]
    orders = [graphs.sequential(9, 5, 2, rng(seed)) for seed in range(50)]
    assert {tuple(order.states[0, :2]) for order in orders} == {(0, 1)}
    assert {*np.concatenate([order.states[0] for order in orders])} == set(range(9))
    for order in orders:
        held = np.isin(np.arange(9), order.states[0])
        np.testing.assert_array_equal(order.buckets == 0, np.outer(held, held))
    assert (orders[0].buckets[~held] == -1).any()


@pytest.mark.acceptance("marius", 5)
def test_comet_draws_among_all_states_that_hold_both_sides_uniformly():
    order = graphs.comet(16, 6, 2, rng(1))  # 8 groups, 3 of them resident
    draws = [graphs.assign_buckets(order.states, 16, rng(s)) for s in range(2000)]
    drawn = np.stack([each.buckets for each in draws])
    square, freedom, multiples = 0.0, 0, set()
    for i, j in np.ndindex(16, 16):
        candidates = [
            number for number, held in enumerate(order.states) if {i, j} <= set(held)
        ]
        multiples.add(len(candidates))
        counts = np.bincount(drawn[:, i, j], minlength=len(order.states))
        assert counts[candidates].sum() == 2000
        if len(candidates) > 1:
            square += stats.chisquare(counts[candidates]).statistic
            freedom += len(candidates) - 1
    assert max(multiples) >= 3
    assert 1 in multiples
    assert 0.001 < stats.chi2.sf(square, freedom) < 0.999


@pytest.mark.acceptance("marius", 5)
def test_comet_groups_anew():
    def pairs(order):
        first = order.states[0]
        return {frozenset(first[:4].tolist()), frozenset(first[4:].tolist())}

    seen = [pairs(graphs.comet(32, 8, 4, rng(seed))) for seed in range(20)]
    assert len({frozenset(each) for each in seen}) == 20
    again = graphs.comet(32, 8, 4, rng(3))
    np.testing.assert_array_equal(again.buckets, graphs.comet(32, 8, 4, rng(3)).buckets)


def counted(order, edges, vertices, ranges):
    """The shares and entropies of the definition, an edge at a time."""
    p = len(order.buckets)
    size, width = math.ceil(vertices / p), math.ceil(vertices / ranges)
    total = np.zeros(ranges)
    for end in edges.ravel():
        total[end // width] += 1
    done, apart, groups = np.zeros(ranges), [], []
    for state in range(len(order.states)):
        own = np.zeros(ranges)
        for head, tail in edges:
            if order.buckets[head // size, tail // size] == state:
                own[head // width] += 1
                own[tail // width] += 1
        done += own
        shares = [d / t for d, t in zip(done, total, strict=True) if t]
        apart.append(max(shares) - min(shares))
        groups.append(math.exp(stats.entropy(own)) if own.any() else 1.0)
    return apart, groups


@pytest.mark.acceptance("marius", 10)
def test_bias_and_effective_groups_are_their_definitions():
    edges = rng(2).integers(0, 90, (300, 2))  # nothing lies in the last two ranges
    for order in (graphs.beta(8, 2, rng(3)), graphs.comet(8, 4, 2, rng(4))):
        counts = graphs.incident_counts(order, edges, 100, 20)
        assert counts.sum() == 600
        apart, groups = counted(order, edges, 100, 20)
        np.testing.assert_allclose(graphs.edge_permutation_bias(counts), apart)
        np.testing.assert_allclose(graphs.effective_groups(counts), groups)


@pytest.mark.acceptance("marius", 10)
def test_comet_is_more_even_than_beta_on_random_ids_and_not_on_sorted_ones():
    clusters = 100 * rng(5).integers(64, size=(40_000, 1))
    sorted_ids = clusters + (rng(6).random((40_000, 2)) ** 3 * 100).astype(int)
    order = rng(7).permutation(6400)
    told = {}
    for name, edges in (("random", order[sorted_ids]), ("sorted", sorted_ids)):
        made = []
        for made_order in (graphs.beta(16, 4, rng(8)), graphs.comet(64, 16, 8, rng(8))):
            counts = graphs.incident_counts(made_order, edges, 6400, 64)
            groups = graphs.effective_groups(counts)
            mean = np.average(groups, weights=counts.sum(1))
            made.append((graphs.edge_permutation_bias(counts).max(), mean))
        told[name] = made
    (b, d), (c, e) = told["random"]
    assert b - c >= 0.03
    assert e / d >= 1.15
    (b, _), (c, _) = told["sorted"]
    assert b - c < 0.03


def brute_partitions(size, host, block):
    """The largest group by the integer rules, tried from above."""
    if size.nodes + 2 * size.edges + size.working <= host:
        return (1, 1, 1)
    finest = int(math.sqrt(size.edges / block))

    def need(p, c):
        return c * size.nodes / p + 2 * c * c * size.edges / p**2 + size.working

    fitting = [c for c in range(1, finest + 1) if need(finest, c) <= host]
    for group in range(max(1, max(fitting, default=0) // 2), 0, -1):
        p = group * max(2, finest // group)
        if need(p, 2 * group) <= host:
            return (p, 2 * group, group)
    return None


def test_partitions_fill_a_host_by_the_integer_rules():
    draws, refused = rng(9), 0
    for _ in range(300):
        nodes, edges, host = (2 ** draws.uniform(20, 36, 3)).astype(int).tolist()
        size = graphs.GraphBytes(nodes, edges, int(draws.integers(2**20)))
        wanted = brute_partitions(size, host, 2**16)
        if wanted is None:
            refused += 1
            with pytest.raises(ConfigError, match="host_bytes must hold two"):
                graphs.choose_partitions(size, host, 2**16)
        else:
            assert graphs.choose_partitions(size, host, 2**16) == wanted
    assert 0 < refused < 250


def count(edges):
    order = graphs.beta(4, 2, rng())
    return graphs.incident_counts(order, np.array(edges, int).reshape(-1, 2), 10, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: graphs.beta(8, 1, rng()), "capacity must be at least 2"),
        (lambda: graphs.beta(4, 5, rng()), "capacity=5, partitions=4"),
        (lambda: graphs.comet(8, 16, 4, rng()), "capacity=16, partitions=8"),
        (lambda: graphs.comet(8, 4, 3, rng()), "group must divide partitions"),
        (lambda: graphs.comet(8, 4, 0, rng()), "group must divide partitions"),
        (lambda: graphs.comet(8, 4, 4, rng()), "two groups must be resident"),
        (lambda: graphs.sequential(8, 3, 4, rng()), "capacity=3, least=4"),
        (lambda: graphs.fewest_swaps(4, 1), "capacity must be at least 2"),
        (
            lambda: graphs.choose_partitions(graphs.GraphBytes(9, 9), 0),
            "must be positive",
        ),
        (lambda: graphs.assign_buckets(np.array([[0, -1]]), 4), "0 to 3: got least=-1"),
        (lambda: graphs.assign_buckets(np.array([[0, 4]]), 4), "most=4"),
        (lambda: graphs.assign_buckets(np.array([[1, 1]]), 4), "state 0 must have"),
        (lambda: count([[0, 10]]), "edges must have numbers from 0 to 9"),
        (lambda: count([[-1, 2]]), "least=-1"),
        (lambda: graphs.edge_permutation_bias(count([[]])), "must be an edge"),
    ],
)
def test_orders_that_cannot_be_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
