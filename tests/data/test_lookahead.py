"""The planner of look-ahead, against its definition; moves of rows, and its peers."""

import itertools

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core import ConfigError

WORKED = [
    np.array(ids) for ids in ([1, 2, 2, 5], [2, 3, 3, 6], [1, 3, 7, 7], [8, 2, 8, 9])
]
ROWS = 40


def drawn(seed, steps=None):
    """A stream of uneven batches."""
    rng = np.random.default_rng(seed)
    steps = int(rng.integers(1, 25)) if steps is None else steps
    sizes = rng.integers(1, 12, steps)
    return [(ROWS * rng.random(size) ** 2).astype(np.int64) for size in sizes]


STREAMS = [(seed, drawn(seed), seed % 9) for seed in range(200)]


def fetches(stream, lookahead):
    """The closed form: first uses, and those more than L batches after the last one."""
    last, count = {}, 0
    for step, ids in enumerate(stream):
        for row in {*ids.tolist()}:
            count += row not in last or step - last[row] > max(lookahead, 0)
            last[row] = step
    return count


@pytest.mark.acceptance("bagpipe", 2)
def test_the_worked_plan_cell_by_cell():
    plans = list(data.plan_lookahead(WORKED, 10, 2))
    cells = [
        (
            plan.unique.tolist(),
            plan.prefetch.tolist(),
            dict(zip(plan.keep.tolist(), plan.until.tolist(), strict=True)),
            plan.sync_now.tolist(),
            plan.no_sync.tolist(),
            plan.sync_later.tolist(),
        )
        for plan in plans
    ]
    assert cells == [
        ([1, 2, 5], [1, 2, 5], {1: 2, 2: 1}, [2], [5], [1]),
        ([2, 3, 6], [3, 6], {2: 3, 3: 2}, [3], [6], [2]),
        ([1, 3, 7], [7], {}, [], [1, 3], [7]),
        ([2, 8, 9], [8, 9], {}, [], [2, 9], [8]),
    ]


@pytest.mark.acceptance("bagpipe", 2)
def test_groups_part_the_rows_of_a_batch():
    for _, stream, lookahead in STREAMS:
        for plan in data.plan_lookahead(stream, ROWS, lookahead):
            parts = np.concatenate([plan.sync_now, plan.no_sync, plan.sync_later])
            assert sorted(parts) == plan.unique.tolist()
            both = np.concatenate([plan.keep, plan.drop])
            assert sorted(both) == plan.unique.tolist()
            following = stream[plan.step + 1] if plan.step + 1 < len(stream) else []
            seen = following if lookahead else []
            assert set(plan.sync_now) == set(plan.unique) & set(seen)


@pytest.mark.acceptance("bagpipe", 3)
def test_fetches_are_as_many_as_gaps_say():
    for _, stream, lookahead in STREAMS:
        plans = data.plan_lookahead(stream, ROWS, lookahead)
        found = sum(len(plan.prefetch) for plan in plans)
        assert found == fetches(stream, lookahead)


@pytest.mark.acceptance("bagpipe", 3)
def test_a_whole_stream_in_sight_fetches_every_row_once():
    for _, stream, _ in STREAMS[:50]:
        plans = data.plan_lookahead(stream, ROWS, len(stream))
        found = np.concatenate([plan.prefetch for plan in plans])
        assert sorted(found) == np.unique(np.concatenate(stream)).tolist()


