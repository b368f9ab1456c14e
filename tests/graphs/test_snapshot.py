"""Neighbours from rows of a snapshot, against counting and against the definition."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from hpcjax import cost, graphs
from hpcjax.core.errors import ConfigError
from hpcjax.graphs import FullBatch, FullRefresh, OnTheFly

_PART = {"fetch": "partial", "fetch_rate": 0.4, "fetch_period": 2}
POLICIES = {
    "full batch": FullBatch(),
    "FCR": FullRefresh(period=3),
    "FCR, lazy": FullRefresh(period=3, lazy=True),
    "PR-FF": OnTheFly(period=3),
    "FR-FF": OnTheFly(period=3, refresh="full"),
    "FR-PF": OnTheFly(period=3, refresh="full", **_PART),
    "PR-PF": OnTheFly(fetch="partial"),
}
every_policy = pytest.mark.parametrize("name", POLICIES)


def make_csr(seed=0, vertices=80, edges=1200):
    """Edges with multi-edges, loops, vertices without, and a tail of degrees."""
    rng = np.random.default_rng(seed)
    receivers = (vertices * rng.random(edges) ** 2).astype(int)
    senders = rng.integers(0, vertices, edges)
    return graphs.Csr.of(graphs.make_graph(senders, receivers, vertices))


def snapshot(csr, policy, fanouts=(4, 3), kind=graphs.Snapshot, **options):
    store = csr if isinstance(csr, graphs.VersionedCsr) else graphs.VersionedCsr(csr)
    return kind(store, fanouts, policy, **{"threshold": 12, **options})


def batches(made, count, targets=range(9), seed=5):
    return [made(np.asarray(targets), graphs.Draw(seed, t)) for t in range(count)]


def lists(blocks, layer):
    """The edges of a layer by receiver."""
    own = blocks.edges_of(layer)
    ends = blocks.vertices[blocks.receivers[own]]
    found = {}
    for vertex, edge in zip(ends.tolist(), blocks.edge_ids[own].tolist(), strict=True):
        found.setdefault(vertex, []).append(edge)
    return found


@pytest.mark.acceptance("graphsnapshot", 1)
@pytest.mark.parametrize("shared", [False, True])
def test_full_batches_are_those_of_the_sampler(shared):
    csr = make_csr()
    made = snapshot(csr, FullBatch(), shared=shared)
    for number, blocks in enumerate(batches(made, 3)):
        draw = graphs.Draw(5, number)
        wanted = graphs.layerwise_blocks(csr, (4, 3), np.arange(9), draw)
        for name in ("vertices", "senders", "receivers", "edge_ids"):
            found = getattr(blocks, name)
            np.testing.assert_array_equal(found, getattr(wanted, name))
        assert blocks.edge_offsets == wanted.edge_offsets


@pytest.mark.acceptance("graphsnapshot", 1)
@pytest.mark.acceptance("graphsnapshot", 6)
@every_policy
@pytest.mark.parametrize("threshold", [0, 5, 20, 1000])
def test_whole_lists_are_whole_wherever_they_are_served_from(name, threshold):
    csr = make_csr(1)
    most = int(csr.degrees.max())
    made = snapshot(csr, POLICIES[name], (most,), threshold=threshold)
    for blocks in batches(made, 8, range(80)):
        edges = sorted(blocks.edge_ids.tolist())
        assert edges == list(range(1200))


@pytest.mark.acceptance("graphsnapshot", 3)
@pytest.mark.acceptance("graphsnapshot", 8)
@every_policy
@pytest.mark.parametrize("shared", [False, True])
def test_lists_are_sets_of_edges_of_their_vertex_as_many_as_asked_for(name, shared):
    csr, fanouts = make_csr(2), (3, 7, 11)
    owners, degrees = csr.receivers(), csr.degrees
    made = snapshot(csr, POLICIES[name], fanouts, shared=shared)
    for blocks in batches(made, 8):
        for layer, fanout in enumerate(reversed(fanouts)):
            for vertex, edges in lists(blocks, layer).items():
                assert len(set(edges)) == len(edges) == min(fanout, degrees[vertex])
                assert (owners[edges] == vertex).all()
    if name != "full batch":
        long = np.flatnonzero(degrees > 12)
        widths = [made.rows(hop, long).shape[1] for hop in range(1 if shared else 3)]
        assert widths == ([17] if shared else [5, 11, 17])


CHAINS = 2000


@pytest.fixture(scope="module")
def chains():
    """Lists of one length a graph, of as many vertices as there are chains."""

    def make(degree):
        offsets = np.arange(CHAINS + 1) * degree
        edges = np.arange(CHAINS * degree)
        return graphs.Csr(offsets, (edges % CHAINS).astype(np.int32), edges)

    return {degree: make(degree) for degree in (8, 12, 14, 40, 200)}


def inclusion(csr, made, degree, fanout=10):
    """The p of how often each place is in the last of four draws."""
    sizes = (len(csr.offsets) - 1,)
    found = batches(made, 5, range(*sizes))[-1].edge_ids
    counts = np.bincount(found % degree, minlength=degree)
    expected = sizes[0] * fanout / degree
    square = (counts - expected) ** 2 / expected
    scale = (degree - 1) / (degree - fanout)
    return stats.chi2.sf(scale * square.sum(), degree - 1)


RENEWED = ("FCR", "PR-FF", "FR-FF", "FR-PF", "PR-PF")


def renewing(name):
    """A policy that renews rows in every batch."""
    own = {"fetch_period": 1} if name == "FR-PF" else {}
    return dataclasses.replace(POLICIES[name], period=1, **own)


@pytest.mark.acceptance("graphsnapshot", 2)
@pytest.mark.parametrize("degree", [12, 14, 40, 200])
@pytest.mark.parametrize("name", RENEWED)
def test_each_neighbour_is_as_likely_after_refreshes(chains, name, degree):
    made = snapshot(chains[degree], renewing(name), (10,), threshold=0)
    assert inclusion(chains[degree], made, degree) > 1e-3 / 20


@pytest.mark.acceptance("graphsnapshot", 2)
@pytest.mark.parametrize("name", RENEWED)
def test_short_lists_are_whole_after_refreshes(chains, name):
    made = snapshot(chains[8], renewing(name), (10,), threshold=0)
    last = batches(made, 5, range(CHAINS))[-1]
    assert len(np.unique(last.edge_ids)) == len(last.edge_ids) == 8 * CHAINS


class Newest(graphs.Snapshot):
    """Keeps the last entries of a row in place of any."""

    def _keep(self, keys, sizes, counts):
        chosen = super()._keep(keys, sizes, counts)
        last = np.arange(len(chosen))[:, None] + sizes - counts
        return np.where(chosen < 0, -1, last)


class Repeats(graphs.Snapshot):
    """Draws new entries from the whole list."""

    def _draw_others(self, vertices, taken, counts, stream, **kept):
        none = taken.take(np.full_like(taken.numbers, -1))
        return super()._draw_others(vertices, none, counts, stream, **kept)


@pytest.mark.acceptance("graphsnapshot", 2)
@pytest.mark.acceptance("graphsnapshot", 7)
def test_planted_faults_are_found(chains):
    """Entries that stay too long, or come twice."""
    policy = renewing("PR-FF")
    csr = chains[40]
    assert abs(decay(csr, snapshot(csr, policy, (10,), threshold=0))).max() < 4
    kept = snapshot(csr, policy, (10,), Newest, threshold=0)
    assert abs(decay(csr, kept)).max() > 10
    twice = snapshot(csr, policy, (10,), Repeats, threshold=0)
    last = batches(twice, 4, range(CHAINS))[-1]
    assert len(np.unique(last.edge_ids)) < len(last.edge_ids)


def decay(csr, made, share=0.3, rate=3 / 15):
    """Distances in standard errors of the deleted entries that rows hold from the law.

    Rows are renewed twice before the deletion and five times after it.
    """
    rng, vertices = np.random.default_rng(0), np.arange(CHAINS)
    gone = rng.permutation(len(csr.neighbours))[: int(share * len(csr.neighbours))]
    for number in range(3):
        made(vertices, graphs.Draw(1, number))
    made.store.apply(deletes=gone)
    first = np.isin(made.rows(0, vertices), gone).sum()
    assert first >= 2000
    found = []
    for number in range(1, 6):
        made(vertices, graphs.Draw(1, 2 + number))
        left = np.isin(made.rows(0, vertices), gone).sum() / first
        law = (1 - rate) ** number
        found.append((left - law) / np.sqrt(law * (1 - law) / first))
    return np.array(found)


@pytest.mark.acceptance("graphsnapshot", 7)
def test_a_full_refresh_forgets_deleted_edges_and_invalidation_at_once(chains):
    csr, vertices = chains[40], np.arange(CHAINS)
    gone = np.random.default_rng(1).permutation(40 * CHAINS)[:8000]
    for policy, after, options in (
        (FullRefresh(period=3), 3, {}),
        (FullRefresh(period=3, lazy=True), 3, {}),
        (OnTheFly(period=50), 1, {"invalidate": True}),
        (OnTheFly(refresh="full", refresh_rate=1.0, period=3), 3, {}),
    ):
        made = snapshot(csr, policy, (10,), threshold=0, **options)
        made(vertices, graphs.Draw(2, 0))
        made.store.apply(inserts=[[1, 2]] * 50, deletes=gone)
        for number in range(1, after + 1):
            blocks = made(vertices, graphs.Draw(2, number))
            stale = np.isin(blocks.edge_ids, gone).sum()
            assert (stale == 0) == (number == after)
        rows = made.rows(0, vertices)
        assert not np.isin(rows, gone).any()
        assert (rows >= 0).any(1).all()


@pytest.mark.acceptance("graphsnapshot", 3)
@pytest.mark.parametrize("name", ["PR-FF", "FR-FF", "FR-PF", "PR-PF"])
def test_rows_hold_edges_of_some_version_and_grow_with_their_list(name):
    csr = make_csr(3)
    made, rng = snapshot(csr, renewing(name), (6,)), np.random.default_rng(3)
    owners = csr.receivers().tolist()
    alive = set(range(1200))
    for number in range(8):
        blocks = made(np.arange(80), graphs.Draw(3, number))
        for vertex, edges in lists(blocks, 0).items():
            assert len(set(edges)) == len(edges) <= 6
            assert all(owners[edge] == vertex for edge in edges)
            if name.startswith("PR"):
                degree = made.store.snapshot().degrees(np.array([vertex]))[0]
                assert len(edges) == min(degree, 6)
        gone = rng.permutation(sorted(alive))[:60].tolist()
        inserts = rng.integers(0, 80, (60, 2))
        made.store.apply(inserts, gone)
        owners += inserts[:, 1].tolist()
        alive = (alive - set(gone)) | set(range(len(owners) - 60, len(owners)))


class Recording(graphs.Snapshot):
    """Remembers who asked for neighbours."""

    def _sample(self, csr, vertices, fanout, draw):
        self.asked = [*getattr(self, "asked", []), (vertices, fanout, draw.hop)]
        return super()._sample(csr, vertices, fanout, draw)


@pytest.mark.acceptance("graphsnapshot", 4)
@every_policy
@pytest.mark.parametrize("shared", [False, True])
def test_reads_are_those_of_the_formulas(name, shared):
    csr, policy, fanouts = make_csr(4), POLICIES[name], (6, 4)
    degrees, period = csr.degrees, 3
    long = degrees > 12
    made = snapshot(csr, policy, fanouts, Recording, shared=shared)
    widths = [math.ceil(1.5 * each) for each in fanouts]
    widths = [max(widths)] * 2 if shared else widths
    own_rows = widths[:1] if shared else widths
    drawn = set()
    for number in range(10):
        made.asked = []
        made(np.arange(9), graphs.Draw(1, number))
        turn, fill = number > 0 and number % period == 0, 0
        if name in ("FCR", "PR-FF", "FR-FF", "FR-PF", "PR-PF"):
            if number == 0 or (turn and name == "FCR"):
                fill = sum(np.minimum(c, degrees[long]).sum() for c in own_rows)
            elif turn and name.startswith("FR"):
                rates = [max(1, math.floor(0.3 * c)) for c in own_rows]
                fill = len(own_rows) and sum(
                    np.minimum(rate, np.minimum(c, degrees[long])).sum()
                    for c, rate in zip(own_rows, rates, strict=True)
                )
        if turn:
            drawn = set()
        entries = hits = 0
        for vertices, fanout, hop in made.asked:
            listed = np.minimum(fanout, degrees[vertices])
            rows = long[vertices] & (name != "full batch")
            entries += listed[~rows].sum()
            kept = np.minimum(widths[hop], degrees[vertices[rows]])
            renewed = np.minimum(max(1, math.floor(0.3 * fanout)), kept)
            read = 0
            if name == "PR-PF":
                read = renewed.sum()
            elif name == "FR-PF" and number % 2:
                part = np.minimum(math.floor(0.4 * fanout), kept)
                read = (listed[rows] - part).sum()
            hits += listed[rows].sum() - read
            entries += read + (renewed.sum() if name == "PR-FF" and turn else 0)
            if name == "FCR, lazy":
                layer = 0 if shared else hop
                new = [v for v in vertices[rows] if (layer, v) not in drawn]
                drawn |= {(layer, v) for v in new}
                entries += np.minimum(widths[hop], degrees[new]).sum()
        reads = made.reads()
        assert (reads.entries, reads.hits) == (entries + fill, hits)
        assert reads.moved == 8 * hits
        assert reads.bytes == 4096 * reads.pages


def test_pages_are_those_that_entries_lie_in():
    """Lists of 1,024 int32 are a page each, and one that is asked for twice is one."""
    edges = np.arange(8 * 1024)
    csr = graphs.Csr(np.arange(9) * 1024, (edges % 8).astype(np.int32), edges)
    made = snapshot(csr, FullBatch(), (5,))
    made(np.array([1, 4, 6]), graphs.Draw(0))
    assert made.reads()[:3] == (15, 3, 3 * 4096)
    made = snapshot(csr, FullRefresh(period=2), (5, 2))
    pages = []
    for number in range(3):
        made(np.array([1]), graphs.Draw(0, number))
        pages.append(made.reads().pages)
    assert pages == [8, 0, 8]


@pytest.mark.acceptance("graphsnapshot", 10)
def test_full_refreshes_take_less_time_of_a_modelled_disk_and_partial_fetches_none():
    """The fill is among it; what is computed is timed by `graphsnapshot/loader`."""
    csr = graphs.Csr.of(graphs.rmat(16, 1_000_000, 0))
    store, rng = graphs.VersionedCsr(csr), np.random.default_rng(0)
    every = np.flatnonzero(csr.degrees)
    batches = [rng.choice(every, 16, replace=False) for _ in range(40)]

    def disk(policy, **options):
        made, seconds = graphs.Snapshot(store, (10, 10), policy, **options), 0.0
        for number, targets in enumerate(batches):
            made(targets, graphs.Draw(0, number))
            reads = made.reads()
            seconds += cost.disk_seconds(reads.pages, reads.moved)
        return seconds, made.mean_reads(), reads

    full, mean, last = disk(FullBatch())
    for shared in (False, True):
        own, *_ = disk(FullRefresh(period=40), shared=shared)
        assert full >= 1.2 * own
    partial, *_ = disk(OnTheFly(fetch="partial", period=40))
    assert partial >= 0.9 * full
    assert mean["entries"] * 40 == pytest.approx(sum(sizes(csr, batches)))
    assert mean["pages"] > 0 == mean["hits"] == last.hits


def sizes(csr, batches):
    """Entries that lists of two layers have, by hand."""
    for number, targets in enumerate(batches):
        made = graphs.layerwise_blocks(csr, (10, 10), targets, graphs.Draw(0, number))
        yield made.edge_offsets[-1]


def test_unsigned_targets_are_those_that_are_signed():
    csr = make_csr(5)
    made = [
        snapshot(csr, FullRefresh(), (6, 4))(np.arange(4, dtype=dtype), graphs.Draw(0))
        for dtype in (np.uint64, np.uint8, np.int64)
    ]
    for other in made[:2]:
        np.testing.assert_array_equal(other.vertices, made[2].vertices)
        np.testing.assert_array_equal(other.senders, made[2].senders)
    wide = graphs.Csr.of(graphs.rmat(9, 4000, 0))
    for dtype, last in ((np.uint8, 255), (np.int8, 127)):  # whose successor wraps
        own = [
            graphs.sample_neighbours(wide, np.array([last], dt), 4, graphs.Draw(0))
            for dt in (dtype, np.int64)
        ]
        np.testing.assert_array_equal(own[0].neighbours, own[1].neighbours)
        np.testing.assert_array_equal(own[0].degrees, own[1].degrees)


def test_nothing_was_read_in_the_mean_of_no_batch():
    made = snapshot(make_csr(5), FullRefresh(), (6, 4))
    assert all(np.isnan(value) for value in made.mean_reads().values())


@pytest.mark.acceptance("graphsnapshot", 5)
@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_that_of_the_arrays(shared):
    csr = make_csr(5)
    made = snapshot(csr, FullRefresh(), (6, 4), shared=shared)
    made(np.arange(4), graphs.Draw(0))
    long = int((csr.degrees > 12).sum())
    report = made.memory_report()
    assert report["entries"] == 8 * long * (9 if shared else 9 + 6)
    caches = 1 if shared else 2
    assert report["snapshot"] == report["entries"] + caches * (16 * long + 4 * 80)
    assert report["store"] == 8 * 81 + 4 * 1200


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_are_drawn_late_or_leave_give_the_same_batches(shared):
    csr = make_csr(6)
    few = np.arange(3) + 40
    want = batches(snapshot(csr, FullRefresh(period=3), shared=shared), 8, few)
    for options in ({"lazy": True}, {}):
        policy = FullRefresh(period=3, **options)
        made = snapshot(csr, policy, shared=shared, rows=25)
        assert (csr.degrees > 12).sum() > 25
        for one, other in zip(want, batches(made, 8, few), strict=True):
            np.testing.assert_array_equal(one.edge_ids, other.edge_ids)
    late = snapshot(csr, FullRefresh(period=3), shared=shared)
    blocks = late(few, graphs.Draw(5, 7))
    np.testing.assert_array_equal(blocks.edge_ids, want[7].edge_ids)


def test_the_rows_used_longest_ago_leave():
    csr = make_csr(7)
    long = np.argsort(-csr.degrees, kind="stable")[:5]
    made = snapshot(csr, OnTheFly(period=99), (3,), rows=3)
    for number, vertex in enumerate([0, 1, 2, 0, 3, 4, 0]):
        made(long[[vertex]], graphs.Draw(0, number))
    held = (made.rows(0, long) >= 0).any(1)
    assert held.tolist() == [True, False, False, True, True]


def test_a_row_that_comes_back_is_drawn_anew(chains):
    made = snapshot(chains[200], OnTheFly(period=99), (10,), rows=1)
    seen = set()
    for number in range(8):
        made(np.array([number % 2]), graphs.Draw(0, number))
        seen |= set(made.rows(0, np.array([0])).ravel().tolist())
    assert len(seen) > 40


@every_policy
def test_batches_that_are_made_again_are_the_same(name):
    csr = make_csr(8)
    want = batches(snapshot(csr, POLICIES[name]), 6)
    made = snapshot(csr, POLICIES[name])
    batches(made, 4, seed=9)
    for one, other in zip(want, batches(made, 6), strict=True):
        np.testing.assert_array_equal(one.edge_ids, other.edge_ids)
    late = snapshot(csr, POLICIES[name])
    if isinstance(POLICIES[name], OnTheFly):
        assert late.missed(4, 5) == range(4)
        with pytest.raises(ConfigError, match="batches 0 to 3 come before"):
            late(np.arange(9), graphs.Draw(5, 4))
    else:
        assert not late.missed(4, 5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FullRefresh(alpha=0.9), "alpha must be"),
        (lambda: FullRefresh(period=0), "period"),
        (lambda: OnTheFly(refresh_rate=0.0), r"refresh_rate must be in \(0, 1\]"),
        (lambda: OnTheFly(refresh_rate=1.5), r"refresh_rate must be in \(0, 1\]"),
        (lambda: OnTheFly(fetch_rate=0.4), "go with refresh=full and fetch=partial"),
        (lambda: OnTheFly(refresh="full", fetch="partial"), "go with refresh=full"),
        (lambda: OnTheFly(fetch="partial", fetch_rate=0.4, fetch_period=2), "only"),
        (lambda: snapshot(make_csr(), FullBatch(), (4, -1)), "fan-outs must be"),
        (lambda: snapshot(make_csr(), FullBatch(), threshold=-1), "threshold"),
        (lambda: snapshot(make_csr(), OnTheFly()).check_shards(2), "processes=2"),
    ],
)
def test_what_cannot_be_is_told(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_store_that_is_older_than_the_rows_is_told():
    csr = make_csr()
    made = snapshot(csr, FullRefresh())
    made.store.apply(deletes=[1])
    made(np.arange(3), graphs.Draw(0))
    made.store = graphs.VersionedCsr(csr)
    with pytest.raises(ConfigError, match="older than its snapshot"):
        made(np.arange(3), graphs.Draw(0, 1))
