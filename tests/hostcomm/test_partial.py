"""Partial sums: nothing is lost, late is not later than promised, errors are named."""

import contextlib
import signal
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from hpcjax import hostcomm
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, ProcessLost
from hpcjax.hostcomm import (
    PartialAllreduce,
    PartialTrace,
    Tag,
    allreduce,
    connected,
    initiators,
    join_traces,
    launch,
    load_trace,
    save_trace,
    start_processes,
)
from tests import hostile
from tests.hostcomm import ranks
from tests.hostcomm.threads import in_threads

SIZE = 3
SETTINGS = [
    (4, {"mode": "solo", "limiter": 0}),
    (4, {"mode": "majority"}),
    (5, {"mode": "solo", "limiter": 3}),
    (6, {"mode": 4, "limiter": 0}),
    (3, {"mode": "sync"}),
    (1, {"mode": "majority"}),
    (4, {"mode": "solo", "limiter": 0, "missed": "newest"}),
]


def grad(rank, step):
    return np.array([1, rank, 100 * rank + step], np.float32)


def random_run(transport, steps, **settings):
    """Posts `grad` after random times; returns results and trace."""
    partial = PartialAllreduce(transport, SIZE, **settings)
    rng = np.random.default_rng(transport.rank)
    seen = []
    for step in range(steps):
        time.sleep(float(rng.exponential(0.002)))
        partial.post(step, grad(transport.rank, step))
        seen.extend(partial.result(step, 20.0))
    seen.extend(partial.finish(20.0))
    return seen, partial.trace(), partial.stats()


@pytest.mark.acceptance("eager-sgd", 2)
@pytest.mark.parametrize(("size", "settings"), SETTINGS)
def test_nothing_is_lost_and_the_trace_says_where_it_went(size, settings):
    """Sums of small integers are exact: the rounds hold every gradient once."""
    steps = 25
    runs = in_threads(
        lambda t: random_run(t, steps, **settings), connected(size, patience=20.0)
    )
    trace = join_traces([each[1] for each in runs])
    rounds = {result.round: result for run in runs for result in run[0]}
    if settings.get("missed") != "newest":
        every = sum(grad(rank, step) for rank in range(size) for step in range(steps))
        for seen, _, _ in runs:
            last = (trace.contributed == steps).any()
            assert [result.round for result in seen] == list(range(steps + last))
            np.testing.assert_array_equal(sum(r.total for r in seen), every)
    for number, result in rounds.items():
        parts = enumerate(trace.contents(number))
        want = sum((grad(r, s) for r, own in parts for s in own), np.zeros(SIZE))
        np.testing.assert_array_equal(result.total, want)
        fresh = 0 if number == steps else trace.fresh()[number]
        assert result.fresh == fresh
        assert result.contributors == sum(map(bool, trace.contents(number)))
    assert (np.diff(trace.arrival, axis=0) > 0).all()
    assert (trace.contributed >= 0).all()
    for rank, (seen, _, stats) in enumerate(runs):
        taken = [range(*each) for each in trace.applied[:, rank]]
        assert [number for own in taken for number in own] == [r.round for r in seen]
        np.testing.assert_array_equal(stats.fresh, trace.fresh())
        assert stats.staleness.sum() == steps
        assert stats.waited >= 0


def test_sync_is_allreduce_to_the_last_bit():
    def rank(transport):
        partial = PartialAllreduce(transport, 1000, mode="sync")
        rng = np.random.default_rng(transport.rank)
        for step in range(3):
            mine = rng.standard_normal(1000).astype(np.float32)
            partial.post(step, mine)
            (got,) = partial.result(step)
            want = allreduce(transport, mine, method="doubling")
            np.testing.assert_array_equal(got.total, want)
            assert (got.round, got.fresh) == (step, 5)
        assert partial.finish() == ()

    in_threads(rank, connected(5, patience=20.0))


