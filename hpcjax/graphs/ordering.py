"""Orders in which the edges between partitions of the vertices are trained.

A table that does not fit is cut into partitions, of which some are resident. An
ordering says which, state after state, and in which of its states each bucket is
trained: the edges from one partition to another.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError


class Ordering(NamedTuple):
    """The states of an epoch, and what is trained in each.

    Attributes:
      states: partitions that are resident, [states, capacity].
      buckets: number of the state that trains the edges from partition i to j, −1 for
        none, [partitions, partitions].
    """

    states: Int[np.ndarray, "states capacity"]
    buckets: Int[np.ndarray, "partitions partitions"]


def _beta_states(partitions: int, capacity: int, rng: np.random.Generator) -> list:
    """Returns the states in which every two partitions meet, one swap apart."""
    drawn = rng.permutation(partitions)
    held, left = drawn[:capacity], drawn[capacity:]
    states = [held.copy()]
    while len(left):
        rng.shuffle(held)
        rng.shuffle(left)
        for place in range(len(left)):  # each takes the last slot in turn
            left[place], held[-1] = held[-1], left[place]
            states.append(held.copy())
        # The other slots' partitions have met all, and do not return.
        done = min(capacity - 1, len(left))
        for place in range(done):
            held[place] = left[place]
            states.append(held.copy())
        left = left[done:]
    return states


def _check_numbers(what: str, given: np.ndarray, count: int) -> None:
    """Raises ConfigError for a number of none of so many, which might wrap."""
    if given.size:
        least, most = int(given.min()), int(given.max())
        rule = f"{what} must have numbers from 0 to {count - 1}"
        checks.require(0 <= least <= most < count, rule, least=least, most=most)


def assign_buckets(
    states: Int[np.ndarray, "states capacity"],
    partitions: int,
    rng: np.random.Generator | None = None,
) -> Ordering:
    """Returns the states with each bucket at one of those that hold both its sides.

    Args:
      states: partitions that are resident, each once in a state.
      partitions: of all.
      rng: draws one of these states; None takes the first.

    Raises:
      ConfigError: a state has a partition twice, or one that is none.
    """
    _check_numbers("states", states, partitions)
    twice = np.flatnonzero((np.diff(np.sort(states, axis=1), axis=1) == 0).any(1))
    for first in twice[:1]:
        rule = f"state {first} must have each partition once"
        checks.require(False, rule, state=states[first].tolist())
    resident: Bool[np.ndarray, "states partitions"]
    resident = np.zeros((len(states), partitions), bool)
    np.put_along_axis(resident, states, True, axis=1)
    met = np.einsum("si,sj->ij", resident, resident, dtype=np.int64)
    chosen = np.zeros(met.shape) if rng is None else rng.random(met.shape) * met
    buckets, passed = np.full(met.shape, -1), np.zeros(met.shape)
    for number, held in enumerate(resident):
        both = np.outer(held, held)
        buckets[both & (passed == np.floor(chosen))] = number
        passed += both
    return Ordering(np.asarray(states), buckets)


def beta(partitions: int, capacity: int, rng: np.random.Generator) -> Ordering:
    """Returns BETA's order: few swaps, and each bucket as early as it can be.

    Args:
      partitions: p.
      capacity: c, those that are resident.
      rng: of what is resident first, and of the swaps.

    Raises:
      ConfigError: c is below 2 or above p, where p is not 1.

    Examples:
      >>> order = beta(8, 2, np.random.default_rng(0))
      >>> count_swaps(order.states), fewest_swaps(8, 2)
      (27, 27)

    References:
      Mohoney et al., Marius, OSDI 2021, section 4.
    """
    rule = "capacity must be at least 2 and at most the partitions, or 1 of 1"
    good = 2 <= capacity <= partitions or capacity == partitions == 1
    checks.require(good, rule, capacity=capacity, partitions=partitions)
    return assign_buckets(np.array(_beta_states(partitions, capacity, rng)), partitions)


def comet(
    partitions: int, capacity: int, group: int, rng: np.random.Generator
) -> Ordering:
    """Returns COMET's order: BETA's of random groups, each bucket at a random state.

    Args:
      partitions: p.
      capacity: c, those that are resident.
      group: g partitions are swapped together; it divides p and c.
      rng: draws groups, states and buckets, anew for each epoch.

    Raises:
      ConfigError: g does not divide p or c, fewer than two groups are resident, or c
        is above p.

    Examples:
      >>> order = comet(8, 4, 2, np.random.default_rng(0))
      >>> order.states.shape, count_swaps(order.states)
      ((6, 4), 10)

    References:
      Waleffe et al., MariusGNN, EuroSys 2023, section 5.
    """
    good = group >= 1 and partitions % max(group, 1) == capacity % max(group, 1) == 0
    rule = "group must divide partitions and capacity"
    checks.require(good, rule, group=group, partitions=partitions, capacity=capacity)
    rule = "two groups must be resident: capacity must be at least twice group"
    checks.require(capacity >= 2 * group, rule, capacity=capacity, group=group)
    rule, given = "capacity must be at most the partitions", {"partitions": partitions}
    checks.require(capacity <= partitions, rule, capacity=capacity, **given)
    groups = rng.permutation(partitions).reshape(-1, group)
    coarse = _beta_states(partitions // group, capacity // group, rng)
    states = groups[np.array(coarse)].reshape(len(coarse), capacity)
    return assign_buckets(states, partitions, rng)


def sequential(
    partitions: int, capacity: int, training: int, rng: np.random.Generator
) -> Ordering:
    """Returns one state: the partitions of the training vertices, and random others.

    For classes of vertices, when those to be trained have the smallest numbers.

    Args:
      partitions: p.
      capacity: c, those that are resident.
      training: the first so many hold all training vertices.
      rng: of the others, drawn anew for each epoch.

    Raises:
      ConfigError: the training partitions are more than are resident.

    Examples:
      >>> sequential(8, 3, 2, np.random.default_rng(0)).states[:, :2].tolist()
      [[0, 1]]
    """
    rule = "capacity must be from the partitions of training vertices to all"
    good = 1 <= training <= capacity <= partitions
    given = {"capacity": capacity, "least": training, "partitions": partitions}
    checks.require(good, rule, **given)
    others = training + rng.permutation(partitions - training)[: capacity - training]
    state = np.concatenate([np.arange(training), others])[None]
    return assign_buckets(state, partitions)


def count_swaps(states: Int[np.ndarray, "states capacity"]) -> int:
    """Returns how many partitions are read after the first state."""
    pairs = zip(states[1:], states[:-1], strict=True)
    return sum(len(np.setdiff1d(new, old)) for new, old in pairs)


def fewest_swaps(partitions: int, capacity: int) -> int:
    """Returns a bound that no order of all buckets is below.

    ⌈(p (p − 1) / 2 − c (c − 1) / 2) / (c − 1)⌉, as a swap makes c − 1 new pairs.
    """
    rule = "capacity must be at least 2 and at most the partitions"
    good = 2 <= capacity <= partitions
    checks.require(good, rule, capacity=capacity, partitions=partitions)
    return -(-(math.comb(partitions, 2) - math.comb(capacity, 2)) // (capacity - 1))


def incident_counts(
    ordering: Ordering, edges: Int[np.ndarray, "edges 2"], vertices: int, ranges: int
) -> Int[np.ndarray, "states ranges"]:
    """Returns how many ends of the edges of each state lie in equal ranges of numbers.

    Args:
      ordering: of partitions, which are equal ranges too.
      edges: their two vertices.
      vertices: number of all.
      ranges: as many as the finest of the orders that are compared has partitions.

    Raises:
      ConfigError: an edge has an end that is no vertex.
    """
    checks.require_count(1, ranges=ranges)
    _check_numbers("edges", edges, vertices)
    sides = edges // -(-vertices // len(ordering.buckets))
    state = ordering.buckets[sides[:, 0], sides[:, 1]]
    own = edges // -(-vertices // ranges)
    counts = np.zeros((len(ordering.states), ranges), np.int64)
    np.add.at(counts, (state[state >= 0][:, None], own[state >= 0]), 1)
    return counts


def edge_permutation_bias(
    counts: Int[np.ndarray, "states ranges"],
) -> Float[np.ndarray, " states"]:
    """Returns how far ranges are apart after each state; the largest is the bias B.

    max_g t_g − min_g t_g, where t_g is the share of the edges at range g that have been
    trained: 0 to 1. Ranges without an edge do not count.

    Args:
      counts: see `incident_counts`.

    Raises:
      ConfigError: there is no edge.

    Examples:
      >>> edge_permutation_bias(np.array([[4, 0], [0, 4]])).tolist()
      [1.0, 0.0]
    """
    total = counts.sum(0)
    checks.require(total.sum() > 0, "there must be an edge", edges=int(total.sum()))
    shares = np.cumsum(counts[:, total > 0], axis=0) / total[total > 0]
    return shares.max(1) - shares.min(1)


def effective_groups(
    counts: Int[np.ndarray, "states ranges"],
) -> Float[np.ndarray, " states"]:
    """Returns of how many ranges the edges of each state are: exp of the entropy.

    Its mean over states by their edges is D. A state without an edge has 1.

    Args:
      counts: see `incident_counts`.

    Examples:
      >>> effective_groups(np.array([[4, 4], [3, 0]])).round(6).tolist()
      [2.0, 1.0]
    """
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    logs = np.log(np.where(shares > 0, shares, 1))
    return np.exp(-(shares * logs).sum(1))


class GraphBytes(NamedTuple):
    """What a graph takes in memory.

    Attributes:
      nodes: of all rows, with what the optimizer keeps for them.
      edges: of all edges, once.
      working: besides.
    """

    nodes: int
    edges: int
    working: int = 0


class Partitioning(NamedTuple):
    """Partitions, how many of them are resident, and how many are swapped at once."""

    partitions: int
    capacity: int
    group: int


def choose_partitions(
    size: GraphBytes, host_bytes: int, block_bytes: int = 512 * 1024
) -> Partitioning:
    """Returns the partitions for a host: two groups of them fill its memory.

    c node partitions and both sorted copies of their c² buckets are resident. There are
    as many partitions as leave a mean bucket no smaller than a block of the disk.

    Args:
      size: of the graph.
      host_bytes: of memory.
      block_bytes: of the disk.

    Returns:
      (1, 1, 1) where the whole graph fits.

    Raises:
      ConfigError: not even two partitions of the finest cut fit.

    Examples:
      128 partitions have buckets of a block each. Of them 30 would fit, but 120, which
      groups of 15 divide, are larger: 30 of these do not, and 28 of 126 do.

      >>> choose_partitions(GraphBytes(nodes=2**36, edges=2**33), 2**34)
      Partitioning(partitions=126, capacity=28, group=14)

    References:
      Waleffe et al., MariusGNN, EuroSys 2023, section 6; the integer rules are ours.
    """
    rule = "host_bytes and block_bytes must be positive"
    good = min(host_bytes, block_bytes) > 0
    checks.require(good, rule, host_bytes=host_bytes, block_bytes=block_bytes)

    def fits(partitions: int, capacity: int) -> bool:
        # In integers: c·(nodes / p) + 2 c²·(edges / p²) + working ≤ host.
        held = capacity * partitions * size.nodes + 2 * capacity**2 * size.edges
        return held <= (host_bytes - size.working) * partitions**2

    if fits(1, 1):
        return Partitioning(1, 1, 1)
    finest = math.isqrt(size.edges // block_bytes)
    fitting = (c for c in range(finest, 0, -1) if fits(finest, c))
    group = max(1, next(fitting, 0) // 2)
    while group:
        partitions = group * max(2, finest // group)
        if fits(partitions, 2 * group):
            return Partitioning(partitions, 2 * group, group)
        group -= 1
    least = -(-2 * size.nodes // max(2, finest)) + size.working
    raise ConfigError(
        "host_bytes must hold two partitions and their edges, of at most "
        f"{max(2, finest)}: got host_bytes={host_bytes}, and nodes alone take {least}; "
        "with a smaller block_bytes there are more, smaller partitions"
    )
