"""Who reads what, and who keeps what, against counts made one by one."""

import numpy as np
import pytest
from scipy import stats

from hpcjax import data
from hpcjax.core.errors import ConfigError
from hpcjax.data.placement import PLACEMENTS

EXAMPLES, EPOCHS = 20_000, 90
_made = {}


def epochs():
    """The order of 90 epochs of 20,000 examples."""
    if not _made:
        _made["order"] = data.shuffled_epochs(EXAMPLES, EPOCHS, seed=0)
    return _made["order"]


def stream_of(workers):
    return data.AccessStream(epochs().reshape(-1, workers), EXAMPLES, workers)


@pytest.mark.acceptance("nopfs", 1)
def test_the_stream_is_what_a_loader_delivers():
    digits = data.DigitsConfig(limit=50).load(None).train
    batches = data.batches(digits, 12, 3, shard=(1, 3))
    stream = data.access_stream(batches, 13, 3, start=2)
    expected = digits.gather(stream.worker(1))
    parts = [batches[number] for number in range(2, 13)]
    got = np.concatenate([part["x"] for part in parts])
    np.testing.assert_array_equal(got, expected["x"])
    assert stream.rows == 4


@pytest.mark.acceptance("nopfs", 2)
def test_all_workers_together_read_each_example_once_an_epoch():
    digits = data.DigitsConfig(limit=40).load(None).train
    # Epochs end within batches: 40 is no multiple of 12.
    stream = data.access_stream(data.batches(digits, 12, 0), 30, 3)
    read = np.stack([stream.worker(w).reshape(-1, 4) for w in range(3)], axis=1)
    for epoch in read.reshape(-1, 40):
        assert sorted(epoch) == list(range(40))


def test_first_use_and_counts_are_those_of_a_loop():
    order = np.array([[3, 1, 0, 1], [1, 3, 3, 0]])
    stream = data.AccessStream(order, examples=5, workers=2)
    assert stream.worker(0).tolist() == [3, 1, 1, 3]
    # Example 3 is read at place 0, which is not "never".
    assert stream.first_use(0).tolist() == [-1, 1, -1, 0, -1]
    assert stream.first_use(1).tolist() == [0, 1, -1, 2, -1]
    assert stream.counts(1).tolist() == [2, 1, 0, 1, 0]


@pytest.mark.acceptance("nopfs", 3)
def test_how_many_examples_a_worker_reads_often():
    numbers = {"examples": 1_281_167, "workers": 16, "epochs": 90}
    assert abs(data.expected_above(**numbers, more_than=10) - 31_634.7) <= 0.1
    never = numbers["examples"] - data.expected_above(**numbers, more_than=0)
    assert abs(never - 3_846.1) <= 0.1
    stream = stream_of(16)
    often = sum((stream.counts(w) > 10).sum() for w in range(16))
    expected = 16 * data.expected_above(EXAMPLES, 16, EPOCHS, more_than=10)
    assert abs(often / expected - 1) < 0.05
    # The same of a formula written out.
    tail = 1 - stats.binom.cdf(10, EPOCHS, 1 / 16)
    assert expected == pytest.approx(16 * EXAMPLES * tail)


# Shares of reads of own memory, of neighbours', and of the storage.
FRACTIONS = {
    (4, 0.2, "frequency"): (0.252, 0.447, 0.301),
    (4, 0.2, "dedup"): (0.251, 0.549, 0.200),
    (16, 0.05, "frequency"): (0.096, 0.514, 0.390),
    (16, 0.05, "dedup"): (0.094, 0.706, 0.200),
}


@pytest.mark.acceptance("nopfs", 9)
@pytest.mark.parametrize(("workers", "share", "placement"), FRACTIONS)
def test_shares_of_reads_are_the_published_ones(workers, share, placement):
    stream, room = stream_of(workers), int(share * EXAMPLES)
    sizes, memory = np.ones(EXAMPLES, int), data.StorageClass("memory", room, 1.0)
    made = data.plan(stream, sizes, [memory], placement)
    own = near = 0
    kept = np.stack([made.storage_of(w) >= 0 for w in range(workers)])
    for worker in range(workers):
        counts = stream.counts(worker)
        own += counts[kept[worker]].sum()
        near += counts[~kept[worker] & kept.any(0)].sum()
    got = np.array([own, near, EXAMPLES * EPOCHS - own - near]) / (EXAMPLES * EPOCHS)
    expected = FRACTIONS[workers, share, placement]
    np.testing.assert_allclose(got, expected, atol=0.01)