def held_back(transport, until, steps, **settings):
    """The last rank posts some steps only once a round has ended, and no later one.

    Args:
      transport: ours.
      until: by step, the round; the next one must wait for all.
      steps: how many.
      settings: of the sums.
    """
    partial = PartialAllreduce(transport, SIZE, **{"mode": "solo", **settings})
    late = transport.rank == transport.size - 1
    taken = []
    for step in range(steps):
        if late and step in until:
            partial._rounds.wait(until[step], 20.0)
            with pytest.raises(TimeoutError):
                partial._rounds.wait(until[step] + 1, 0.05)
        partial.post(step, grad(transport.rank, step))
        taken.append([result.round for result in partial.result(step, 20.0)])
    taken.append([result.round for result in partial.finish(20.0)])
    return taken, partial.trace()


@pytest.mark.acceptance("eager-sgd", 6)
@pytest.mark.parametrize("limiter", [1, 4, 9])
def test_no_gradient_is_later_than_the_limiter_and_one_is_as_late(limiter):
    period = limiter + 1
    until = {first: first + limiter - 1 for first in (0, period)}
    runs = in_threads(
        lambda t: held_back(t, until, 2 * period, limiter=limiter),
        connected(3, patience=20.0),
    )
    trace = join_traces([trace for _, trace in runs])
    for first in until:  # the synchronous rounds
        assert trace.contributed[first, 2] == first + limiter
    assert trace.staleness().max() == limiter


def test_a_late_worker_takes_all_it_has_missed_or_only_the_newest():
    for missed, first in (("apply_all", [0, 1, 2]), ("newest", [2])):
        runs = in_threads(
            lambda t, m=missed: held_back(t, {0: 2}, 3, missed=m, limiter=0),
            connected(3, patience=20.0),
        )
        taken, trace = runs[2]
        assert taken == [first, [], [], [3]]  # each at most once
        assert trace.contributed[:, 0].tolist() == [3, 3, 3]
        # Rank 0 may find that a round more has ended by the time it looks.
        seen = [number for taken in runs[0][0] for number in taken]
        if missed == "apply_all":
            assert seen == [0, 1, 2, 3]
        else:
            assert max(map(len, runs[0][0])) == 1
            assert seen == sorted({*seen, 3})


def test_dropped_gradients_are_in_no_round():
    runs = in_threads(
        lambda t: held_back(t, {0: 2}, 3, stale="drop", limiter=0),
        connected(3, patience=20.0),
    )
    trace = join_traces([trace for _, trace in runs])
    assert trace.contributed[:, 2].tolist() == [-1, -1, 3]
    assert trace.stale == "drop"
    assert len(trace.staleness()) == (trace.contributed >= 0).sum()


@pytest.mark.parametrize("ring", [1, 3])
def test_who_is_a_whole_ring_behind_is_waited_for(ring):
    """The first `ring` rounds pass without it, the next one must not."""
    checked = threading.Event()

    def rank(transport):
        partial = PartialAllreduce(transport, SIZE, mode="solo", limiter=0, ring=ring)
        if transport.rank == 1:
            assert checked.wait(20.0)
        for step in range(ring + 2):
            partial.post(step, grad(transport.rank, step))
            if transport.rank == 0 and step == ring:
                with pytest.raises(TimeoutError, match=f"round {ring} has not"):
                    partial.result(step, 0.1)
                checked.set()
            partial.result(step, 20.0)
        partial.finish(20.0)
        return partial.trace()

    trace = join_traces(in_threads(rank, connected(2, patience=20.0)))
    assert trace.contributed[: ring + 1, 1].tolist() == [ring] * (ring + 1)


@pytest.mark.acceptance("eager-sgd", 5)
def test_majority_is_started_by_the_rank_that_was_drawn():
    """Round by round the initiator is the last to arrive, so all are fresh."""
    size, steps, seed = 3, 6, 5
    drawn = initiators(seed, size, steps)
    here = [threading.Semaphore(0) for _ in range(steps)]

    def rank(transport):
        partial = PartialAllreduce(transport, SIZE, mode="majority", seed=seed)
        fresh = []
        for step in range(steps):
            if drawn[step] == transport.rank:
                for _ in range(size - 1):
                    assert here[step].acquire(timeout=20.0)
            partial.post(step, grad(transport.rank, step))
            here[step].release()
            fresh += [result.fresh for result in partial.result(step, 20.0)]
        partial.finish(20.0)
        return fresh

    assert in_threads(rank, connected(size, patience=20.0)) == [[size] * steps] * size


