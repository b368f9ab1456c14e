"""Layers whose edges have weights of both ends, against dense matrices in numpy."""

import jax
import numpy as np
import pytest

from hpcjax import graphs
from hpcjax.core.errors import ConfigError
from tests.graphs import dense

INPUTS, OUTPUTS, KERNELS = 5, 3, 2
SHAPES = {
    "commnet": {"self": (5, 3), "neighbors": (5, 3), "bias": (3,)},
    "vanilla_attention": {"kernel": (5, 3), "bias": (3,)},
    "agnn": {"kernel": (5, 3), "beta": (), "bias": (3,)},
    "monet": {
        "kernel": (5, KERNELS, 3),
        "places": (2, 4),
        "places_bias": (4,),
        "mean": (KERNELS, 4),
        "precision": (KERNELS, 4),
        "bias": (3,),
    },
    "g_gcn": {
        **dict.fromkeys(("self", "neighbors", "receiver", "sender"), (5, 3)),
        "bias": (3,),
    },
    "edge_conv": {"kernel_0": (10, 4), "bias_0": (4,), "kernel_1": (4, 3)}
    | {"bias_1": (3,)},
}


def draw(seed, loops):
    """A graph with edges that are there twice, and a vertex without any."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(0, 7, (2, 20))
    ends = np.concatenate([ends, ends[:, :4]], 1)
    graph = graphs.make_graph(*ends, 8)
    if loops:
        graph = graphs.add_self_loops(graph, "one")
    return graph, dense.adjacency(graph.senders, graph.receivers, 8), rng


def commnet(a, x, p):
    return x @ p["self"] + a @ x @ p["neighbors"] + p["bias"]


def vanilla_attention(a, x, p):
    return (a * (x @ x.T)) @ x @ p["kernel"] + p["bias"]


def agnn(a, x, p):
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    powers = a * np.exp(p["beta"] * unit @ unit.T)
    total = powers.sum(1, keepdims=True)
    shares = np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)
    return shares @ x @ p["kernel"] + p["bias"]


def monet(a, x, p):
    root = a.sum(1) ** -0.5
    total = np.zeros((len(x), OUTPUTS))
    for g in range(KERNELS):
        for v, u in np.argwhere(a):
            at = np.tanh(np.array([root[v], root[u]]) @ p["places"] + p["places_bias"])
            far = p["precision"][g] * (at - p["mean"][g])
            weight = a[v, u] * np.exp(-0.5 * far @ far)
            total[v] += weight * x[u] @ p["kernel"][:, g]
    return total + p["bias"]


def g_gcn(a, x, p):
    total = x @ p["self"] + p["bias"]
    for v, u in np.argwhere(a):
        gate = 1 / (1 + np.exp(-(x[v] @ p["receiver"] + x[u] @ p["sender"])))
        total[v] += a[v, u] * gate * (x[u] @ p["neighbors"])
    return total


def edge_conv(a, x, p):
    def see(v, u):
        both = np.concatenate([x[v], x[u] - x[v]])
        hidden = np.maximum(both @ p["kernel_0"] + p["bias_0"], 0)
        return hidden @ p["kernel_1"] + p["bias_1"]

    seen = [[see(v, u) for u in np.flatnonzero(row)] for v, row in enumerate(a)]
    return np.stack([np.max(own, 0) if own else np.zeros(OUTPUTS) for own in seen])


ORACLES = {
    each.__name__: each
    for each in (commnet, vanilla_attention, agnn, monet, g_gcn, edge_conv)
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_layers_are_their_matrices(name):
    """With edges that are there twice, self-loops, and a vertex that has no edge."""
    layer = jax.jit(getattr(graphs, name))
    for seed in range(3):
        graph, a, rng = draw(seed, loops=name in ("agnn", "monet"))
        params = {n: rng.normal(size=shape) for n, shape in SHAPES[name].items()}
        x = rng.normal(size=(8, INPUTS))
        x[2] = 0
        found = layer(graph, x.astype("f4"), jax.tree.map(np.float32, params))
        expected = ORACLES[name](a, x, params)
        assert found.shape == (8, OUTPUTS)
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.acceptance("gnn-parallelism", 5)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_vertices_may_be_numbered_in_any_order(name):
    graph, _, rng = draw(5, loops=name in ("agnn", "monet"))
    params = {n: rng.normal(size=s).astype("f4") for n, s in SHAPES[name].items()}
    x, order = rng.normal(size=(8, INPUTS)).astype("f4"), rng.permutation(8)
    places = np.argsort(order)
    ends = places[np.asarray(graph.senders)], places[np.asarray(graph.receivers)]
    turned = graphs.make_graph(*ends, 8)
    layer = jax.jit(getattr(graphs, name))
    found, expected = layer(turned, x[order], params), layer(graph, x, params)
    np.testing.assert_allclose(found, expected[order], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.sum(0), expected.sum(0), rtol=1e-4, atol=1e-3)


def test_gradients_of_features_that_are_zero_are_finite():
    graph, _, rng = draw(0, loops=True)
    params = {n: rng.normal(size=s).astype("f4") for n, s in SHAPES["agnn"].items()}
    slope = jax.grad(lambda x: graphs.agnn(graph, x, params).sum())
    assert np.isfinite(slope(np.zeros((8, INPUTS), "f4"))).all()


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_features_of_another_width_are_refused(name):
    graph, _, _ = draw(0, loops=True)
    params = {n: np.zeros(shape, "f4") for n, shape in SHAPES[name].items()}
    with pytest.raises(ConfigError, match="features must be"):
        getattr(graphs, name)(graph, np.zeros((8, 9), "f4"), params)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_are_compared_and_not_spread(name):
    graph, _, _ = draw(0, loops=True)
    layer = getattr(graphs, name)
    params = {n: np.zeros(shape, "f4") for n, shape in SHAPES[name].items()}
    for rows in (7, 9):
        with pytest.raises(ConfigError, match="a row for each of the 8 vertices"):
            layer(graph, np.zeros((rows, INPUTS), "f4"), params)
    x = np.zeros((8, INPUTS), "f4")
    first = {"self", "kernel", "kernel_0"}  # which say the sizes of the others
    for other in params.keys() - first - {"places"}:
        wrong = params | {other: np.zeros((1,) * max(params[other].ndim, 1), "f4")}
        with pytest.raises(ConfigError, match=f"{other} must be"):
            layer(graph, x, wrong)
