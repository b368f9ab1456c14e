"""Group averages: whom they reach, what they hold, what late workers get."""

import threading
import time

import numpy as np
import pytest

from hpcjax import hostcomm
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, HpcjaxError
from hpcjax.hostcomm import (
    GroupAllreduce,
    Tag,
    butterfly_groups,
    butterfly_masks,
    connected,
    join_traces,
    load_trace,
    require_same,
    save_trace,
)
from tests.hostcomm.gates import Gates
from tests.hostcomm.threads import in_threads

SIZES = [(p, s) for p in (2, 4, 8, 16, 64) for s in (1, 2, 4, 8, 16, 32, 64) if s <= p]


def together(i, j, ranks, group_size, number):
    """Whether two ranks are in one group, bit by bit."""
    bits, width = int(np.log2(ranks)), int(np.log2(group_size))
    window = [(number * width + r) % bits for r in range(width)]
    return all(i >> b & 1 == j >> b & 1 for b in range(bits) if b not in window)


def mixing(ranks, group_size, number):
    same = np.vectorize(lambda i, j: together(i, j, ranks, group_size, number))
    return np.fromfunction(same, (ranks, ranks), dtype=int) / group_size


def rounds_to_mix(ranks, group_size):
    return -(-int(np.log2(ranks)) // int(np.log2(group_size)))


@pytest.mark.acceptance("wagma", 1)
@pytest.mark.parametrize(("ranks", "group_size"), SIZES)
def test_groups_share_the_ranks_out_and_soon_connect_all(ranks, group_size):
    for number in range(7):
        groups = butterfly_groups(ranks, group_size, number)
        assert sorted(rank for group in groups for rank in group) == [*range(ranks)]
        assert {len(group) for group in groups} == {group_size}
        assert all(
            together(group[0], rank, ranks, group_size, number)
            for group in groups
            for rank in group
        )
    if group_size == 1:
        return
    soon = rounds_to_mix(ranks, group_size)
    for first in range(7):
        reached = np.eye(ranks)
        for number in range(first, first + soon):
            reached = mixing(ranks, group_size, number) @ reached
        np.testing.assert_allclose(reached, np.full_like(reached, 1 / ranks))
    reached = np.linalg.multi_dot(
        [np.eye(ranks), np.eye(ranks)]
        + [mixing(ranks, group_size, number) for number in range(soon - 1)]
    )
    assert (reached == 0).any()  # not one round sooner


@pytest.mark.parametrize(
    ("ranks", "group_size", "words"),
    [
        (6, 2, "ranks must be a power of two: got ranks=6"),
        (8, 3, "group_size must be a power of two: got group_size=3"),
        (8, 0, "group_size must be a power of two: got group_size=0"),
        (4, 8, "group_size must be at most 4: got group_size=8"),
        (4.0, 2, "ranks"),
    ],
)
def test_sizes_that_cannot_be_are_refused(ranks, group_size, words):
    with pytest.raises(ConfigError, match=words):
        butterfly_masks(ranks, group_size, 0)


def run(transport, models, increments, group_size, tau, gates, **settings):
    """Returns this rank's model after each round, and the trace."""
    rank, steps = transport.rank, len(increments)
    model = models[rank].astype(np.float32)
    groups = GroupAllreduce(transport, model.size, group_size, tau, **settings)
    groups.start(model, check=False)
    if gates is not None:
        gates.hold(groups, steps)
    seen = []
    for step in range(steps):
        new = model + increments[step, rank].astype(np.float32)
        groups.post(step, new)
        model = groups.result(step, 20.0).mean(new)
        seen.append(model)
    groups.finish(20.0)
    return np.array(seen), groups.trace()


def run_all(models, increments, group_size, tau, *, gates=None, **settings):
    """Returns models [T, P, n] and the trace."""
    found = in_threads(
        lambda t: run(t, models, increments, group_size, tau, gates, **settings),
        connected(len(models), patience=20.0),
    )
    models = np.stack([seen for seen, _ in found], axis=1)
    return models, join_traces([trace for _, trace in found])


@pytest.mark.acceptance("wagma", 2)
@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_rounds_are_products_of_the_mixing_matrices(group_size):
    """Nobody late, no updates: the mean of all after ceil(L / l) rounds."""
    ranks, rng = 8, np.random.default_rng(0)
    models = rng.standard_normal((ranks, 5))
    soon = rounds_to_mix(ranks, group_size)
    got, trace = run_all(
        models, np.zeros((soon + 1, ranks, 5)), group_size, None, gates=Gates(ranks)
    )
    assert not trace.late().any()
    want = models
    for number, after in enumerate(got):
        want = mixing(ranks, group_size, number) @ want
        np.testing.assert_allclose(after, want, atol=1e-6)
    mean = np.broadcast_to(models.mean(0), models.shape)
    np.testing.assert_allclose(got[soon - 1], mean, atol=1e-6)
    if soon > 1:
        assert np.abs(got[soon - 2] - mean).max() > 1e-2


@pytest.mark.quick("False-doubling-2", "False-doubling-4", "False-doubling-8")
@pytest.mark.acceptance("wagma", 2)
@pytest.mark.parametrize("group_size", [2, 4, 8])
@pytest.mark.parametrize(
    ("wait_avoiding", "method"),
    [(True, "doubling"), (False, "doubling"), (True, "halving")],
)
def test_with_updates_rounds_follow_the_recursion(group_size, wait_avoiding, method):
    ranks, steps, tau = 8, 30, 7
    rng = np.random.default_rng(1)
    models = rng.standard_normal((ranks, 5))
    increments = 0.1 * rng.standard_normal((steps, ranks, 5))
    gates = Gates(ranks) if wait_avoiding else None
    got, trace = run_all(
        models,
        increments,
        group_size,
        tau,
        gates=gates,
        wait_avoiding=wait_avoiding,
        method=method,
    )
    assert not trace.late().any()
    want = models
    for number, after in enumerate(got):
        last = number % tau == tau - 1
        matrix = mixing(ranks, ranks if last else group_size, number)
        want = matrix @ (want + increments[number])
        np.testing.assert_allclose(after, want, atol=1e-6)
        kept = models.mean(0) + increments[: number + 1].sum(0).mean(0)
        np.testing.assert_allclose(after.mean(0, dtype=float), kept, atol=1e-6)
        equal = (after == after[:1]).all()
        assert equal == (last or group_size == ranks)


ZERO = np.zeros((4, 2))
STEPS = np.broadcast_to([[1.0, rank] for rank in range(4)], (3, 4, 2))


@pytest.mark.acceptance("wagma", 3)
def test_who_is_late_adds_its_own_model_to_the_sum_that_holds_its_old_one():
    """By hand: rank 3 is late in round 1, where it is in one group with rank 1."""
    got, trace = run_all(ZERO, STEPS[:2], 2, None, gates=Gates(4, {(1, 3)}))
    np.testing.assert_allclose(got[0], [[1, 0.5], [1, 0.5], [1, 2.5], [1, 2.5]])
    # W' of round 1: [2, 0.5], [2, 1.5], [2, 4.5] and, too late, [2, 5.5] for [1, 3].
    want = [[2, 2.5], [1.5, 2.25], [2, 2.5], [5 / 3, 10 / 3]]
    np.testing.assert_allclose(got[1], want, rtol=1e-6)
    assert trace.written.tolist() == [[0, 0, 0, 0], [1, 1, 1, 0]]


@pytest.mark.acceptance("wagma", 3)
def test_who_is_late_in_the_first_round_contributes_the_start():
    models = np.full((4, 2), 9.0)
    got, trace = run_all(models, STEPS[:1], 2, None, gates=Gates(4, {(0, 0)}))
    assert trace.written.tolist() == [[-1, 0, 0, 0]]
    # [9, 9] + [10, 10]; rank 0 adds its [10, 9].
    np.testing.assert_allclose(got[0, :2], [[29 / 3, 28 / 3], [9.5, 9.5]], rtol=1e-6)


@pytest.mark.acceptance("wagma", 3)
def test_a_late_worker_reads_the_results_of_its_own_rounds_one_by_one():
    """Its model of step 1 is in no partial sum; the buffer is not emptied by use."""
    late = {(0, 3), (1, 3)}
    _, trace = run_all(ZERO, STEPS, 2, 3, gates=Gates(4, late))
    assert trace.written[:, 3].tolist() == [-1, 0, 2]
    assert (trace.written[:, :3] == np.arange(3)[:, None]).all()


def test_the_always_rule_adds_the_own_model_in_all_partial_rounds():
    total, own = np.array([3.0, 5.0], np.float32), np.array([1.0, 2.0], np.float32)
    result = hostcomm.GroupResult(4, total, 4, 2, synchronous=False)
    assert result.mean(own).tolist() == [1.5, 2.5]
    assert result.mean(own, "always").tolist() == pytest.approx([4 / 3, 7 / 3])
    late = result._replace(written=3)
    assert late.mean(own).tolist() == pytest.approx([4 / 3, 7 / 3])
    last = result._replace(synchronous=True)
    assert last.mean(own, "always").tolist() == [1.5, 2.5]


@pytest.mark.acceptance("wagma", 7)
@pytest.mark.parametrize("tau", [1, 2, 5])
def test_no_model_is_older_than_the_period_and_one_is_as_old(tau):
    """The last rank is held back until all rounds before the synchronous one ended."""
    ranks, steps = 4, 2 * tau + 1

    def rank(transport):
        groups = GroupAllreduce(transport, 3, 2, tau)
        groups.start(np.zeros(3))
        rng = np.random.default_rng(transport.rank)
        if transport.rank == ranks - 1 and tau > 1:
            groups._rounds.wait(tau - 2, 20.0)
        for step in range(steps):
            time.sleep(float(rng.exponential(0.002)))
            groups.post(step, np.zeros(3))
            groups.result(step, 20.0)
        groups.finish(20.0)
        return groups.trace()

    trace = join_traces(in_threads(rank, connected(ranks, patience=20.0)))
    assert trace.staleness().min() >= 0
    assert trace.staleness().max() == tau - 1
    assert not trace.late()[tau - 1 :: tau].any()


@pytest.mark.acceptance("wagma", 7)
@pytest.mark.parametrize(("ranks", "group_size"), [(8, 4), (8, 2), (4, 1)])
def test_random_runs_end_and_are_as_stale_as_allowed(ranks, group_size):
    steps, tau = 24, 5
    rng = np.random.default_rng(0)
    sleeps = rng.exponential(0.002, (steps, ranks))

    def rank(transport):
        groups = GroupAllreduce(transport, 3, group_size, tau)
        groups.start(np.zeros(3))
        for step in range(steps):
            time.sleep(sleeps[step, transport.rank])
            groups.post(step, np.full(3, float(step)))
            result = groups.result(step, 20.0)
            assert result.members == (ranks if groups.is_global(step) else group_size)
            if groups.is_global(step):
                assert (result.total == ranks * step).all()
        groups.finish(20.0)
        return groups.trace()

    trace = join_traces(in_threads(rank, connected(ranks, patience=20.0)))
    assert trace.staleness().min() >= 0
    assert trace.staleness().max() <= tau - 1
    assert trace.late().any() == (group_size > 1)
    assert (np.diff(trace.arrival, axis=0) > 0).all()


@pytest.mark.acceptance("wagma", 8)
@pytest.mark.parametrize("method", ["doubling", "halving"])
def test_bytes_of_a_round_depend_on_the_group_alone(method):
    n, group_size, tau = 100_000, 4, 4

    def rank(transport):
        groups = GroupAllreduce(transport, n, group_size, tau, method=method)
        groups.start(np.zeros(n))
        found = []
        for step in range(tau):
            before = transport.counters()
            hostcomm.barrier(transport)  # of no payload
            groups.post(step, np.zeros(n))
            groups.result(step, 20.0)
            sent = transport.counters().since(before).total_sent()
            found.append((sent.payload, sent.wire))
        groups.finish(20.0)
        return found

    partial = {}
    for ranks in (4, 8):
        sent = np.array(in_threads(rank, connected(ranks, patience=20.0)), float)
        times = [2, 2, 2, np.log2(ranks)]
        if method == "halving":
            times = [1.5, 1.5, 1.5, 2 * (ranks - 1) / ranks]
        want = np.array(times) * n * 4
        for kind in range(2):
            over = sent[..., kind] / want
            assert over.min() >= 1
            assert over.max() < 1.01
        partial[ranks] = sent[:, : tau - 1, 0].mean()
    assert partial[8] == pytest.approx(partial[4], rel=1e-3)


def test_a_ring_that_is_too_small_is_an_error():
    def rank(transport):
        groups = GroupAllreduce(transport, 2, 2, None, ring=2)
        groups.start(np.zeros(2))
        if transport.rank == 1:
            with pytest.raises(HpcjaxError, match="round 2: this worker has missed 2"):
                groups._rounds.wait(2, 20.0)
            ended.set()
            return
        for step in range(3):
            groups.post(step, np.zeros(2))
            groups.result(step, 20.0)
        ended.wait(20.0)

    ended = threading.Event()
    in_threads(rank, connected(2, patience=20.0))


def test_ranks_that_begin_differently_are_told():
    def rank(transport, what):
        groups = GroupAllreduce(transport, 2, 2)
        model = np.full(2, float(transport.rank * (what == "model")))
        structure = "w" if what == "model" or transport.rank else "v"
        with pytest.raises(ConfigError, match="must be the same in all ranks") as told:
            groups.start(model, structure=structure)
        return str(told.value)

    for what, words in (
        ("model", "initial parameters"),
        ("tree", "tree of parameters"),
    ):
        told = in_threads(rank, connected(2, patience=20.0), what)
        assert all(words in each for each in told)


def test_settings_that_only_some_ranks_have_are_told():
    def rank(transport):
        settings = {"seed": 0} | ({"period": 3} if transport.rank else {})
        with pytest.raises(ConfigError, match="period must be the same in all ranks"):
            require_same(transport, settings, Tag("settings"))

    in_threads(rank, connected(2, patience=20.0))


def test_misuse_is_named():
    (alone,) = connected(1)
    with pytest.raises(ConfigError, match="tau must be an integer >= 1"):
        GroupAllreduce(alone, 2, 1, 0)
    with pytest.raises(ConfigError, match="group_size must be at most 1"):
        GroupAllreduce(alone, 2, 2)
    groups = GroupAllreduce(alone, 2, 1)
    with pytest.raises(HpcjaxError, match="`start` comes first"):
        groups.post(0, np.zeros(2))
    with pytest.raises(ConfigError, match="size must be 2: got size=3"):
        groups.start(np.zeros(3))
    groups.start(np.zeros(2))
    with pytest.raises(ConfigError, match="round 0 is next: got number=1"):
        groups.post(1, np.zeros(2))
    groups.post(0, np.zeros(2))
    with pytest.raises(ConfigError, match="0 was posted last: got step=1"):
        groups.result(1)
    groups._rounds.wait(0)
    with pytest.raises(ConfigError, match="the result of step 0 must be taken first"):
        groups.post(1, np.zeros(2))
    groups.result(0)
    groups.finish(20.0)


def test_traces_are_saved_whole(tmp_path):
    _, trace = run_all(ZERO, STEPS, 2, 3)
    for name in ("trace.npz", "trace.json"):
        save_trace(tmp_path / name, trace)
        again = load_trace(tmp_path / name)
        for got, want in zip(again, trace, strict=True):
            np.testing.assert_array_equal(got, want)
            assert np.asarray(got).dtype == np.asarray(want).dtype
    with pytest.raises(DataMissing, match="no such file"):
        load_trace(tmp_path / "none.npz")
    save_trace(tmp_path / "cut.npz", trace._replace(arrival=trace.arrival[1:]))
    with pytest.raises(DataFormatError, match="must fit each other"):
        load_trace(tmp_path / "cut.npz")
    with pytest.raises(ConfigError, match="of one run"):
        join_traces([trace, trace._replace(tau=9)])


def test_rounds_of_all_are_counted_from_the_first_of_a_run():
    with connected(1)[0] as alone:
        groups = GroupAllreduce(alone, 1, 1, 3, first=2)
        found = [groups.is_global(number) for number in range(5)]
    assert found == [True, False, False, True, False]
