"""Sampled neighbourhoods, against the whole graph and against counting."""

import dataclasses

import jax
import numpy as np
import pytest
from scipy import stats

from hpcjax import graphs, models
from hpcjax.core.errors import ConfigError
from hpcjax.data.block_source import BlockMaker

BUILDERS = {"dense": graphs.dense_blocks, "layerwise": graphs.layerwise_blocks}


def make_graph(seed, vertices=60, edges=240, **features):
    """A digraph with loops, multi-edges and vertices without edges."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, vertices - 5, (2, edges))
    ends[:, :20] = ends[:, 20:40]
    ends[1, 40:50] = ends[0, 40:50]
    return graphs.make_graph(*ends, vertices, **features)


def test_lists_are_the_graph_and_back():
    graph = make_graph(0, edge_features=np.arange(240.0)[:, None])
    csr = graphs.Csr.of(graph)
    again = csr.graph(edge_features=graph.edge_features)
    for name in ("senders", "receivers", "edge_features"):
        np.testing.assert_array_equal(getattr(again, name), getattr(graph, name))
    for vertex in range(graph.vertices):
        listed = csr.neighbours[csr.offsets[vertex] : csr.offsets[vertex + 1]]
        np.testing.assert_array_equal(listed, graph.senders[graph.receivers == vertex])


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("degree", [3, 5, 6, 40])
def test_lists_are_cut_to_the_fanout_uniformly(degree, replace):
    """Chi-square of how often each place is drawn, against equal probabilities."""
    lists, fanout = 3000, 5
    offsets, edges = np.arange(lists + 1) * degree, np.arange(lists * degree)
    csr = graphs.Csr(offsets, edges + 100, edges)
    draw = graphs.Draw(7, 1, 2)
    cut = graphs.sample_neighbours(csr, np.arange(lists), fanout, draw, replace=replace)
    kept = min(degree, fanout)
    assert (cut.degrees == kept).all()
    np.testing.assert_array_equal(cut.neighbours, cut.edge_ids + 100)
    np.testing.assert_array_equal(cut.edge_ids // degree, cut.receivers())
    different = len(set(cut.edge_ids)) == len(cut.edge_ids)
    assert different != (replace and degree > fanout)
    counts = np.bincount(cut.edge_ids % degree, minlength=degree)
    spread = 1 if replace else (degree - 1) / max(degree - kept, 1e-9)
    square = spread * ((counts - counts.mean()) ** 2).sum() / counts.mean()
    assert stats.chi2.sf(square, degree - 1) > 1e-3


def test_a_draw_depends_on_what_it_is_for_alone():
    csr = graphs.Csr(np.array([0, 50, 100]), np.arange(100), np.arange(100))
    draw = graphs.Draw(1, 2, 3)
    both = graphs.sample_neighbours(csr, np.array([1, 0]), 5, draw)
    alone = graphs.sample_neighbours(csr, np.array([1]), 5, draw)
    np.testing.assert_array_equal(both.neighbours[:5], alone.neighbours)
    for field in draw._fields:
        other = draw._replace(**{field: 9})
        changed = graphs.sample_neighbours(csr, np.array([1]), 5, other)
        assert changed.neighbours.tolist() != alone.neighbours.tolist()


@pytest.mark.acceptance("marius", 2)
@pytest.mark.parametrize("hops", [1, 2, 4])
def test_rows_and_lists_of_dense_are_what_they_should_be(hops):
    csr = graphs.Csr.of(make_graph(1))
    targets = np.array([7, 3, 59, 20])
    blocks = graphs.dense_blocks(csr, (2,) * hops, targets, graphs.Draw(0))
    rows = blocks.vertices
    assert len(set(rows)) == len(rows) == blocks.hop_offsets[-1]
    np.testing.assert_array_equal(rows[blocks.hop_offsets[-2] :], targets)
    np.testing.assert_array_equal(rows[blocks.senders], csr.neighbours[blocks.edge_ids])
    owners = csr.receivers()[blocks.edge_ids]
    np.testing.assert_array_equal(rows[blocks.receivers], owners)
    assert len(blocks.hop_offsets) == hops + 2
    for layer in range(hops):
        part = dataclasses.replace(
            blocks,
            weights=np.ones(len(owners)),
            degrees=np.ones(len(rows)),
            loops=np.zeros(len(rows)),
        ).part(layer)
        own = rows[blocks.hop_offsets[layer] :]
        ends = zip(part.graph.senders, part.graph.receivers, strict=True)
        seen = {(own[u], own[v]) for u, v in ends}
        asked = set(own[len(own) - part.targets :])
        assert {v for _, v in seen} <= asked
        assert asked - {v for _, v in seen} == {
            v for v in asked if csr.offsets[v] == csr.offsets[v + 1]
        }


@pytest.mark.acceptance("marius", 3)
def test_dense_samples_each_vertex_once_and_layers_more_often():
    csr, asked, hops = graphs.Csr.of(make_graph(2)), [], []

    def sample(csr, vertices, fanout, draw):
        asked.append(vertices)
        hops.append(draw.hop)
        return graphs.sample_neighbours(csr, vertices, fanout, draw)

    counts = {}
    for name, build in BUILDERS.items():
        asked.clear()
        build(csr, (3, 3, 3), np.arange(8), graphs.Draw(0), sample=sample)
        counts[name] = np.unique(np.concatenate(asked), return_counts=True)[1].max()
    assert counts == {"dense": 1, "layerwise": 3}
    assert hops == [0, 1, 2] * 2


@pytest.mark.acceptance("marius", 1)
@pytest.mark.acceptance("graphsnapshot", 1)
@pytest.mark.parametrize(
    ("builder", "layer", "loops", "hops"),
    [
        ("dense", "gcn", "one", 2),
        ("layerwise", "gcn", "plus_i", 1),
        ("dense", "sage", None, 4),
        ("layerwise", "gat", "one", 2),
        ("dense", "gat", "one", 3),
        ("layerwise", "gin", None, 2),
    ],
)
def test_whole_neighbourhoods_are_the_whole_graph(builder, layer, loops, hops):
    rng = np.random.default_rng(3)
    features = {"features": rng.normal(size=(60, 5)).astype(np.float32)}
    if layer == "gat":
        features["edge_features"] = rng.normal(size=(240, 2)).astype(np.float32)
    graph = make_graph(3, **features)
    csr, targets = graphs.Csr.of(graph), np.array([58, 4, 0, 17, 30])
    blocks = BUILDERS[builder](csr, (-1,) * hops, targets, graphs.Draw(0))
    maker = BlockMaker(graph, csr, np.zeros(60), 6)
    blocks = maker.batch([blocks], maker.sizes(blocks) + 7)["x"]
    how = {"graph": graph, "layer": layer, "depth": hops, "hidden": 4, "heads": 2}
    how |= {"self_loops": loops, "dropout": 0.0, "penalty": 0.1}
    whole, part = models.gnn((), 3, **how), models.gnn((hops, 6), 3, **how)
    params, state = whole.init(jax.random.key(0))

    @jax.jit
    def both(params, state):
        one = whole.apply(params, state, targets, train=True)
        return one, part.apply(params, state, blocks, train=True)

    (wanted, kept), (found, also) = both(params, state)
    np.testing.assert_allclose(found[0, :5], wanted, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, kept, also)


@pytest.mark.acceptance("gnn-models", 7)
def test_a_ladder_has_few_rungs():
    """200 batches, vertices over a factor of 16 and 2 to 8 edges for each."""
    rng = np.random.default_rng(0)
    vertices = 1000 * 16 ** rng.random(200)
    sizes = np.stack([vertices, vertices * rng.uniform(2, 8, 200)], 1).astype(int)
    ladder = graphs.Ladder(np.array([1000, 4000]))
    rungs = [ladder.rung(each) for each in sizes]
    assert len(set(rungs)) <= 12
    for each, rung in zip(sizes, rungs, strict=True):
        assert (each <= ladder.sizes(rung)).all()
        assert rung == 0 or (each > ladder.sizes(rung - 1)).any()
    np.testing.assert_allclose(
        ladder.sizes(5), np.array([1000, 4000]) * 2**2.5, rtol=1e-3
    )


@pytest.mark.parametrize(
    ("targets", "fanouts", "words"),
    [
        ([0, 1], (2, 0), "fanout"),
        ([0, 1], (-2, 2), "fanout"),
        ([0, -1], (2,), r"integers in \[0, 3\)"),
        ([0, 3], (2,), r"integers in \[0, 3\)"),
        ([0.5], (2,), "integers"),
        ([1, 1], (2,), "differ"),
    ],
)
def test_what_cannot_be_sampled_is_told(targets, fanouts, words):
    csr = graphs.Csr.of(graphs.make_graph([0, 2, 1], [1, 0, 1], vertices=3))
    with pytest.raises(ConfigError, match=words):
        graphs.dense_blocks(csr, fanouts, targets, graphs.Draw(0))
