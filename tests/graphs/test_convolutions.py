"""Every layer against a dense formula in numpy, and what holds for all of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import graphs
from hpcjax.core import ConfigError
from tests.graphs import dense

VERTICES, INPUTS, WIDTH, HEADS, EDGE = 20, 6, 4, 3, 2


def random_graph(seed=0):
    """With multi-edges, loops, and vertices that receive, or send, nothing."""
    rng = np.random.default_rng(seed)
    senders, receivers = rng.integers(0, VERTICES - 3, (2, 60))
    senders[:4], receivers[:4] = [1, 1, 2, 5], [3, 3, 2, 5]
    receivers[receivers == 7] = 8
    return graphs.make_graph(
        senders,
        receivers,
        VERTICES,
        features=rng.normal(size=(VERTICES, INPUTS)),
        edge_features=rng.normal(size=(60, EDGE)),
    )


SHAPES = {
    "gcn": {"kernel": (INPUTS, WIDTH), "bias": (WIDTH,)},
    "mean": {
        "self": (INPUTS, WIDTH),
        "neighbors": (INPUTS, WIDTH),
        "bias": (WIDTH,),
    },
    "gat": {
        "kernel": (INPUTS, HEADS, WIDTH),
        "receiver": (HEADS, WIDTH),
        "sender": (HEADS, WIDTH),
        "bias": (HEADS * WIDTH,),
    },
    "gin": {
        "kernel_0": (INPUTS, 5),
        "bias_0": (5,),
        "kernel_1": (5, WIDTH),
        "bias_1": (WIDTH,),
        "epsilon": (),
        "scale": (5,),
        "shift": (5,),
    },
}
SHAPES |= {
    "sgc": {},
    "sum": {"self": (INPUTS, WIDTH), "bias": (WIDTH,)},
    "pool": {
        "self": (INPUTS, WIDTH),
        "neighbors": (5, WIDTH),
        "bias": (WIDTH,),
        "pool": (INPUTS, 5),
        "pool_bias": (5,),
    },
    "gat_mean": SHAPES["gat"] | {"bias": (WIDTH,)},
    "gat_edges": SHAPES["gat"]
    | {"edge": (EDGE, HEADS, WIDTH), "edge_attention": (HEADS, WIDTH)},
    "gine": {k: v for k, v in SHAPES["gin"].items() if k not in ("scale", "shift")}
    | {"edge": (EDGE, INPUTS)},
}
LAYERS = {
    "gcn": graphs.gcn,
    "sgc": lambda graph, x, params: graphs.propagate_powers(graph, x, 3),
    "mean": graphs.sage,
    "sum": functools.partial(graphs.sage, aggregate="gcn"),
    "pool": functools.partial(graphs.sage, aggregate="pool"),
    "gat": graphs.gat,
    "gat_mean": functools.partial(graphs.gat, combine="mean"),
    "gat_edges": graphs.gat,
    "gin": graphs.gin,
    "gine": graphs.gin,
}
RUN = {name: jax.jit(layer) for name, layer in LAYERS.items()}


def params_of(name, seed=1):
    rng = np.random.default_rng(seed)
    return {key: rng.normal(size=shape) for key, shape in SHAPES[name].items()}


def by_formula(name, graph, x, params):
    """What the dense formula gives for the edges of a graph."""
    ends = graph.senders, graph.receivers
    a = dense.adjacency(*ends, graph.vertices)
    return {
        "gcn": lambda: dense.gcn(a, x, params),
        "sgc": lambda: dense.sgc(a, x, 3),
        "mean": lambda: dense.sage(a, x, params, "mean"),
        "sum": lambda: dense.sage(a, x, params, "gcn"),
        "pool": lambda: dense.sage(a, x, params, "pool"),
        "gat": lambda: dense.gat(a, x, params, "concat"),
        "gat_mean": lambda: dense.gat(a, x, params, "mean"),
        "gat_edges": lambda: dense.gat_of_edges(*ends, graph.edge_features, x, params),
        "gin": lambda: dense.gin(a, x, params),
        "gine": lambda: dense.gine(*ends, graph.edge_features, x, params),
    }[name]()


def as_dtype(tree, dtype):
    """Casts what is no number of a vertex."""
    return jax.tree.map(
        lambda leaf: leaf if leaf.dtype.kind == "i" else np.asarray(leaf, dtype), tree
    )


@pytest.mark.acceptance("gnn-models", 1)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_its_dense_formula_and_the_gradient_differences(name):
    graph, params = random_graph(), params_of(name)
    wanted = by_formula(name, graph, graph.features, params)
    narrow = as_dtype((graph, graph.features, params), "float32")
    y = RUN[name](*narrow)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    with jax.enable_x64(True):
        y = RUN[name](graph, graph.features, params)
        assert y.dtype == jnp.float64
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-12 * scale)
        check_gradient(name, graph, params)


def check_gradient(name, graph, params):
    """The derivative in a random direction, against that of the dense formula."""
    x, step = graph.features, 1e-6
    rng = np.random.default_rng(2)
    draw = jax.tree.map(lambda leaf: rng.normal(size=np.shape(leaf)), (x, params))
    weight = rng.normal(size=by_formula(name, graph, x, params).shape)

    def formula(shift):
        moved = jax.tree.map(lambda p, d: p + shift * d, (x, params), draw)
        return np.sum(weight * by_formula(name, graph, *moved))

    def layer(x, params):
        return jnp.sum(weight * LAYERS[name](graph, x, params))

    grads = jax.jit(jax.grad(layer, argnums=(0, 1)))(x, params)
    slopes = jax.tree.map(lambda g, d: float(np.sum(g * d)), grads, draw)
    wanted = (formula(step) - formula(-step)) / (2 * step)
    assert sum(jax.tree.leaves(slopes)) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.acceptance("gnn-models", 3)
@pytest.mark.parametrize("name", LAYERS)
def test_renamed_vertices_and_shuffled_edges_rename_the_outputs(name):
    graph, params = as_dtype((random_graph(), params_of(name)), "float32")
    rng = np.random.default_rng(3)
    new, order = rng.permutation(VERTICES), rng.permutation(len(graph.senders))
    old = np.argsort(new)
    renamed = graphs.make_graph(
        new[graph.senders][order],
        new[graph.receivers][order],
        VERTICES,
        features=graph.features[old],
        edge_features=graph.edge_features[order],
    )
    y = RUN[name](graph, graph.features, params)
    moved = RUN[name](renamed, renamed.features, params)
    np.testing.assert_allclose(moved, y[old], rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.acceptance("gnn-models", 4)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("name", LAYERS)
def test_padding_changes_no_live_output_whatever_it_holds(name, backend, monkeypatch):
    # On a GPU sums over few vertices are products, in which a NaN could spread.
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    graph, params, run = random_graph(), params_of(name), jax.jit(LAYERS[name])
    padded = graphs.pad_graph(graph, VERTICES + 7, len(graph.senders) + 9)
    with jax.enable_x64(True):
        y = run(graph, graph.features, params)
        for garbage in (0.0, 1e30, np.nan):
            features = padded.features.copy()
            features[VERTICES:] = garbage
            given = dataclasses.replace(padded, features=features)
            wide = run(given, features, params)
            scale = np.abs(y).max()
            np.testing.assert_allclose(
                wide[:VERTICES], y, rtol=0, atol=1e-13 * max(1, scale)
            )


@pytest.mark.parametrize("how", ["one", "plus_i"])
def test_gcn_has_the_self_loops_asked_for(how):
    graph, params = random_graph(), params_of("gcn")
    looped = graphs.add_self_loops(graph, how)
    a = dense.adjacency(graph.senders, graph.receivers, VERTICES)
    wanted = dense.gcn(dense.with_loops(a, how), graph.features, params)
    with jax.enable_x64(True):
        y = RUN["gcn"](looped, graph.features, params)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-12)
    other = {"one": "plus_i", "plus_i": "one"}[how]
    different = dense.gcn(dense.with_loops(a, other), graph.features, params)
    assert np.abs(y - different).max() > 0.1


def test_gcn_of_a_weighted_graph():
    graph, params = random_graph(), params_of("gcn")
    weights = np.random.default_rng(4).uniform(0.1, 2, len(graph.senders))
    a = dense.adjacency(graph.senders, graph.receivers, VERTICES, weights)
    with jax.enable_x64(True):
        y = graphs.gcn(graph, graph.features, params, weights=jnp.asarray(weights))
    wanted = dense.gcn(a, graph.features, params)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gcn", "mean", "pool", "gat", "gin"])
def test_sparse_rows_are_their_dense_matrix(name):
    graph, params = as_dtype((random_graph(), params_of(name)), "float32")
    x = np.where(np.random.default_rng(5).random(graph.features.shape) < 0.3, 1, 0)
    rows, columns = np.nonzero(x)
    sparse = graphs.SparseRows(
        offsets=np.searchsorted(rows, np.arange(VERTICES + 1)),
        columns=columns,
        values=x[rows, columns].astype(np.float32),
        width=INPUTS,
    )
    np.testing.assert_array_equal(graphs.make_dense(sparse), x)
    np.testing.assert_allclose(
        RUN[name](graph, sparse, params),
        RUN[name](graph, x.astype(np.float32), params),
        atol=1e-5,
    )


def test_dropped_weights_of_attention_are_scaled_up():
    graph, params = as_dtype((random_graph(), params_of("gat")), "float32")
    looped = graphs.add_self_loops(graph)

    @jax.jit
    @jax.vmap
    def run(key):
        return graphs.gat(looped, graph.features, params, dropout=0.5, key=key)

    several = run(jax.random.split(jax.random.key(0), 4000))
    exact = RUN["gat"](looped, graph.features, params)
    assert float(jnp.std(several, 0).max()) > 0.1
    error = 5 * jnp.std(several, 0) / np.sqrt(4000) + 1e-5
    assert (jnp.abs(several.mean(0) - exact) <= error).all()


def test_bad_input_is_refused():
    graph = random_graph()
    x = graph.features
    with pytest.raises(ConfigError, match=r"aggregate must be .* got 'max'"):
        graphs.sage(graph, x, params_of("pool"), aggregate="max")
    with pytest.raises(ConfigError, match=r"reduce must be .*'prod'"):
        graphs.spread(graph, x, reduce="prod")
    with pytest.raises(ConfigError, match="the 20 vertices: got 19"):
        graphs.spread(graph, x[1:])
    with pytest.raises(ConfigError, match=r"combine must be .*'men'"):
        graphs.gat(graph, x, params_of("gat"), combine="men")
    with pytest.raises(ConfigError, match=r"dropout=0\.5 of attention needs a key"):
        graphs.gat(graph, x, params_of("gat"), dropout=0.5)
    with pytest.raises(ConfigError, match=r"rate must be .*got 1"):
        graphs.drop_entries(x, 1.0, jax.random.key(0))
    with pytest.raises(ConfigError, match="powers must be at least 0: got -1"):
        graphs.propagate_powers(graph, x, -1)
    with pytest.raises(ConfigError, match=r"features must be 6.*got 5"):
        graphs.gcn(graph, x[:, 1:], params_of("gcn"))
    sparse = graphs.SparseRows(
        offsets=np.zeros(21, int), columns=np.zeros(0, int), values=np.zeros(0), width=6
    )
    with pytest.raises(ConfigError, match="dense ones: got SparseRows"):
        graphs.gin(graph, sparse, params_of("gine"))
    plain = dataclasses.replace(graph, edge_features=None)
    for name in ("gat_edges", "gine"):
        with pytest.raises(ConfigError, match="the graph has no features"):
            LAYERS[name](plain, x, params_of(name))
