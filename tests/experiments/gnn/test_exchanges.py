"""What the table of exchanges counts by hand, and its control."""

import numpy as np

from experiments.gnn import exchanges
from hpcjax import graphs


def test_the_control_lacks_one_pair_of_a_vertex_and_a_part():
    rng = np.random.default_rng(0)
    graph = graphs.make_graph(*rng.integers(0, 30, (2, 90)), vertices=30)
    owner = rng.permutation(30) % 4
    counted = exchanges.count_pairs(graph, owner, 4)
    for source in range(4):
        for to in range(4):
            sent = (owner[graph.senders] == source) & (owner[graph.receivers] == to)
            expected = len(np.unique(graph.senders[sent])) if source != to else 0
            assert counted[source, to] == expected
    less = exchanges._without_one(graph, owner)
    fewer = counted - exchanges.count_pairs(less, owner, 4)
    assert (fewer.sum(), fewer.min()) == (1, 0)
    assert graphs.partition(less, 4, owner).live.sum() == counted.sum() - 1


def test_the_digits_graph_is_of_ten_neighbours_in_both_directions():
    graph = exchanges.draw("digits")
    degrees = np.bincount(graph.receivers, minlength=1797)
    assert graph.vertices == 1797
    assert degrees.min() >= 10
    ends = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert ends == {(v, u) for u, v in ends}
