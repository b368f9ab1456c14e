"""Order, prefetching, shards and evaluation passes."""

import subprocess
import sys
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError


class Numbered:
    """A source whose examples are their own numbers; may fail at one of them."""

    def __init__(self, size, bad=None):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def gather(self, indices):
        if self.bad is not None and self.bad in indices:
            raise DataFormatError(f"example {self.bad} is damaged")
        return {"x": np.asarray(indices), "y": np.asarray(indices)}


@pytest.mark.slow
@hypothesis.given(
    size=st.integers(1, 30),
    rows=st.integers(1, 8),
    count=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_shards_cover_each_epoch_once(size, rows, count, seed):
    batch_size = rows * count
    shards = [
        data.batches(Numbered(size), batch_size, seed, shard=(index, count))
        for index in range(count)
    ]
    batches = -(-2 * size // batch_size)
    seen = np.concatenate([s[i]["x"] for i in range(batches) for s in shards])
    for epoch in range(2):
        part = np.sort(seen[epoch * size : (epoch + 1) * size])
        np.testing.assert_array_equal(part, np.arange(size))


def test_a_source_smaller_than_a_batch_is_repeated_inside_it():
    batch = data.batches(Numbered(3), 8, seed=0)[0]
    assert np.bincount(batch["x"]).tolist() in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_order_depends_on_the_seed_alone():
    first, again, other = (data.batches(Numbered(50), 20, s) for s in (1, 1, 2))
    np.testing.assert_array_equal(first[7]["x"], again[7]["x"])
    assert not np.array_equal(first[7]["x"], other[7]["x"])


@pytest.mark.slow
def test_order_is_the_same_in_another_process():
    code = (
        "from hpcjax import data; digits = data.DigitsConfig().load();"
        "print(data.batches(digits.train, 8, 3).indices(500).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    here = data.batches(data.DigitsConfig().load().train, 8, 3).indices(500).tolist()
    assert done.stdout.strip() == str(here)


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (1, 5), (4, 2), (8, 16)])
def test_threads_and_prefetching_change_nothing(threads, ahead):
    stream = data.batches(Numbered(23), 4, seed=9)
    with stream.iterate(threads=threads, ahead=ahead) as iterator:
        for number in range(20):
            np.testing.assert_array_equal(next(iterator)["x"], stream[number]["x"])
            assert iterator.get_state() == {"next_index": number + 1}


@pytest.mark.parametrize("threads", [1, 4])
def test_an_exception_reaches_the_consumer_at_its_batch(threads):
    stream = data.batches(Numbered(40, bad=7), 4, seed=0)
    place = next(i for i in range(10) if 7 in stream.indices(i))
    with stream.iterate(threads=threads, ahead=12) as iterator:
        for _ in range(place):
            next(iterator)
        for _ in range(2):
            with pytest.raises(DataFormatError, match="example 7") as raised:
                next(iterator)
            assert raised.value.__notes__ == [f"while making batch {place}"]
        assert iterator.position == place
        stream.source.bad = None
        assert 7 in next(iterator)["x"]


def test_closing_ends_the_threads():
    before = threading.active_count()
    iterator = iter(data.batches(Numbered(40), 4, seed=0))
    next(iterator)
    assert threading.active_count() > before
    iterator.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_moving_goes_both_ways():
    stream = data.batches(Numbered(40), 4, seed=0)
    with stream.iterate(start=5) as iterator:
        ahead = [next(iterator)["x"] for _ in range(3)]
        iterator.set_state({"next_index": 6})
        np.testing.assert_array_equal(next(iterator)["x"], ahead[1])
        with pytest.raises(ConfigError, match="next_index must be non-negative"):
            iterator.set_state({"next_index": -1})


def test_far_positions_are_reached_at_once():
    stream = data.batches(Numbered(7), 2, seed=0)
    assert stream[10**12]["x"].shape == (2,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"shard": (0, 3)}, "must be divisible"),
        ({"shard": (2, 2)}, "index < count"),
        ({"shard": (-1, 2)}, "index < count"),
        ({"seed": -1}, "seed must be in"),
        ({"seed": 2**32}, "seed must be in"),
        ({"source": Numbered(0)}, "at least one example"),
    ],
)
def test_bad_arguments_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        data.batches(**{"source": Numbered(9), "batch_size": 8, "seed": 0, **arguments})


@pytest.mark.parametrize("name", ["threads", "ahead"])
def test_prefetching_needs_one_of_each(name):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        data.batches(Numbered(9), 2, 0).iterate(**{name: 0})


def test_negative_batches_are_refused():
    with pytest.raises(IndexError, match="non-negative"):
        data.batches(Numbered(9), 2, 0)[-1]


@hypothesis.given(
    size=st.integers(0, 30), rows=st.integers(1, 8), count=st.integers(1, 3)
)
@hypothesis.settings(max_examples=40, deadline=None)
def test_whole_is_one_pass_over_all_shards(size, rows, count):
    passes = [
        data.evaluation_batches(Numbered(size), rows * count, (index, count))
        for index in range(count)
    ]
    seen = []
    for parts in zip(*passes, strict=True):
        for part in parts:
            seen += part["x"][part["weight"] == 1].tolist()
    assert seen == list(range(size))
    with pytest.raises(IndexError, match="batch number"):
        passes[0][len(passes[0])]
