"""Making, joining and padding graphs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import graphs
from hpcjax.core import ConfigError


def rows(offsets, columns, values=None, width=3):
    values = np.ones(len(columns)) if values is None else np.asarray(values)
    return graphs.SparseRows(
        offsets=np.asarray(offsets),
        columns=np.asarray(columns),
        values=values,
        width=width,
    )


def test_edges_are_sorted_by_receiver_and_keep_what_they_have():
    graph = graphs.make_graph(
        [3, 0, 2, 0, 3],
        [1, 0, 1, 2, 1],
        4,
        edge_type=[10, 11, 12, 13, 14],
        edge_features=[[0.0], [1.0], [2.0], [3.0], [4.0]],
    )
    assert graph.receivers.tolist() == [0, 1, 1, 1, 2]
    assert graph.senders.tolist() == [0, 3, 2, 3, 0]
    assert graph.edge_type.tolist() == [11, 10, 12, 14, 13]
    assert graph.edge_features.ravel().tolist() == [1, 0, 2, 4, 3]
    assert graph.senders.dtype == graph.receivers.dtype == np.int32


def test_self_loops_have_a_type_and_the_mean_of_what_is_received():
    graph = graphs.make_graph(
        [1, 2, 0],
        [0, 0, 0],
        3,
        edge_type=[0, 1, 0],
        edge_features=[[1.0], [3.0], [9.0]],
    )
    one = graphs.add_self_loops(graph)
    assert one.senders.tolist() == [1, 2, 0, 1, 2]
    assert one.receivers.tolist() == [0, 0, 0, 1, 2]
    assert one.edge_type.tolist() == [0, 1, 2, 2, 2]
    assert one.edge_features.ravel().tolist() == [1, 3, 2, 0, 0]
    assert len(graphs.add_self_loops(graph, "plus_i").senders) == 6
    with pytest.raises(ConfigError, match="got 'two'"):
        graphs.add_self_loops(graph, "two")


def test_a_padded_graph_has_its_own_edges_first():
    graph = graphs.make_graph([1, 0], [0, 1], 2, features=rows([0, 1, 3], [0, 1, 2]))
    padded = graphs.pad_graph(graph, 4, 5)
    assert padded.receivers.tolist() == [0, 1, 3, 3, 3]
    assert padded.senders.tolist() == [1, 0, 3, 3, 3]
    assert graphs.make_dense(padded.features).tolist() == [
        [1, 0, 0],
        [0, 1, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert graphs.pad_graph(graph, 2, 2).senders.tolist() == [1, 0]
    for vertices, edges in ((1, 2), (3, 1), (2, 3)):
        with pytest.raises(ConfigError, match=f"vertices={vertices}, edges={edges}"):
            graphs.pad_graph(graph, vertices, edges)


def test_joined_graphs_have_no_edge_between_them():
    one = graphs.make_graph([0, 1], [1, 1], 2, features=rows([0, 1, 1], [2]))
    two = graphs.make_graph([0], [0], 1, features=rows([0, 2], [0, 1]))
    joined, number = graphs.join_graphs([one, two, one])
    assert joined.vertices == 5
    assert joined.senders.tolist() == [0, 1, 2, 3, 4]
    assert joined.receivers.tolist() == [1, 1, 2, 4, 4]
    assert number.tolist() == [0, 0, 1, 2, 2]
    dense = [graphs.make_dense(each.features) for each in (one, two, one)]
    np.testing.assert_array_equal(
        graphs.make_dense(joined.features), np.concatenate(dense)
    )
    plain = graphs.make_graph([0], [0], 1)
    with pytest.raises(ConfigError, match="2 graphs of 2 forms"):
        graphs.join_graphs([one, plain])
    with pytest.raises(ConfigError, match="0 graphs"):
        graphs.join_graphs([])
    other = graphs.make_graph([0], [0], 1, features=rows([0, 0], [], width=4))
    with pytest.raises(ConfigError, match=r"equally many features: got \[3, 4\]"):
        graphs.join_graphs(each for each in (one, other))


def test_bad_edges_are_refused():
    make = graphs.make_graph
    with pytest.raises(
        ConfigError, match="senders contains 71, but the graph has 70 vertices"
    ):
        make([3, 71], [0, 0], 70)
    with pytest.raises(ConfigError, match="receivers contains -1"):
        make([0], [-1], 70)
    with pytest.raises(ConfigError, match="each of the 2 edges: got 1"):
        make([0, 1], [1], 2)
    with pytest.raises(ConfigError, match=r"senders must be .* integers: got float64"):
        make([0.5], [1], 2)
    with pytest.raises(ConfigError, match=r"edge_type must have .*: got 2"):
        make([0], [1], 2, edge_type=[1, 2])
    with pytest.raises(ConfigError, match="features must be finite"):
        make([0], [1], 2, features=[[np.nan], [0.0]])
    with pytest.raises(ConfigError, match="each of the 2 vertices: got 3"):
        make([0], [1], 2, features=np.ones((3, 1)))
    with pytest.raises(ConfigError, match="numbers with two axes"):
        make([0], [1], 2, features=np.ones(2))
    with pytest.raises(ConfigError, match="no edge_type and no edge_features"):
        graphs.symmetrize(make([0], [1], 2, edge_type=[0]))
    with pytest.raises(ConfigError, match="senders contains 4294967299"):
        make(np.array([2**32 + 3]), [0], 70)
    with pytest.raises(ConfigError, match=r"edge_type must be in .*got 4294967299"):
        make([0], [0], 1, edge_type=[2**32 + 3])
    with pytest.raises(ConfigError, match=r"vertices must be an integer: got 2\.5"):
        make([0], [0], 2.5)
    with pytest.raises(ConfigError, match="vertices must be at least 0: got -1"):
        make([], [], -1)
    assert len(make([], [], 2).senders) == 0
    assert make([0], [0], np.int64(1)).vertices == 1


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_a_graph_made_by_hand_is_checked(array):
    make = graphs.Graph
    zero, one = array([0, 0]), array([0, 1])
    assert make(senders=zero, receivers=one, vertices=2).vertices == 2
    with pytest.raises(ConfigError, match="receivers must not decrease"):
        make(senders=zero, receivers=one[::-1], vertices=2)
    with pytest.raises(ConfigError, match="senders contains 1"):
        make(senders=one, receivers=zero, vertices=1)
    with pytest.raises(ConfigError, match="equally many: got 2 and 1"):
        make(senders=one, receivers=zero[:1], vertices=2)
    graph = make(senders=zero, receivers=one, vertices=2)
    shapes = jax.eval_shape(lambda graph: graph, graph)
    assert shapes.receivers.shape == (2,)
    found = jax.jit(lambda graph: jax.tree.map(lambda x: x[::-1], graph).receivers)
    assert found(graph).tolist() == [1, 0]
    pair = jax.tree.map(lambda x: np.stack([x[::-1], x]), graph)
    assert jax.vmap(lambda graph: graph.receivers)(pair).tolist() == [[1, 0], [0, 1]]


def test_the_mean_of_many_low_numbers_is_not_lost():
    many = np.full((5000, 1), 3, np.float16)
    graph = graphs.make_graph(
        np.ones(5000, int), np.zeros(5000, int), 2, edge_features=many
    )
    looped = graphs.add_self_loops(graph)
    assert looped.edge_features[5000] == 3
    assert looped.edge_features.dtype == np.float16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([0, 1], [0], [1.0, 2.0]), "columns and values"),
        (([1, 1], [0]), "from 0 to the 1 entries"),
        (([0, 2, 1, 2], [0, 1]), "must not decrease"),
        (([0, 1], [3]), r"in \[0, 3\): got 3, 3"),
        (([0, 1], [0], [np.inf]), "must be finite"),
        (([0, 1], [0.5]), "must be integers: got float64"),
        (([0, 1], [[0]]), "one axis each"),
        ((np.array([0, 2, 1, 2], np.uint64), [0, 1]), "must not decrease"),
    ],
)
def test_bad_sparse_rows_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        rows(*given)
