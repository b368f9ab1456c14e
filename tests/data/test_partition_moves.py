"""Moves of partitions: each batch has its rows, updated, and no others are there."""

import itertools

import numpy as np
import pytest

from hpcjax import data, graphs
from hpcjax.core.errors import ConfigError

ROWS, PART = 75, 10  # the last partition has five rows


def drawn(policy, seed):
    """States of two epochs, some of several batches, and rows of each batch."""
    rng = np.random.default_rng(seed)
    make = {"beta": (8, 3), "comet": (8, 4, 2)}[policy]
    orders = [getattr(graphs, policy)(*make, rng).states for _ in range(2)]
    states = np.concatenate(orders)
    states = np.repeat(states, rng.integers(1, 4, size=len(states)), axis=0)
    rows = [(state[:, None] * PART + np.arange(PART)).ravel() for state in states]
    batches = [rng.choice(own[own < ROWS], size=(2, 3)) for own in rows]
    return states, batches


def update(values, step):
    return (7 * values + step) % 1009


def train(states, batches, ahead, early=False):
    """Trains integers through a cache that takes what is fetched as late as it may."""
    capacity = (states.shape[1] + ahead) * PART
    store, cache, moving, ready = np.arange(ROWS), np.full(capacity, -1), [], -1
    moves = data.partition_moves(states, batches, ROWS, PART, ahead)
    for turn in data.assign_slots(moves, ROWS, capacity):
        if early and turn.step >= 0:
            store[turn.evict] = cache[turn.evict_slots]
        while ready < turn.step:
            slots, values, ready = moving.pop(0)
            cache[slots] = values
        if turn.step >= 0:
            assert ready >= turn.step
            slots = np.unique(turn.slots)
            cache[slots] = update(cache[slots], turn.step)
        if not early:
            store[turn.evict] = cache[turn.evict_slots]
        moving.append((turn.fetch_slots, store[turn.fetch], turn.ready))
    return store


@pytest.mark.parametrize("policy", ["beta", "comet"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_the_table_is_that_of_training_it_whole(policy, ahead):
    for seed in range(3):
        states, batches = drawn(policy, seed)
        table = np.arange(ROWS)
        for step, batch in enumerate(batches):
            ids = np.unique(batch)
            table[ids] = update(table[ids], step)
        found = train(states, batches, ahead)
        np.testing.assert_array_equal(found, table)
        assert not np.array_equal(train(states, batches, ahead, early=True), table)


@pytest.mark.parametrize("ahead", [0, 2])
def test_as_much_is_fetched_as_swaps_say_and_all_goes_back(ahead):
    states, batches = drawn("comet", 0)
    moves = [*data.partition_moves(states, batches, ROWS, PART, ahead)]
    sets = [set(), *map(set, states.tolist())]
    wanted = [p for old, new in itertools.pairwise(sets) for p in sorted(new - old)]
    sizes = np.minimum(PART, ROWS - PART * np.arange(8))
    assert sum(len(move.fetch) for move in moves) == sizes[wanted].sum()
    assert sum(len(move.evict) for move in moves) == sizes[wanted].sum()
    early = [move.step for move in moves if len(move.fetch) and not len(move.evict)]
    assert (len(early) > 1) == (ahead > 0)
    # What comes ahead is waited for by the next state alone.
    for move in moves:
        if 0 <= move.step < len(states) - 1:
            assert move.ready > move.step


def test_numbers_do_not_wrap():
    states = np.array([[0, 60], [60, 61]], np.int16)  # 61 * 640 is no int16
    batches = np.array([[0], [1]], np.uint8), np.array([[60 * 640]])
    first, *_ = data.partition_moves(states, batches, 62 * 640, 640)
    wanted = np.arange(640)[None] + 640 * np.array([[0], [60]])
    np.testing.assert_array_equal(first.fetch, wanted.ravel())


def test_batches_must_be_of_their_states():
    states = np.array([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="batch 1 uses rows that are not resident"):
        [*data.partition_moves(states, [[0], [0]], ROWS, PART)]
    with pytest.raises(ValueError, match="batch 0 uses rows that are not resident"):
        [*data.partition_moves([[7]], [[ROWS]], ROWS, PART)]
    with pytest.raises(ConfigError, match="each batch must have a state"):
        [*data.partition_moves(states, [[0], [10], [10]], ROWS, PART)]
    with pytest.raises(ConfigError, match="each state must have a batch"):
        [*data.partition_moves(states, [[0]], ROWS, PART)]


@pytest.mark.acceptance("marius", 10)
@pytest.mark.parametrize(
    ("order", "reads"),
    [
        (lambda rng: graphs.beta(16, 4, rng), 2.875),
        (lambda rng: graphs.comet(64, 16, 8, rng), 3.625),
    ],
    ids=["beta", "comet"],
)
def test_an_epoch_reads_from_files_what_its_order_says(order, reads, tmp_path):
    """With the first load, over all rows: 4 + 42 of 16 parts, 2 + 27 of 8."""
    drawn, rows = order(np.random.default_rng(5)), 1280
    size = rows // len(drawn.buckets)
    pieces = [np.zeros((size, 3), np.uint8)] * (rows // size)
    none = [np.zeros(0, np.int64)] * len(drawn.states)
    form = (rows, 3), np.uint8, size
    with data.RowFile.build(tmp_path / "rows", pieces, *form) as file:
        store = data.RowStore({"table": file})
        for move in data.partition_moves(drawn.states, none, rows, size):
            store.write(move.evict, {"table": np.ones((len(move.evict), 3), np.uint8)})
            store.read(move.fetch)
        assert file.bytes_read == file.bytes_written == reads * rows * 3
        assert file.bytes_read == store.bytes_read
        assert np.asarray(file).all()  # each partition has been in memory
