"""Layers in local and in global form, against dense matrices in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import graphs
from hpcjax.core.errors import ConfigError
from hpcjax.graphs import global_forms
from tests.graphs import dense
from tests.graphs import test_edge_weights as of_edges

LOOPED = ("gcn", "sgc", "gat", "agnn", "monet", "ppnp", "appnp", "arma", "s2gc")
BOTH = sorted(global_forms.LOCAL.keys() & global_forms.GLOBAL.keys())
ALONE = sorted(global_forms.GLOBAL.keys() - global_forms.LOCAL.keys())
PLAIN = {"kernel": (5, 3), "bias": (3,)}
SHAPES = of_edges.SHAPES | {
    **dict.fromkeys(("gcn", "sgc", "ppnp", "appnp", "s2gc"), PLAIN),
    "sage": {"self": (5, 3), "bias": (3,)},
    "gin": {"kernel_0": (5, 4), "bias_0": (4,), "kernel_1": (4, 3), "bias_1": (3,)}
    | {"epsilon": ()},
    "gat": {"kernel": (5, 2, 3), "receiver": (2, 3), "sender": (2, 3), "bias": (6,)},
    "chebnet": {"kernel": (4, 5, 3), "bias": (3,)},
    "arma": {"first": (5, 2, 3), "root": (5, 2, 3), "kernel": (2, 3, 3), "bias": (3,)},
}


def chebnet(a, x, p):
    """By cos(t arccos λ) of the values λ of −S, which is symmetric."""
    values, vectors = np.linalg.eigh(-dense.normalized(a))
    angle = np.arccos(np.clip(values, -1, 1))
    every = [vectors * np.cos(t * angle) @ vectors.T for t in range(4)]
    return sum(m @ x @ k for m, k in zip(every, p["kernel"], strict=True)) + p["bias"]


def ppnp(a, x, p):
    matrix = np.eye(len(a)) - 0.9 * dense.normalized(a)
    return 0.1 * np.linalg.solve(matrix, x @ p["kernel"] + p["bias"])


def appnp(a, x, p, steps=10):
    """The closed form of the sum: (0.9 S)^t Z + 0.1 Σ_{i < t} (0.9 S)^i Z."""
    powers = [np.linalg.matrix_power(0.9 * dense.normalized(a), t) for t in range(11)]
    return (powers[steps] + 0.1 * sum(powers[:steps])) @ (x @ p["kernel"] + p["bias"])


def arma(a, x, p):
    s, found = dense.normalized(a), []
    for k in range(2):
        root = x @ p["root"][:, k] + p["bias"]
        z = np.maximum(s @ x @ p["first"][:, k] + root, 0)
        found.append(np.maximum(s @ z @ p["kernel"][k] + root, 0))
    return np.mean(found, 0)


def s2gc(a, x, p):
    powers = [np.linalg.matrix_power(dense.normalized(a), t) for t in range(1, 5)]
    mean = sum(0.95 * m @ x + 0.05 * x for m in powers) / 4
    return mean @ p["kernel"] + p["bias"]


ORACLES = of_edges.ORACLES | {
    "gcn": dense.gcn,
    "sgc": lambda a, x, p: dense.sgc(a, x, 2) @ p["kernel"] + p["bias"],
    "sage": lambda a, x, p: dense.sage(a, x, p, "gcn"),
    "gin": dense.gin,
    "gat": lambda a, x, p: dense.gat(a, x, p, "concat"),
    "chebnet": chebnet,
    "ppnp": ppnp,
    "appnp": appnp,
    "arma": arma,
    "s2gc": s2gc,
}


def draw(seed, *, both_ways=False):
    """Three loops, edges that are there twice or more often, and two lone vertices."""
    rng = np.random.default_rng(seed)
    u = rng.integers(0, 6, 9)
    v = (u + rng.integers(1, 6, 9)) % 6
    u, v = np.append(u, u[:2]), np.append(v, v[:2])
    if both_ways:
        u, v = np.append(u, v), np.append(v, u)
    loops = rng.permutation(8)[:3]
    return graphs.make_graph(np.append(u, loops), np.append(v, loops), 8), rng


def every(graph, looped, x, params):
    """Returns outputs by name and form of all layers."""
    found = {}
    for name, own in params.items():
        for form in ("local", "global"):
            if name in (global_forms.LOCAL if form == "local" else global_forms.GLOBAL):
                given = looped if name in LOOPED else graph
                found[name, form] = graphs.gnn_layer(name, form)(given, x, own)
    return found


@pytest.mark.acceptance("gnn-parallelism", 1)
@pytest.mark.parametrize("names", [BOTH, ALONE], ids=["both forms", "matrices alone"])
def test_both_forms_are_the_dense_matrices_on_ten_graphs(names):
    compute = jax.jit(every)
    for seed in range(10):
        graph, rng = draw(seed, both_ways=names is ALONE)
        looped = graphs.add_self_loops(graph, "one")
        params = {
            n: {k: rng.normal(size=s) for k, s in SHAPES[n].items()} for n in names
        }
        x = rng.normal(size=(8, 5)) / 2
        x[2] = 0
        narrow = jax.tree.map(np.float32, params)
        found = compute(graph, looped, x.astype("f4"), narrow)
        assert len(found) == len(names) * (2 if names is BOTH else 1)
        for (name, form), y in found.items():
            given = looped if name in LOOPED else graph
            a = dense.adjacency(given.senders, given.receivers, 8)
            expected = ORACLES[name](a, x, params[name])
            largest = max(np.abs(expected).max(), 1)
            np.testing.assert_allclose(
                y, expected, rtol=0, atol=1e-5 * largest, err_msg=f"{name}, {form}"
            )


def test_appnp_comes_as_near_to_ppnp_as_is_said():
    graph, rng = draw(3, both_ways=True)
    graph = graphs.add_self_loops(graph, "one")
    params = {"kernel": np.eye(4, dtype="f4"), "bias": np.zeros(4, "f4")}
    x = rng.normal(size=(8, 4)).astype("f4")
    end = graphs.gnn_layer("ppnp", "global")(graph, x, params, alpha=0.2)
    appnp = graphs.gnn_layer("appnp", "global")
    for steps in (0, 3, 9):
        z = appnp(graph, x, params, alpha=0.2, steps=steps)
        far = np.linalg.norm(z - end) / np.linalg.norm(x - end)
        assert far <= 0.8**steps * (1 + 1e-5)


def test_no_matrix_is_dense_in_either_pass():
    n, m = 50, 120
    ends = jax.ShapeDtypeStruct((m,), "int32")
    x = jax.ShapeDtypeStruct((n, 5), "float32")

    def both(name, senders, receivers, x, params):
        graph = graphs.Graph(senders=senders, receivers=receivers, vertices=n)
        y, back = jax.vjp(
            lambda *given: graphs.gnn_layer(name, "global")(graph, *given), x, params
        )
        return back(y)

    for name in global_forms.GLOBAL:
        params = {
            k: jax.ShapeDtypeStruct(s, "float32") for k, s in SHAPES[name].items()
        }
        text = str(jax.make_jaxpr(both, static_argnums=0)(name, ends, ends, x, params))
        assert f"[{n},{n}]" not in text
        assert "todense" not in text


def test_a_graph_without_edges_gives_what_its_vertices_have():
    graph = graphs.make_graph([], [], 8)
    params = {n: jnp.ones(s) for n, s in SHAPES["commnet"].items()}
    y = graphs.gnn_layer("commnet", "global")(graph, jnp.ones((8, 5)), params)
    np.testing.assert_allclose(y, np.full((8, 3), 6.0))


@pytest.mark.acceptance("gnn-parallelism", 10)
def test_a_form_that_a_layer_has_not_is_refused():
    for name in ("edge_conv", "g_gcn"):
        with pytest.raises(
            ConfigError, match=f"{name} has no matrix form; one have: ag"
        ):
            graphs.gnn_layer(name, "global")
    for name in ALONE:
        with pytest.raises(ConfigError, match=f"{name} has no local form"):
            graphs.gnn_layer(name)
    with pytest.raises(ConfigError, match="no layer 'edgeconv'; did you mean 'edge_c"):
        graphs.gnn_layer("edgeconv")
    with pytest.raises(ConfigError, match="form must be"):
        graphs.gnn_layer("gcn", "dense")


@pytest.mark.acceptance("gnn-parallelism", 10)
@pytest.mark.parametrize("name", sorted(global_forms.GLOBAL))
def test_shapes_are_compared(name):
    graph, _ = draw(0, both_ways=True)
    layer = graphs.gnn_layer(name, "global")
    params = {n: np.zeros(s, "f4") for n, s in SHAPES[name].items()}
    with pytest.raises(ConfigError, match="a row for each of the 8 vertices"):
        layer(graph, np.zeros((9, 5), "f4"), params)
    with pytest.raises(ConfigError, match="features must be 5"):
        layer(graph, np.zeros((8, 9), "f4"), params)
    if "bias" in params:
        with pytest.raises(ConfigError, match="bias must be"):
            layer(graph, np.zeros((8, 5), "f4"), params | {"bias": np.zeros(1, "f4")})


def test_shapes_that_do_not_fit_are_told_with_the_layer():
    graph, _ = draw(0, both_ways=True)
    x = np.zeros((8, 5), "f4")
    wrong = {"gin": ("kernel_1", (9, 3)), "arma": ("kernel", (2, 9, 3))}
    for name, (leaf, shape) in wrong.items():
        params = {n: np.zeros(s, "f4") for n, s in SHAPES[name].items()}
        params[leaf] = np.zeros(shape, "f4")
        for form in ("local", "global") if name in BOTH else ("global",):
            with pytest.raises(ConfigError, match=rf"{name}: .*\b9\b"):
                graphs.gnn_layer(name, form)(graph, x, params)
    params = {n: np.zeros(s, "f4") for n, s in PLAIN.items()}
    with pytest.raises(ConfigError, match=r"gcn: features must be 5"):
        graphs.gnn_layer("gcn")(graph, np.zeros((8, 9), "f4"), params)


def test_ppnp_is_of_edges_in_both_directions():
    one = graphs.make_graph([0], [1], 2)
    ppnp = graphs.gnn_layer("ppnp", "global")
    for graph in (one, jax.tree.map(jnp.asarray, one)):
        with pytest.raises(ConfigError, match="in both directions"):
            ppnp(graph, np.ones((2, 5), "f4"), {})
    params = {n: np.ones(s, "f4") for n, s in SHAPES["ppnp"].items()}
    for alpha in (0, 1.5):
        with pytest.raises(ConfigError, match="alpha must be"):
            ppnp(graphs.symmetrize(one), np.ones((2, 5), "f4"), params, alpha=alpha)


def test_slopes_of_steps_that_solve_at_once_are_finite():
    """Of features that are zero, conjugate gradients divide 0 by 0."""
    graph, rng = draw(1, both_ways=True)
    params = {n: rng.normal(size=s).astype("f4") for n, s in PLAIN.items()}
    params["bias"] = np.zeros(3, "f4")
    slope = jax.grad(
        lambda x: graphs.gnn_layer("ppnp", "global")(graph, x, params).sum()
    )
    assert np.isfinite(slope(np.zeros((8, 5), "f4"))).all()
