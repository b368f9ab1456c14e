"""The layers against PyTorch Geometric's, with its weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import graphs
from tests.graphs.test_convolutions import EDGE, INPUTS, RUN, random_graph

torch = pytest.importorskip("torch", reason="the oracle of these tests is torch")
nn = pytest.importorskip("torch_geometric.nn", reason="it is the oracle of these tests")
pytestmark = pytest.mark.acceptance("gnn-models", 2)


def array(tensor):
    return jnp.asarray(tensor.detach().numpy())


def compare(name, graph, params, layer, *extra):
    ends = torch.tensor(np.stack([graph.senders, graph.receivers]), dtype=torch.int64)
    x = graph.features.astype(np.float32)
    given = [torch.tensor(each.astype(np.float32)) for each in extra]
    wanted = layer(torch.tensor(x), ends, *given).detach().numpy()
    ours = RUN[name](graph, x, params)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)


def attention(layer):
    shape = (INPUTS, 3, 4)
    return {
        "kernel": array(layer.lin.weight).T.reshape(shape),
        "receiver": array(layer.att_dst)[0],
        "sender": array(layer.att_src)[0],
        "bias": array(layer.bias),
    }


def mlp(layer, *more):
    one, _, two = layer.nn
    return {
        "kernel_0": array(one.weight).T,
        "bias_0": array(one.bias),
        "kernel_1": array(two.weight).T,
        "bias_1": array(two.bias),
        "epsilon": array(layer.eps),
        **dict(more),
    }


def perceptron():
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, 5), torch.nn.ReLU(), torch.nn.Linear(5, 4)
    )


def test_gcn():
    graph = random_graph()
    layer = nn.GCNConv(INPUTS, 4)
    params = {"kernel": array(layer.lin.weight).T, "bias": array(layer.bias)}
    # PyTorch Geometric adds the loops itself.
    x = torch.tensor(graph.features.astype(np.float32))
    ends = torch.tensor(np.stack([graph.senders, graph.receivers]), dtype=torch.int64)
    wanted = layer(x, ends).detach().numpy()
    looped = graphs.add_self_loops(graph)
    ours = RUN["gcn"](looped, graph.features.astype(np.float32), params)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "aggregate"), [("mean", "mean"), ("pool", "max")])
def test_sage(name, aggregate):
    layer = nn.SAGEConv(INPUTS, 4, aggr=aggregate, project=name == "pool")
    params = {
        "self": array(layer.lin_r.weight).T,
        "neighbors": array(layer.lin_l.weight).T,
        "bias": array(layer.lin_l.bias),
    }
    if name == "pool":
        # It takes its own features after the projection, too.
        width = layer.lin.weight.shape[0]
        layer.lin_r.weight.data.zero_()
        params |= {
            "self": jnp.zeros((INPUTS, 4)),
            "pool": array(layer.lin.weight).T,
            "pool_bias": array(layer.lin.bias),
        }
        assert width == INPUTS
    compare(name, random_graph(), params, layer)


def test_gat():
    for name, concat in (("gat", True), ("gat_mean", False)):
        layer = nn.GATConv(INPUTS, 4, heads=3, concat=concat, add_self_loops=False)
        compare(name, random_graph(), attention(layer), layer)


def test_gat_of_edges_with_loops_that_have_their_mean():
    graph = random_graph()
    layer = nn.GATConv(INPUTS, 4, heads=3, edge_dim=EDGE)
    params = attention(layer) | {
        "edge": array(layer.lin_edge.weight).T.reshape(EDGE, 3, 4),
        "edge_attention": array(layer.att_edge)[0],
    }
    ends = torch.tensor(np.stack([graph.senders, graph.receivers]), dtype=torch.int64)
    x, f = (
        torch.tensor(each.astype(np.float32))
        for each in (graph.features, graph.edge_features)
    )
    wanted = layer(x, ends, f).detach().numpy()
    looped = graphs.add_self_loops(graph)
    ours = RUN["gat_edges"](looped, graph.features.astype(np.float32), params)
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-5)


def test_gin_and_gine():
    graph = random_graph()
    layer = nn.GINConv(perceptron(), eps=0.3)
    compare("gin", graph, mlp(layer), layer)
    layer = nn.GINEConv(perceptron(), eps=0.3, edge_dim=EDGE)
    layer.lin.bias.data.zero_()
    params = mlp(layer, ("edge", array(layer.lin.weight).T))
    compare("gine", graph, params, layer, graph.edge_features)