def settings(lookahead):
    """All that moves of a look-ahead can be made with."""
    ahead = max(lookahead, 1)
    return [
        {"every": every, "late": late}
        for late in (0, 1)
        for every in {1, max(1, ahead // 4), ahead - late}
        if 1 <= every <= ahead - late
    ]


@pytest.mark.acceptance("bagpipe", 2)
def test_every_row_is_in_the_cache_when_it_is_used_and_in_the_store_when_it_is_read():
    for _, stream, lookahead in STREAMS[:80]:
        needed = data.rows_needed(stream, lookahead)
        for how in settings(lookahead):
            inside, most, steps = set(), 0, []
            for move in data.lookahead_moves(stream, ROWS, lookahead, **how):
                assert {*move.ids.tolist()} <= inside
                assert {*move.evict.tolist()} <= inside
                inside -= {*move.evict.tolist()}
                assert not inside & {*move.fetch.tolist()}
                inside |= {*move.fetch.tolist()}
                most = max(most, len(inside))
                steps.append(move.step)
            assert steps == list(range(-1, len(stream)))
            assert not inside
            assert most <= needed
            if how["every"] == 1:
                assert most == needed


def test_rows_needed_are_those_of_batches_in_a_row():
    for _, stream, lookahead in STREAMS[:60]:
        width = max(lookahead, 1)
        unions = [
            {*np.concatenate(stream[at : at + width]).tolist()}
            for at in range(len(stream))
        ]
        assert data.rows_needed(stream, lookahead) == max(map(len, unions))


@pytest.mark.acceptance("bagpipe", 8)
def test_a_cache_that_is_too_small_is_told_what_would_go():
    for _, stream, _ in STREAMS[:30]:
        far = len(stream)
        needed = data.rows_needed(stream, far)
        data.check_capacity(stream, far, needed)
        one = data.rows_needed(stream, 1)
        if one == needed:
            continue
        largest = data.largest_lookahead(stream, needed - 1)
        with pytest.raises(
            ConfigError, match=rf"{needed} rows.*lookahead={largest} is"
        ):
            data.check_capacity(stream, far, needed - 1)
        moves = data.lookahead_moves(stream, ROWS, largest)
        assert len(list(data.assign_slots(moves, ROWS, needed - 1))) == far + 1
        assert data.largest_lookahead(stream, one - 1) is None


@pytest.mark.acceptance("bagpipe", 9)
def test_planning_reads_no_further_than_it_must():
    taken = 0

    def endless():
        nonlocal taken
        for seed in itertools.count():
            taken += 1
            yield drawn(seed, 1)[0]

    for lookahead in (0, 1, 4):
        taken = 0
        moves = data.lookahead_moves(endless(), ROWS, lookahead)
        for number, _ in enumerate(itertools.islice(moves, 30)):
            assert taken <= number + 2 * max(lookahead, 1) + 1


def test_slots_are_places_in_the_cache():
    for _, stream, lookahead in STREAMS[:60]:
        capacity = data.rows_needed(stream, lookahead)
        moves = data.lookahead_moves(stream, ROWS, lookahead)
        cache = np.full(capacity, -1)
        for turn in data.assign_slots(moves, ROWS, capacity):
            if turn.step >= 0:
                np.testing.assert_array_equal(cache[turn.slots], stream[turn.step])
            np.testing.assert_array_equal(cache[turn.evict_slots], turn.evict)
            cache[turn.evict_slots] = -1
            assert (cache[turn.fetch_slots] == -1).all()
            cache[turn.fetch_slots] = turn.fetch


def check_ahead(moves, stream, ahead):
    """What batch x + 1 + ahead needs is moved after x."""
    last = len(stream) - 1
    assert [move.step for move in moves] == list(range(-1, len(stream)))
    assert [m.ready for m in moves] == [min(m.step + 1 + ahead, last) for m in moves]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_lru_misses_what_a_list_by_last_use_misses(ahead):
    for seed, stream, _ in STREAMS[:60]:
        capacity = data.rows_needed(stream, 1 + ahead) + seed % 7
        recent, missed = [], []
        for ids in stream:
            unique = np.unique(ids).tolist()
            missed.append([row for row in unique if row not in recent])
            recent = [row for row in recent if row not in unique] + unique
            recent = recent[max(0, len(recent) - capacity) :]
        moves = list(data.lru_moves(stream, capacity, ahead))
        check_ahead(moves, stream, ahead)
        first = sorted(itertools.chain(*missed[: 1 + ahead]))
        rest = [*missed[1 + ahead :], *[[]] * (1 + ahead)]
        assert [m.fetch.tolist() for m in moves] == [first, *rest][: len(moves)]
        turns = list(data.assign_slots(moves, ROWS, capacity))
        assert sum(len(t.evict) for t in turns) == sum(map(len, missed))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_hot_rows_stay_and_fill_the_cache(ahead):
    for seed, stream, _ in STREAMS[:60]:
        capacity = data.rows_needed(stream, 1 + ahead) + seed % 7
        hot = data.hottest_rows(stream, ROWS, capacity, ahead)
        moves = list(data.static_moves(stream, hot, ahead))
        check_ahead(moves, stream, ahead)
        turns = list(data.assign_slots(moves, ROWS, capacity))
        assert not any(np.isin(turn.evict, hot).any() for turn in turns[:-1])
        near = (stream[at : at + 1 + ahead] for at in range(len(stream)))
        beside = max(len(np.setdiff1d(np.concatenate(ids), hot)) for ids in near)
        assert len(hot) + beside <= capacity
        counts = np.bincount(np.concatenate([np.unique(i) for i in stream]))
        cold = np.setdiff1d(np.arange(len(counts)), hot)
        if len(hot) and len(cold):
            assert counts[cold].max() <= counts[hot[hot < len(counts)]].min()


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ConfigError, match=r"batch 1 .* \[0, 10\): got 3 to 10"):
        list(data.plan_lookahead([np.array([1]), np.array([3, 10])], 10, 1))
    with pytest.raises(ConfigError, match="lookahead=-1"):
        next(data.plan_lookahead(WORKED, 10, -1))
    with pytest.raises(ConfigError, match="every=2, lookahead=2, late=1"):
        next(data.lookahead_moves(WORKED, 10, 2, every=2, late=1))
    small = data.lookahead_moves(WORKED, 10, 2)
    with pytest.raises(ConfigError, match=r"must hold 5 rows.*capacity=4"):
        list(data.assign_slots(small, 10, 4))
    with pytest.raises(ConfigError, match=r"the 3 rows of a batch .*: got capacity=2"):
        list(data.lru_moves(WORKED, 2))
    moves = list(data.lookahead_moves(WORKED, 10, 2))
    late = [moves[0]._replace(fetch=moves[0].fetch[1:]), *moves[1:]]
    with pytest.raises(ValueError, match="rows of batch 0 are not in the cache"):
        list(data.assign_slots(late, 10, 9))


@pytest.mark.acceptance("bagpipe", 5)
def test_a_store_counts_the_bytes_of_rows():
    seen = []
    arrays = {"a": np.zeros((5, 3), np.float32), "b": np.arange(5.0)}
    store = data.RowStore(arrays, reading=seen.append, writing=seen.append)
    rows = store.read(np.array([4, 1]))
    assert rows["b"].tolist() == [4, 1]
    store.write(np.array([0]), {"a": np.ones((1, 3)), "b": np.array([7])})
    assert store.arrays["b"].tolist() == [7, 1, 2, 3, 4]
    assert store.row_bytes == 20
    assert seen == [2 * 20, 20] == [store.bytes_read, store.bytes_written]
    assert len(store) == 5
    with pytest.raises(ConfigError, match=r"same number of rows: got \{'a': 5, 'b': 4"):
        data.RowStore({"a": arrays["a"], "b": np.zeros(4)})