def test_sums_are_of_float32_whatever_is_posted():
    """In bfloat16 1 + 2^-9 would be 1."""
    (alone,) = connected(1)
    partial = PartialAllreduce(alone, 1, mode="sync")
    mine = np.array([1 / 512], ml_dtypes.bfloat16)
    buffer = partial._buffer
    buffer.add(0, np.ones(1, ml_dtypes.bfloat16))
    buffer.add(1, mine)
    assert buffer.swap(1)[0] == np.float32(1 + 1 / 512)
    partial.finish()


def test_misuse_is_named():
    (alone,) = connected(1)
    partial = PartialAllreduce(alone, SIZE, mode="solo")
    with pytest.raises(ConfigError, match="round 0 is next: got number=1"):
        partial.post(1, grad(0, 0))
    with pytest.raises(ConfigError, match="size must be 3: got size=4"):
        partial.post(0, np.zeros(4))
    with pytest.raises(ConfigError, match="must be real: got dtype='complex64'"):
        partial.post(0, 1j * grad(0, 0))
    with pytest.raises(ConfigError, match="-1 was posted last: got step=0"):
        partial.result(0)
    partial.post(0, grad(0, 0))
    partial._rounds.wait(0, 20.0)
    with pytest.raises(ConfigError, match="the result of step 0 must be taken first"):
        partial.post(1, grad(0, 0))
    partial.result(0)
    assert partial.trace().arrival.shape == partial.trace().contributed.shape == (1, 1)
    partial.finish()
    with pytest.raises(ConfigError, match="has ended"):
        partial.post(1, grad(0, 0))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mode": "solos"}, "'solos'"),
        ({"mode": 0}, r"quorum must be in 1\.\.1: got mode=0"),
        ({"mode": 2}, r"quorum must be in 1\.\.1: got mode=2"),
        ({"missed": "all"}, "'all'"),
        ({"stale": "keep"}, "'keep'"),
        ({"ring": 0}, "ring must be an integer >= 1"),
        ({"limiter": -1}, "limiter must be an integer >= 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, words):
    (alone,) = connected(1)
    with pytest.raises(ConfigError, match=words):
        PartialAllreduce(alone, SIZE, **wrong)


@pytest.mark.parametrize(
    ("name", "values"), [("seed", (1, 2)), ("size", (3, 4)), ("mode", ("solo", 2))]
)
def test_ranks_that_differ_in_settings_are_told_at_the_start(name, values):
    def rank(transport):
        own = {"size": SIZE, name: values[transport.rank]}
        other = 1 - transport.rank
        words = f"{name} must be the same in all ranks, rank {other}'s is not"
        with pytest.raises(ConfigError, match=words):
            PartialAllreduce(transport, **own)

    in_threads(rank, connected(2, patience=20.0))


def test_two_on_one_transport_do_not_meet():
    """Activations of the first that come late must not start the second's rounds."""

    def rank(transport):
        first = PartialAllreduce(transport, SIZE, mode="solo")
        first.finish(20.0)
        other = 1 - transport.rank
        for kind in first._rounds._kinds:
            transport.send(other, Tag(kind, 3), np.array(other, np.int32))
        hostcomm.barrier(transport)
        second = PartialAllreduce(transport, SIZE, mode="solo")
        with pytest.raises(TimeoutError):
            second._rounds.wait(0, 0.1)
        hostcomm.barrier(transport)
        second.finish(20.0)
        assert second._rounds.done == 0

    in_threads(rank, connected(2, patience=20.0))


@pytest.mark.slow
@pytest.mark.faults(15)
@pytest.mark.processes
def test_nobody_waits_for_one_that_sleeps():
    """If they did, they would wait for ever: it sleeps until all others have ended."""
    size, who, steps = 4, 2, 60
    runs = launch(
        ranks.sleep_through_all_rounds, size, arguments=(who, steps), patience=30.0
    )
    trace = join_traces([PartialTrace(*each) for _, each in runs])
    assert (trace.contributed[:, who] == steps).all()  # the last round, of all
    others = np.delete(trace.arrival, who, axis=1)
    assert others.max() < trace.arrival[0, who]
    last = (trace.contributed == steps).sum()
    assert [totals for totals, _ in runs] == [[[float(last)] * 10]] * size


@pytest.mark.slow
@pytest.mark.faults(15)
@pytest.mark.acceptance("eager-sgd", 8)
@pytest.mark.processes
@pytest.mark.parametrize("program", [ranks.die_in_a_round, ranks.die_in_a_group])
def test_who_loses_a_rank_raises_in_time_and_ends_with_an_error(
    program, tmp_path, monkeypatch
):
    """By patience alone it would take 600 s."""
    codes = []

    @contextlib.contextmanager
    def watched(*args, **options):
        with start_processes(*args, **options) as crew:
            try:
                yield crew
            finally:
                codes.extend(process.wait(60) for process in crew.processes)

    monkeypatch.setattr("hpcjax.hostcomm._launch.start_processes", watched)
    with pytest.raises(ProcessLost, match="rank 1: rank 2 has ended"):
        launch(program, 4, arguments=(2, str(tmp_path)), patience=600.0)
    lost = ProcessLost.exit_code
    assert codes == [lost, lost, -signal.SIGKILL, lost]
    for rank in (0, 1, 3):
        assert "rank 2 has ended" in (tmp_path / str(rank)).read_text()


@pytest.mark.faults(9, 21)
def test_traces_are_saved_whole(tmp_path):
    runs = in_threads(
        lambda t: random_run(t, 4, mode="solo", limiter=2), connected(2, patience=20.0)
    )
    trace = join_traces([each[1] for each in runs])._replace(sync_models_every=3)
    for name in ("trace.npz", "trace.json"):
        save_trace(tmp_path / name, trace)
        again = load_trace(tmp_path / name)
        for got, want in zip(again, trace, strict=True):
            np.testing.assert_array_equal(got, want)
            assert np.asarray(got).dtype == np.asarray(want).dtype
    assert (again.steps, again.size) == (4, 2)
    with pytest.raises(ConfigError, match="ending"):
        save_trace(tmp_path / "trace.txt", trace)
    with pytest.raises(DataMissing, match="no such file"):
        load_trace(tmp_path / "none.npz")
    (tmp_path / "bad.json").write_text('{"arrival": []}')
    with pytest.raises(DataFormatError, match="expected a trace"):
        load_trace(tmp_path / "bad.json")
    flat = [each.ravel() for each in trace[:3]]
    for wrong in (
        trace._replace(arrival=trace.arrival[1:]),
        trace._make([*flat, *trace[3:]]),
    ):
        save_trace(tmp_path / "cut.npz", wrong)
        with pytest.raises(DataFormatError, match="must fit each other"):
            load_trace(tmp_path / "cut.npz")
    whole = bytearray((tmp_path / "trace.npz").read_bytes())
    whole[100] ^= 1
    for damaged in (b"", b"PK", whole[: len(whole) // 2], whole):
        (tmp_path / "bad.npz").write_bytes(damaged)
        with pytest.raises(DataFormatError, match="expected a trace"):
            load_trace(tmp_path / "bad.npz")
    for content in hostile.files(tmp_path / "run").values():
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataFormatError, match="expected a trace"):
            load_trace(tmp_path / "bad.npz")
    objects = np.array([{"an": "object"}])
    np.savez(tmp_path / "bad.npz", **{**trace._asdict(), "arrival": objects})
    with pytest.raises(DataFormatError, match="expected a trace"):
        load_trace(tmp_path / "bad.npz")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="of one run"):
        join_traces([trace, trace._replace(stale="drop")])


def test_who_starts_is_drawn_on_after_rounds_that_were_before():
    def rank(transport):
        partial = PartialAllreduce(transport, 1, first=1020)
        starters = [partial._starter(number) for number in range(8)]
        partial.finish()
        return starters

    want = initiators(0, 4, 1028)[1020:].tolist()
    assert in_threads(rank, connected(4, patience=20.0)) == [want] * 4
