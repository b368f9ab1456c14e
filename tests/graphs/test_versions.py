"""Lists of neighbours that change, against lists of Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import graphs
from hpcjax.core.errors import ConfigError

VERTICES = 6


def make_store(seed=0, edges=30):
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, VERTICES, (2, edges))
    return graphs.VersionedCsr(graphs.Csr.of(graphs.make_graph(*ends, VERTICES)))


class Plain:
    """The same store as lists of (number, sender)."""

    def __init__(self, csr):
        ends = np.split(np.arange(len(csr.neighbours)), csr.offsets[1:-1])
        self.lists = [[(n, csr.neighbours[n]) for n in own] for own in ends]
        self.next = len(csr.neighbours)

    def apply(self, inserts, deletes):
        gone = set(deletes)
        self.lists = [[e for e in own if e[0] not in gone] for own in self.lists]
        for sender, receiver in inserts:
            self.lists[receiver].append((self.next, sender))
            self.next += 1

    def numbers(self):
        return [number for own in self.lists for number, _ in own]


def assert_equal(lists, plain):
    vertices = np.arange(VERTICES)
    degrees = lists.degrees(vertices)
    assert degrees.tolist() == [len(own) for own in plain.lists]
    slots = np.arange(max(degrees.max(), 1))[:, None]
    positions = np.where(slots < degrees, slots, -1)
    senders, numbers = lists.read(vertices, positions)
    for vertex, own in enumerate(plain.lists):
        found = zip(numbers[:, vertex], senders[:, vertex], strict=True)
        assert [each for each in found if each[0] >= 0] == own
    np.testing.assert_array_equal(lists.find(vertices, numbers), positions)
    others = (vertices + 1) % VERTICES
    assert (lists.find(others, numbers) == -1).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_version_is_as_lists_of_python_are_and_stays_so(data):
    store = make_store(data.draw(st.integers(0, 5)))
    plain, seen = Plain(store.csr), []
    for version in range(1, 4):
        alive = st.lists(st.sampled_from(plain.numbers()), unique=True, max_size=8)
        end = st.integers(0, VERTICES - 1)
        inserts = data.draw(st.lists(st.tuples(end, end), max_size=6))
        deletes = data.draw(alive)
        shortened = {
            vertex
            for vertex, own in enumerate(plain.lists)
            if {number for number, _ in own} & set(deletes)
        }
        assert store.apply(inserts, deletes) == version == store.version
        plain.apply(inserts, deletes)
        assert set(store.snapshot().shortened.tolist()) == shortened
        assert_equal(store.snapshot(), plain)
        seen.append([list(own) for own in plain.lists])
        if len(plain.numbers()) < 9:
            break
    for version, lists in enumerate(seen, 1):
        plain.lists = lists
        assert_equal(store.snapshot(version), plain)


@pytest.mark.parametrize(
    ("inserts", "deletes", "words"),
    [
        ([[0, 6]], [], r"ends of edges must be in \[0, 6\)"),
        ([[-1, 0]], [], r"first=\[\[-1, 0\]\]"),
        ([], [30], "edges that are alive"),
        ([], [-1], "edges that are alive"),
        ([], [3], "edges that are alive"),
        ([], [4, 4], "differ"),
        ([], [1.7], r"deletes must be integers \[edges\]"),
        ([], [True], "deletes must be integers"),
        ([], 4, "deletes must be integers"),
        ([[0, 1, 2], [2, 1, 0]], [], r"inserts must be integers \[edges, 2\]"),
        ([0, 1], [], "inserts must be integers"),
    ],
)
def test_what_cannot_be_applied_is_told_and_changes_nothing(inserts, deletes, words):
    store = make_store()
    store.apply(deletes=[3])
    with pytest.raises(ConfigError, match=words):
        store.apply(inserts, deletes)
    assert store.version == 1
    assert store.snapshot().degrees(np.arange(VERTICES)).sum() == 29


def test_edges_are_found_by_narrow_integers():
    """Of the last of many vertices, one of whose inserted edges is gone."""
    last, edges = 70_000, 100_000
    offsets = np.append(np.zeros(last + 1, int), edges)
    csr = graphs.Csr(offsets, np.zeros(edges, np.int32), np.arange(edges))
    store = graphs.VersionedCsr(csr)
    store.apply(inserts=[[1, last], [2, last]])
    store.apply(deletes=[edges + 1])
    numbers = np.array([[7], [edges], [edges + 1]], np.int32)
    found = store.snapshot().find(np.array([last], np.int32), numbers)
    assert found.ravel().tolist() == [7, edges, -1]


def test_a_store_has_versions_and_its_edges_their_places():
    store = make_store()
    with pytest.raises(ConfigError, match="versions are 0 to 0"):
        store.snapshot(1)
    with pytest.raises(ConfigError, match="numbered by their places"):
        graphs.VersionedCsr(store.csr._replace(edge_ids=np.arange(30)[::-1]))