def test_with_room_for_all_frequency_has_more_in_its_own_memory():
    stream, sizes = stream_of(4), np.ones(EXAMPLES, int)
    memory = data.StorageClass("memory", EXAMPLES // 2, 1.0)
    own = {}
    for placement in PLACEMENTS:
        made = data.plan(stream, sizes, [memory], placement)
        kept = sum(stream.counts(w)[made.storage_of(w) >= 0].sum() for w in range(4))
        own[placement] = kept / (EXAMPLES * EPOCHS)
    assert own["frequency"] == pytest.approx(0.573, abs=0.01)
    assert own["dedup"] == pytest.approx(0.305, abs=0.01)
    assert own["hybrid"] == pytest.approx(own["frequency"], abs=0.01)


@pytest.mark.acceptance("nopfs", 4)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_plans_fill_fast_memory_with_what_is_read_most(placement):
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(60) for _ in range(9)]).reshape(-1, 12)
    stream, sizes = data.AccessStream(order, 60, 3), rng.integers(1, 9, 60)
    classes = [data.StorageClass("RAM", 30, 9.0), data.StorageClass("SSD", 45, 3.0)]
    made = data.plan(stream, sizes, classes, placement)
    for worker, held in enumerate(made.held):
        counts, first = stream.counts(worker), stream.first_use(worker)
        fast, slow = held
        assert sizes[fast].sum() <= 30
        assert sizes[slow].sum() <= 45
        assert not set(fast) & set(slow)
        if placement == "first_touch":
            counts = np.where(first < 0, -len(order), -first)
        if placement != "hybrid":
            assert counts[fast].min() >= counts[slow].max()
        for records in held:
            used = first[records][first[records] >= 0]
            assert (np.diff(used) > 0).all()
        if placement == "frequency":
            ranked = sorted(range(60), key=lambda k: (-counts[k], k))
            total = np.cumsum(sizes[ranked])
            assert set(fast) == set(np.array(ranked)[total <= 30])
    if placement == "dedup":
        every = np.concatenate([np.concatenate(held) for held in made.held])
        assert len(set(every)) == len(every)


@pytest.mark.parametrize("room", [7, 30])
def test_first_touch_keeps_what_a_loop_by_hand_keeps(room):
    order = data.shuffled_epochs(60, 4, 0).reshape(-1, 12)
    stream, memory = data.AccessStream(order, 60, 3), data.StorageClass("RAM", room, 1)
    made = data.plan(stream, np.ones(60, int), [memory], "first_touch")
    held = [set(), set(), set()]
    for shared in (True, False):  # what nobody has, then what else is read
        for reads in zip(*(stream.worker(w).tolist() for w in range(3)), strict=True):
            for own, record in zip(held, reads, strict=True):
                known = set().union(*held) if shared else own
                if record not in known and len(own) < room:
                    own.add(record)
    assert [set(own) for (own,) in made.held] == held
    assert [len(own) for (own,) in made.held] == [room] * 3


def test_the_nearest_neighbour_has_the_fastest_class_then_the_earliest_place():
    held = (
        (np.array([5, 1]), np.array([2])),
        (np.array([1, 3]), np.array([4])),
        (np.array([2]), np.array([4, 5])),
    )
    near = data.Plan(held, 6).nearest(0)
    assert near.worker.tolist() == [-1, 1, 2, 1, 1, 2]
    assert near.place[1:].tolist() == [0, 0, 1, 0, 1]
    assert near.storage[1:].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: data.AccessStream(np.zeros((2, 5), int), 1, 2),
            "divisible by the number of shards",
        ),
        (
            lambda: data.plan(stream_of(4), np.ones(3, int), []),
            "sizes must hold one for each record: got sizes=3, records=20000",
        ),
        (
            lambda: data.plan(stream_of(4), np.ones(EXAMPLES, int), [], "frequent"),
            "placement must be one of",
        ),
        (lambda: data.expected_above(0, 1, 1, 1), "examples must be an integer"),
    ],
)
def test_what_cannot_be_planned_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
