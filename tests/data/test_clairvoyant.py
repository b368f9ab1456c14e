"""Clairvoyant reading: the same batches, whoever is slow, late, wrong or gone."""

import contextlib
import logging
import threading
import time
from concurrent import futures

import numpy as np
import pytest

from hpcjax import cost, data, hostcomm
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import neighbours
from hpcjax.data.clairvoyant import Records
from hpcjax.data.staging import Ring

WORKERS, EXAMPLES, BATCH, STEPS = 3, 60, 12, 15  # three epochs
SIZE = 1000


class Slow:
    """Records of random bytes, read after random delays; counts who is read when."""

    def __init__(self, seed=0, delay=1e-3):
        rng = np.random.default_rng(seed)
        self.records = [rng.bytes(SIZE) for _ in range(EXAMPLES)]
        self.sizes = np.full(EXAMPLES, SIZE)
        self.delays = rng.random(1000) * delay
        self.reads, self.now, self.twice = np.zeros(EXAMPLES, int), set(), 0
        self.bad = set()
        self.lock = threading.Lock()

    def __len__(self):
        return EXAMPLES

    def read(self, index):
        with self.lock:
            self.twice += index in self.now
            self.now.add(index)
            self.reads[index] += 1
            delay = self.delays[self.reads.sum() % 1000]
        time.sleep(delay)
        with self.lock:
            self.now.discard(index)
        if index in self.bad:
            raise DataFormatError(f"record {index} is damaged")
        return self.records[index]

    def decode(self, records, indices):
        rows = np.stack([np.frombuffer(each, np.uint8) for each in records])
        return {"x": rows, "y": np.array(indices)}

    def gather(self, indices):
        return self.decode([self.records[i] for i in indices], indices)


def jitter(batch, rng, source):
    """An augmentation whose draws belong to examples."""
    return {**batch, "draws": rng.random((len(batch["y"]), 4))}


def stream(source, rank=0, workers=WORKERS):
    shard = (rank, workers)
    return data.batches(source, BATCH, 7, augment=jitter, shard=shard)


def reader(source, rank=0, workers=WORKERS, transport=None, steps=STEPS, **how):
    how = {"memory": 12 * SIZE, "threads": 8, **how}
    batches = stream(source, rank, workers)
    return data.ClairvoyantConfig(**how).make(
        batches, steps, lambda: contextlib.nullcontext(transport)
    )


def equal(batch, other):
    return batch.keys() == other.keys() and all(
        np.array_equal(batch[name], other[name]) for name in other
    )


def together(work):
    """Runs `work(rank, transport)` in a thread for each worker; returns results."""
    transports = hostcomm.connected(WORKERS)
    with futures.ThreadPoolExecutor(WORKERS) as pool:
        results = list(pool.map(work, range(WORKERS), transports))
    for transport in transports:
        transport.close(linger=0.0)
    return results


@pytest.mark.acceptance("nopfs", 5)
@pytest.mark.acceptance("nopfs", 6)
@pytest.mark.parametrize("placement", ["frequency", "dedup"])
def test_batches_are_the_same_under_races_and_nothing_is_read_twice(placement):
    sources = [Slow(seed=0) for _ in range(WORKERS)]
    step = threading.Barrier(WORKERS)  # as training has one, so that nobody is late

    def work(rank, transport):
        plain, seen = stream(Slow(), rank), []
        given = reader(sources[rank], rank, transport=transport, placement=placement)
        with given.iterate() as iterator:
            for number in range(STEPS):
                seen.append(equal(next(iterator), plain[number]))
                step.wait(60)
            counts = iterator.counts
        kept = given.foresee().plan.storage_of(rank) >= 0
        return seen, counts, kept

    for source, (seen, counts, kept) in zip(sources, together(work), strict=True):
        assert all(seen)
        assert source.twice == 0
        assert source.reads[kept].max() <= 1
        assert counts.neighbours > 0
        assert counts.storage == source.reads.sum()
        read = counts.memory + counts.neighbours + counts.storage
        assert read >= STEPS * BATCH // WORKERS


@pytest.mark.parametrize("network", [1e7, 1e3])
def test_the_simulator_says_who_keeps_what(network):
    rates = {"storage_rate": 4e4, "network_rate": network, "consume_rate": 4e4}
    given = reader(Slow(), placement="auto", **rates).foresee()
    memory = data.StorageClass("memory", 12 * SIZE, np.inf)
    system = cost.InputSystem(**rates, classes=(memory,), threads=8, staging=16)
    chosen = cost.choose_placement(given.stream, Slow().sizes, system)
    expected = reader(Slow(), placement=chosen).foresee().plan
    assert chosen == ("first_touch" if network > 1e6 else "frequency")
    for ours, theirs in zip(given.plan.held, expected.held, strict=True):
        assert ours[0].tolist() == theirs[0].tolist()


