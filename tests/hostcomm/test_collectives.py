"""Collectives against numpy: the same bits everywhere, the bytes of the formulas."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import (
    Tag,
    allgather,
    allgatherv,
    allreduce,
    alltoallv,
    barrier,
    broadcast,
    connected,
    reduce_scatter,
)
from tests.hostcomm.threads import in_threads

SIZES = [1, 2, 3, 4, 5, 7, 8]
DTYPES = [np.float32, np.float64, np.int32, ml_dtypes.bfloat16]


def run(program, size):
    return in_threads(program, connected(size, patience=20.0))


def counted(program, size):
    """Returns what `program` makes and the payload bytes and messages each has sent."""

    def rank(transport):
        made = program(transport)
        sent = transport.counters().total_sent()
        return made, sent.payload, sent.messages

    return zip(*run(rank, size), strict=True)


def numbers(size, shape, dtype, seed):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(size, *shape)) * 100).astype(dtype)


@settings(max_examples=40)
@given(
    size=st.sampled_from(SIZES),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    method=st.sampled_from(["auto", "doubling", "ring"]),
    seed=st.integers(0, 99),
)
def test_allreduce_is_the_sum_in_the_same_bits(size, shape, dtype, method, seed):
    arrays = numbers(size, shape, dtype, seed)
    given_ = arrays.copy()
    got = run(lambda t: allreduce(t, arrays[t.rank, ...], method=method), size)
    assert {(g.shape, g.dtype) for g in got} == {(shape, np.dtype(dtype))}
    assert len({g.tobytes() for g in got}) == 1
    np.testing.assert_array_equal(arrays, given_)  # nobody's input is changed
    exact = arrays.astype(np.float64).sum(0)
    if np.issubdtype(dtype, np.integer):
        np.testing.assert_array_equal(got[0], exact)
    else:
        eps = float(ml_dtypes.finfo(dtype).eps)
        bound = size * eps * np.abs(arrays.astype(np.float64)).sum(0)
        assert (np.abs(got[0].astype(np.float64) - exact) <= bound).all()


@pytest.mark.parametrize("method", ["doubling", "ring"])
def test_other_operations_and_bits_of_the_result(method):
    """Integers as floats: any order of the sum gives these bits."""
    arrays = np.arange(35.0).reshape(5, 7) ** 2
    got = run(lambda t: allreduce(t, arrays[t.rank], method=method), 5)
    np.testing.assert_array_equal(got, [arrays.sum(0)] * 5)
    got = run(
        lambda t: allreduce(t, -arrays[t.rank], operation=np.maximum, method=method), 5
    )
    np.testing.assert_array_equal(got, [-arrays[0]] * 5)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_recursive_doubling(size):
    array = np.ones(1001, np.float32)
    n = array.nbytes
    got, payload, messages = counted(
        lambda t: allreduce(t, array, method="doubling"), size
    )
    np.testing.assert_array_equal(got, [array * size] * size)
    power = 2 ** int(math.log2(size))
    steps, folded = int(math.log2(power)), size - power
    times = [1 if rank >= power else steps + (rank < folded) for rank in range(size)]
    assert list(payload) == [n * each for each in times]
    assert list(messages) == times
    assert sum(payload) == n * (power * steps + 2 * folded)


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_the_ring(size):
    array = np.ones((7, 145), np.float32)  # no size but 1, 5 and 7 divides it
    got, payload, messages = counted(lambda t: allreduce(t, array, method="ring"), size)
    np.testing.assert_array_equal(got, [array * size] * size)
    count = array.size
    part = [count // size + (rank < count % size) for rank in range(size)]
    assert list(payload) == [
        4 * (2 * count - part[rank] - part[(rank + 1) % size]) for rank in range(size)
    ]
    assert sum(payload) == 2 * (size - 1) * array.nbytes
    assert set(messages) == {2 * (size - 1)}


@pytest.mark.parametrize(("count", "messages"), [(16_384, 4), (16_383, 2)])
def test_large_arrays_take_the_ring(count, messages):
    """128 KiB in float64: 2 (P - 1) messages, otherwise one and two of the fold."""
    _, _, sent = counted(lambda t: allreduce(t, np.ones(count)), 3)
    assert max(sent) == messages


def test_two_ranks_have_no_ring():
    _, _, sent = counted(lambda t: allreduce(t, np.ones(20_000)), 2)
    assert list(sent) == [1, 1]


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_gives_each_its_part(size):
    rng = np.random.default_rng(size)
    sizes = rng.integers(0, 9, size).tolist()
    arrays = rng.integers(0, 99, (size, sum(sizes)))
    got, payload, _ = counted(
        lambda t: reduce_scatter(t, arrays[t.rank], sizes=sizes), size
    )
    ends = np.cumsum([0, *sizes])
    for rank in range(size):
        part = slice(ends[rank], ends[rank + 1])
        np.testing.assert_array_equal(got[rank], arrays.sum(0)[part])
    assert list(payload) == [8 * (sum(sizes) - each) for each in sizes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_allgather_stacks_in_few_messages(size, dtype):
    arrays = numbers(size, (2, 3), dtype, size)
    got, payload, messages = counted(lambda t: allgather(t, arrays[t.rank]), size)
    for each in got:
        np.testing.assert_array_equal(each, arrays)
        assert each.dtype == dtype
    assert set(payload) == {(size - 1) * arrays[0].nbytes}
    assert set(messages) == {math.ceil(math.log2(size))}


@pytest.mark.parametrize("size", SIZES)
def test_allgatherv_is_ragged(size):
    rng = np.random.default_rng(size)
    arrays = [rng.normal(size=(rng.integers(0, 6), 2)) for _ in range(size)]
    got, payload, messages = counted(lambda t: allgatherv(t, arrays[t.rank]), size)
    for each in got:
        for mine, theirs in zip(each, arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)
    total = sum(each.nbytes for each in arrays)
    if size > 1:
        assert list(payload) == [
            total - arrays[(rank + 1) % size].nbytes for rank in range(size)
        ]
    assert set(messages) == {size - 1}


@pytest.mark.parametrize("size", SIZES)
def test_alltoallv_is_ragged(size):
    rng = np.random.default_rng(size)
    counts = rng.integers(0, 6, (size, size))
    arrays = [
        [np.full(counts[a, b], a * 10 + b) for b in range(size)] for a in range(size)
    ]
    got, payload, messages = counted(lambda t: alltoallv(t, arrays[t.rank]), size)
    for rank, each in enumerate(got):
        for source, mine in enumerate(each):
            np.testing.assert_array_equal(mine, arrays[source][rank])
    others = counts.sum(1) - np.diag(counts)
    assert list(payload) == (8 * others).tolist()
    assert set(messages) == {size - 1}


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_sends_to_each_once(size):
    array = np.arange(6.0).reshape(2, 3)
    for root in {0, size - 1}:
        got, payload, messages = counted(
            lambda t, root=root: broadcast(
                t, array if t.rank == root else None, root=root
            ),
            size,
        )
        np.testing.assert_array_equal(got, [array] * size)
        assert sum(payload) == (size - 1) * array.nbytes
        assert max(messages) == math.ceil(math.log2(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_barrier_sends_nothing_but_its_messages(size):
    _, payload, messages = counted(barrier, size)
    assert set(payload) == {0}
    assert set(messages) == {math.ceil(math.log2(size))}


def test_calls_of_two_threads_are_told_apart_by_their_tags():
    import concurrent.futures

    def rank(t):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            # One rank begins with the other one.
            rounds = (1, 2) if t.rank else (2, 1)
            made = {
                number: pool.submit(
                    allreduce, t, np.full(3, number), tag=Tag("sum", number)
                )
                for number in rounds
            }
            return [made[number].result()[0] for number in (1, 2)]

    assert run(rank, 3) == [[3, 6]] * 3


@pytest.mark.parametrize("method", ["doubling", "ring"])
def test_arrays_that_differ_are_refused(method):
    def rank(t):
        return allreduce(t, np.ones(3 if t.rank else 5), method=method)

    with pytest.raises(ConfigError, match=r"arrays must be the same.*float64\(\d,\)"):
        run(rank, 2)


def test_arrays_that_differ_are_not_stacked():
    def rank(t):
        return allgather(t, np.ones(3 if t.rank else 5))

    with pytest.raises(ConfigError, match=r"arrays must be the same in all ranks"):
        run(rank, 2)


def test_wrong_arguments_are_refused():
    (alone,) = connected(1)
    with alone:
        with pytest.raises(ConfigError, match=r"sizes must be 1 and add up to 3"):
            reduce_scatter(alone, np.ones(3), sizes=[2])
        with pytest.raises(ConfigError, match="an array for each of 1 ranks"):
            alltoallv(alone, [])
        with pytest.raises(ConfigError, match="the root must have an array"):
            broadcast(alone, None)
        with pytest.raises(ConfigError, match="root must be one of 1 ranks"):
            broadcast(alone, np.ones(1), root=1)
