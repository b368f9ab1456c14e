"""The network of programs against a dense one that knows nothing of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, data, layers, models
from hpcjax.data.program_source import UnionMaker
from hpcjax.graphs import make_graph
from hpcjax.runs.training import TrainingConfig

WORDS, WIDTH, STEPS = 5, 4, 3


def make(**fields):
    chosen = {"width": WIDTH, "steps": STEPS, **fields}
    return models.ggnn((2,), 2, tables=(WORDS,), **chosen)


@functools.cache
def drawn(**fields):
    """A network whose biases are no zeros."""
    model = make(**fields)
    params, state = model.init(jax.random.key(0))
    rng = np.random.default_rng(1)
    noisy = {n: np.array(p + 0.3 * rng.normal(size=p.shape)) for n, p in params.items()}
    # The root's 50 would leave nothing between 0 and 1 of what is tested.
    noisy["of_state"][-2:] *= 0.02
    noisy["messages"][:, -2:] *= 0.02
    noisy["choose"][[WIDTH, WIDTH + 1]] *= 0.02
    cast = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), noisy)
    return jax.jit(functools.partial(model.apply, cast, state, train=False)), cast


def program(seed, vertices=7, edges=12):
    """A graph whose features are text, root and label, as an example has them."""
    rng = np.random.default_rng(seed)
    features = rng.integers(0, [WORDS, 1, 2], (vertices, 3))
    features[seed % vertices, 1] = 1
    return make_graph(
        *rng.integers(0, vertices, (2, edges)),
        vertices,
        features=features,
        edge_type=rng.integers(0, 3, edges),
        edge_features=rng.integers(0, 4, (edges, 1)),
    )


def batch(*unions, sizes=(9, 14)):
    return UnionMaker(2).batch(unions, np.array(sizes))


def logits(unions, sizes=(9, 14), **fields):
    y, _ = drawn(**fields)[0](
        jax.tree.map(jnp.asarray, batch(*unions, sizes=sizes)["x"])
    )
    return np.asarray(y)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def wave(position):
    angles = position * 10000.0 ** (-2 * np.arange(WIDTH // 2) / WIDTH)
    return np.concatenate([np.sin(angles), np.cos(angles), np.zeros(2)])


def dense(p, graph, gate, mark=50):
    """Section 4, an edge at a time, in float64."""
    text, root, _ = graph.features.T
    start = np.concatenate([p["embedding"][text], mark * np.eye(2)[root]], axis=1)
    h, ends = start, zip(graph.senders, graph.receivers, strict=True)
    edges = [
        (edge, *((source, target) if forward else (target, source)), not forward)
        for edge, (source, target) in enumerate(ends)
        for forward in (True, False)
    ]
    for _ in range(STEPS):
        total, count = np.zeros_like(h), np.zeros(len(h))
        for edge, source, target, turned in edges:
            kind = graph.edge_type[edge] + 3 * turned
            at = wave(graph.edge_features[edge, 0])
            g = 2 * sigmoid(at @ p["gate"] + p["gate_bias"])
            w, b = p["messages"][kind], p["messages_bias"][kind]
            sent = (h[source] * g) @ w + b if gate == "pre" else (h[source] @ w + b) * g
            total[target] += sent
            count[target] += 1
        m = total / np.maximum(count, 1)[:, None]
        x = np.split(m @ p["of_input"] + p["input_bias"], 3, axis=1)
        s = np.split(h @ p["of_state"] + p["state_bias"], 3, axis=1)
        r, z = sigmoid(x[0] + s[0]), sigmoid(x[1] + s[1])
        h = (1 - z) * np.tanh(x[2] + r * s[2]) + z * h
    chosen = np.concatenate([start, h], axis=1) @ p["choose"] + p["choose_bias"]
    return sigmoid(chosen) * (h @ p["read"] + p["read_bias"])


@pytest.mark.acceptance("programl", 3)
def test_the_published_network_has_as_many_parameters():
    model = models.ggnn((16,), 2, tables=(2231,))
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert models.num_params(model) == 87070
    assert params["messages"].shape == (6, 34, 34)


@pytest.mark.acceptance("programl", 4)
@pytest.mark.parametrize("gate", ["pre", "post"])
def test_the_pass_is_that_of_the_dense_network(gate):
    graph = program(0)
    own = {n: np.float64(p) for n, p in drawn(gate=gate)[1].items()}
    found = logits([graph], gate=gate)[0, : graph.vertices]
    np.testing.assert_allclose(found, dense(own, graph, gate), rtol=0, atol=1e-5)


@pytest.mark.acceptance("programl", 4)
def test_numbers_of_vertices_do_not_matter_and_places_of_operands_do():
    graph, order = program(3), np.random.default_rng(0).permutation(7)
    place = np.argsort(order)

    def rebuilt(senders, receivers, features, positions):
        how = {"edge_type": graph.edge_type, "edge_features": positions}
        return make_graph(senders, receivers, 7, features=features, **how)

    ends, positions = (graph.senders, graph.receivers), graph.edge_features
    moved = rebuilt(*(place[each] for each in ends), graph.features[order], positions)
    first, other = logits([graph])[0, :7], logits([moved])[0, :7]
    np.testing.assert_allclose(other, first[order], rtol=0, atol=1e-5)
    # Vertex 0 is `sub`, whose operands are 1 and 2, which differ in their texts.
    text = np.zeros((3, 3), int)
    text[:, 0] = [0, 1, 2]

    def sub(left, right, positions):
        return make_graph(
            [left, right],
            [0, 0],
            3,
            features=text,
            edge_type=[1, 1],
            edge_features=np.array(positions)[:, None],
        )

    at = [logits([sub(*each)])[0, 0] for each in ((1, 2, [0, 1]), (2, 1, [0, 1]))]
    assert abs(at[0] - at[1]).max() > 1e-4
    same = [logits([sub(*each)])[0, 0] for each in ((1, 2, [1, 1]), (2, 1, [1, 1]))]
    np.testing.assert_allclose(*same, rtol=0, atol=1e-6)


@pytest.mark.acceptance("programl", 5)
@pytest.mark.parametrize("gate", ["pre", "post"])
def test_a_union_is_its_graphs_apart(gate):
    from hpcjax.graphs import join_graphs

    every = [program(seed) for seed in range(4)]
    pairs = [join_graphs(every[:2])[0], join_graphs(every[2:])[0]]
    together = logits(pairs, sizes=(16, 30), gate=gate)
    rows = [*together[0, :14].reshape(2, 7, 2), *together[1, :14].reshape(2, 7, 2)]
    for graph, row in zip(every, rows, strict=True):
        alone = logits([graph], gate=gate)[0, :7]
        np.testing.assert_allclose(row, alone, rtol=0, atol=1e-5)


def test_a_graph_is_the_sum_of_its_vertices_none_of_which_is_a_root():
    from hpcjax.graphs import join_graphs

    own = [program(seed) for seed in range(3)]
    pair, number = join_graphs(own[:2])
    x = jax.tree.map(jnp.asarray, batch(pair, own[2], sizes=(16, 26))["x"])
    of = np.full((2, 16), 2)  # the number of none
    of[0, :14], of[1, :7] = number, 0
    whole, (_, params) = make(readout="graph"), drawn()
    found, _ = whole.apply(params, {}, {**x, "graphs": jnp.asarray(of)}, train=False)
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    each = [dense(p, graph, "pre", mark=0).sum(0) for graph in own]
    wanted = [[each[0], each[1]], [each[2], [0, 0]]]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    for model, given in ((whole, x), (make(), {**x, "graphs": of})):
        with pytest.raises(core.ConfigError, match="for readout=graph: got readout"):
            model.apply(params, {}, given, train=False)


def test_maps_are_drawn_as_widely_as_those_of_pytorch():
    """U(±1/√34); larger ones learn slower: the root's 50 saturates the cell's gates."""
    params, _ = models.ggnn((16,), 2, tables=(9,)).init(jax.random.key(0))
    for name in ("of_input", "of_state", "messages", "gate"):
        assert params[name].std() == pytest.approx((3 * 34) ** -0.5, rel=0.1)


def test_the_roots_rows_of_the_answer_may_be_drawn_smaller():
    whole, small = (
        models.ggnn((16,), 2, tables=(9,), root_rows=r).init(jax.random.key(0))[0]
        for r in (1.0, 0.5)
    )
    for name, rows in (("choose", [32, 33, 66, 67]), ("read", [32, 33])):
        whole[name] = whole[name].at[jnp.array(rows)].multiply(0.5)
    jax.tree.map(np.testing.assert_array_equal, small, whole)


def test_a_cell_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    cell = torch.nn.GRUCell(3, 4)
    of = {"of_input": "weight_ih", "of_state": "weight_hh"}
    of |= {"input_bias": "bias_ih", "state_bias": "bias_hh"}
    params = {n: getattr(cell, o).detach().numpy().T for n, o in of.items()}
    x, h = np.ones((2, 3), "f4"), np.linspace(-1, 1, 8, dtype="f4").reshape(2, 4)
    wanted = cell(torch.tensor(x), torch.tensor(h)).detach().numpy()
    found = layers.gru_cell(x, h, jax.tree.map(jnp.asarray, params))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_options_take_away_what_they_say():
    graph = program(0)
    plain = make_graph(
        graph.senders,
        graph.receivers,
        7,
        features=graph.features,
        edge_type=graph.edge_type,
        edge_features=0 * graph.edge_features,
    )
    blind = [logits([each], positions=False) for each in (graph, plain)]
    np.testing.assert_array_equal(*blind)
    assert abs(logits([graph]) - logits([plain])).max() > 1e-3
    shapes = jax.eval_shape(make(backward=False).init, jax.random.key(0))[0]
    assert shapes["messages"].shape == (3, 6, 6)
    alone = logits(
        [
            make_graph(
                [0],
                [1],
                2,
                features=graph.features[:2],
                edge_type=[0],
                edge_features=[[0]],
            )
        ],
        backward=False,
    )
    none = logits(
        [
            make_graph(
                [],
                [],
                2,
                features=graph.features[:2],
                edge_type=[],
                edge_features=np.zeros((0, 1), int),
            )
        ],
        backward=False,
    )
    np.testing.assert_array_equal(alone[0, 0], none[0, 0])
    assert abs(alone[0, 1] - none[0, 1]).max() > 1e-4


@pytest.mark.slow
def test_dropout_draws_for_an_example_however_the_batch_is_shared_out():
    model = make(dropout=0.5)
    params, state = model.init(jax.random.key(0))
    x = jax.tree.map(jnp.asarray, batch(program(0), program(1))["x"])
    apply = jax.jit(model.apply, static_argnames="train")
    keys = [
        core.keys.BatchKey(key=jax.random.key(1), rows=jnp.arange(2)[n:])
        for n in (0, 1)
    ]
    both, _ = apply(params, state, x, train=True, key=keys[0])
    half = jax.tree.map(lambda each: each[1:], x)
    second, _ = apply(params, state, half, train=True, key=keys[1])
    np.testing.assert_allclose(both[1:], second, rtol=0, atol=1e-5)
    still, _ = apply(params, state, x, train=False)
    assert abs(still - both).max() > 1e-3
    with pytest.raises(core.ConfigError, match=r"dropout=0\.5 needs a key"):
        model.apply(params, state, x, train=True)


def test_what_cannot_be_built_is_refused():
    with pytest.raises(core.ConfigError, match="width must be even"):
        models.GgnnConfig(width=5)
    with pytest.raises(core.ConfigError, match=r"one table, .*tables=\(3, 4\)"):
        models.ggnn((2,), 2, tables=(3, 4))
    with pytest.raises(core.ConfigError, match=r"take one of .*dataset=programs"):
        TrainingConfig(model=models.GgnnConfig())
    whole, own = models.GgnnConfig(readout="graph"), data.ProgramsConfig()
    with pytest.raises(core.ConfigError, match=r"be vertex .*programs: .*='graph'"):
        TrainingConfig(dataset=own, model=whole)
    own = dataclasses.replace(own, task="algorithm")
    with pytest.raises(core.ConfigError, match=r"be graph .*algorithms: .*='vertex'"):
        TrainingConfig(dataset=own, model=models.GgnnConfig())
    TrainingConfig(dataset=own, model=whole)
    with pytest.raises(core.ConfigError, match=r"algorithms, .*one of model=ggnn"):
        TrainingConfig(dataset=own)
    with pytest.raises(core.ConfigError, match=r"programs is programs, .*model=ggnn"):
        TrainingConfig(dataset=data.ProgramsConfig())