@pytest.mark.acceptance("nopfs", 1)
@pytest.mark.parametrize("threads", [1, 8])
def test_from_every_batch_the_rest_is_what_a_plain_loader_gives(threads):
    source = Slow(delay=1e-4)
    plain = [stream(source)[number] for number in range(STEPS)]
    for start in range(STEPS):
        given = reader(source, threads=threads)
        with given.iterate(start) as iterator:
            rest = [next(iterator) for _ in range(start, STEPS)]
            assert iterator.get_state() == {"next_index": STEPS}
        assert all(map(equal, rest, plain[start:]))


def test_with_little_foresight_the_batches_are_the_same():
    source = Slow(delay=0.0)
    given = reader(source, look_ahead=4 * BATCH)
    assert len(given.foresee().stream.order) == 4
    with given.iterate() as iterator:
        for number in range(STEPS):
            assert equal(next(iterator), stream(source)[number])


def test_a_neighbour_that_has_not_got_it_yet_is_asked_in_vain(monkeypatch):
    # All are believed to have everything from the beginning.
    monkeypatch.setattr(
        Records, "_is_near", lambda self, index: bool(self._near.worker[index] >= 0)
    )

    def work(rank, transport):
        source, plain = Slow(), stream(Slow(), rank)
        with reader(source, rank, transport=transport).iterate() as iterator:
            good = [equal(next(iterator), plain[n]) for n in range(STEPS)]
            return all(good), iterator.counts.missed

    results = together(work)
    assert all(good for good, _ in results)
    assert sum(missed for _, missed in results) > 0


@pytest.mark.acceptance("nopfs", 10)
def test_without_a_neighbour_that_is_lost_reading_goes_on(caplog):
    caplog.set_level(logging.WARNING)
    gone = threading.Event()

    def work(rank, transport):
        source, plain = Slow(), stream(Slow(), rank)
        with reader(source, rank, transport=transport).iterate() as iterator:
            for number in range(STEPS):
                if rank == 2 and number == 4:
                    transport.abort()
                    gone.set()
                    return True
                if number == 5:
                    assert gone.wait(60)
                assert equal(next(iterator), plain[number])
            return True

    assert together(work) == [True] * WORKERS
    told = [r.message for r in caplog.records if "come from the storage" in r.message]
    assert 2 <= len(told) <= WORKERS  # once for each of those that have lost it


def test_who_does_not_answer_is_told_once_and_asked_no_more(caplog):
    one, silent = hostcomm.connected(2)
    asking = neighbours.Neighbours(one, {}, patience=0.01)
    assert asking.ask(1, 0) is None
    assert asking.ask(1, 0) is None
    assert len(caplog.records) == 1
    assert "records of rank 1 come from the storage" in caplog.text
    assert one.counters().sent[1].messages == 1
    for transport in (one, silent):
        transport.close(linger=0.0)


def test_who_says_goodbye_is_asked_no_more_and_not_told(caplog):
    caplog.set_level(logging.WARNING)
    one, other = hostcomm.connected(2)
    first = neighbours.Neighbours(one, {}, patience=60.0)
    second = neighbours.Neighbours(other, {3: b"abc"}, patience=60.0)
    with futures.ThreadPoolExecutor(2) as pool:
        serving = [pool.submit(first.serve), pool.submit(second.serve)]
        assert first.ask(1, 3) == b"abc"
        assert first.ask(1, 4) is None
        second.stop()
        serving[1].result()
        assert first.ask(1, 3) is None  # at once, not after a minute
        first.stop()
        serving[0].result()
    assert not caplog.records
    for transport in (one, other):
        transport.close(linger=0.0)


def test_an_error_of_a_record_is_raised_by_the_batch_that_needs_it_and_again_tried():
    source = Slow(delay=0.0)
    plain = stream(source)
    bad = int(plain.own_indices(2)[1])
    source.bad.add(bad)
    given = reader(source, memory=SIZE, threads=2)
    with given.iterate() as iterator:
        held = np.concatenate(given.foresee().plan.held[0])
        assert bad not in held  # else the thread that fills the memory meets it first
        for number in range(2):
            assert equal(next(iterator), plain[number])
        with pytest.raises(DataFormatError, match=f"record {bad} is damaged") as raised:
            next(iterator)
        assert "while making batch 2" in raised.value.__notes__
        source.bad.clear()
        assert equal(next(iterator), plain[2])


def test_an_error_of_the_thread_that_fills_the_memory_reaches_the_next_batch():
    source = Slow(delay=0.0)
    given = reader(source, steps=2)
    foresight = given.foresee()
    # Kept for others alone, so that no batch of this worker meets it.
    other = int(np.setdiff1d(np.arange(EXAMPLES), foresight.stream.worker(0))[0])
    given._foreseen = foresight._replace(plan=plan_of([other]))
    source.bad.add(other)
    with given.iterate() as iterator:
        iterator._threads[8].join()  # the one that fills the memory
        with pytest.raises(DataFormatError, match=f"record {other} is damaged"):
            next(iterator)


def plan_of(records):
    return data.Plan(((np.array(records),),), EXAMPLES)


def test_what_is_kept_is_fetched_in_order_while_nobody_is_urgent():
    source = Slow(delay=0.0)
    records = Records(source, plan_of([9, 4, 7]), 0)
    order = []
    source_read, source.read = source.read, lambda k: (order.append(k), b"x")[1]
    records._urgent = 1
    with futures.ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(records.fetch_kept)
        assert futures.wait([fetching], timeout=0.02).not_done
        assert order == []
        with records._changed:
            records._urgent = 0
            records._changed.notify_all()
        fetching.result()
    assert order == [9, 4, 7]
    assert records.kept == dict.fromkeys(order, b"x")
    source.read = source_read
    assert records.get(5) == source.records[5]
    assert 5 not in records.kept


def test_the_ring_has_room_for_so_many_and_forgets_what_was_released():
    ring = Ring(first=2, end=9, room=3)
    assert [ring.claim() for _ in range(3)] == [2, 3, 4]
    with futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ring.claim)
        assert futures.wait([waiting], timeout=0.02).not_done
        for place in (4, 2, 3):
            ring.put(place, bytes([place]))
        assert ring.take(2, 4) == [b"\2", b"\3"]
        ring.release(4)
        assert waiting.result() == 5
    ring.put(3, b"late")
    assert set(ring._records) == {4}
    with pytest.raises(IndexError, match="places 2 to 3 are not among those to come"):
        ring.take(2, 4)
    ring.close()
    assert ring.claim() is None


def test_who_leaves_while_it_is_asked_answers_with_nothing():
    one, other = hostcomm.connected(2)
    first = neighbours.Neighbours(one, {}, patience=60.0)
    second = neighbours.Neighbours(other, {}, patience=60.0)
    with futures.ThreadPoolExecutor(2) as pool:
        serving = pool.submit(first.serve)
        asking = pool.submit(first.ask, 1, 3)
        while one.counters().sent[1].messages == 0:
            time.sleep(1e-3)
        second.stop()  # has never served
        assert asking.result() is None
        first.stop()
        serving.result()
    for transport in (one, other):
        transport.close(linger=0.0)


def test_who_stops_answers_its_own_questions():
    one, silent = hostcomm.connected(2)
    own = neighbours.Neighbours(one, {}, patience=60.0)
    with futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(own.ask, 1, 3)
        while not own._asked:
            time.sleep(1e-3)
        own.stop()
        assert asking.result() is None
    for transport in (one, silent):
        transport.close(linger=0.0)


def test_it_goes_forward_only_and_to_its_end():
    source = Slow(delay=0.0)
    with reader(source).iterate(3) as iterator:
        next(iterator)
        iterator.set_state({"next_index": 9})
        assert equal(next(iterator), stream(source)[9])
        iterator.set_state({"next_index": 2})
        with pytest.raises(IndexError, match="begin anew with iterate"):
            next(iterator)
    # What is waited for when it is skipped is waited for no longer.
    with reader(Slow(delay=0.05), threads=1).iterate() as iterator:
        next(iterator)
        iterator.set_state({"next_index": 9})
        assert equal(next(iterator), stream(source)[9])
    over = pytest.raises(IndexError, match="not among those to come")
    with reader(source).iterate(STEPS) as iterator, over:
        next(iterator)
    with reader(source).iterate(STEPS - 1) as iterator:
        next(iterator)
        with pytest.raises(IndexError, match="not among those to come"):
            next(iterator)
    iterator.close()
    with pytest.raises(ValueError, match="closed"):
        next(iterator)


def test_all_that_is_prepared_is_staged_so_that_nothing_is_left_to_wait_for():
    with reader(Slow(delay=0.0), threads=8, staging=8).iterate() as iterator:
        next(iterator)
        # Two batches of four are staged, and no more are asked for.
        futures.wait(iterator._pending, timeout=10)
        assert all(each.done() for each in iterator._pending)


def test_a_start_that_fails_leaves_nothing_open():
    opened, closed = [], []

    @contextlib.contextmanager
    def connect():
        opened.append(1)
        yield None
        closed.append(1)

    given = data.ClairvoyantConfig().make(stream(Slow()), STEPS, connect)
    before = set(threading.enumerate())
    with pytest.raises(IndexError, match="must be non-negative"):
        given.iterate(-1)
    assert len(opened) == len(closed)
    assert set(threading.enumerate()) <= before


def test_closing_ends_all_threads():
    # Threads of tests before may end meanwhile, so that they are not counted.
    before = set(threading.enumerate())
    with reader(Slow(delay=1e-3)).iterate() as iterator:
        next(iterator)
        assert len(set(threading.enumerate()) - before) > 8
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": SIZE - 1}, "must hold the largest record, of 1000 bytes"),
        ({"staging": 7}, "must hold two batches of 4 examples of a process"),
        ({"threads": 0}, "threads must be an integer >= 1"),
        ({"placement": "best"}, "placement must be"),
        (
            {"placement": "auto", "storage_rate": 1e6},
            "needs storage_rate and consume_rate: .*consume_rate=None",
        ),
    ],
)
def test_what_cannot_be_read_so_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        reader(Slow(), **changes)


def test_what_draws_its_batches_itself_is_refused():
    class Draws:
        def __len__(self):
            return 10

        def sample(self, number, batch_size, seed, shard):
            return {"x": np.zeros(batch_size)}

    with pytest.raises(ConfigError, match="take input=read_ahead"):
        reader(Draws())
