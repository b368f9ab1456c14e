"""Graph networks: what they add to the loss, draw, refuse and learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, data, graphs, metrics, models
from hpcjax.models import _gnn
from hpcjax.runs.training import TrainingConfig
from tests.models import helpers
from tests.models.registry import REGISTRY

CLUB = data.KarateConfig().load()


def club(**fields):
    return models.GnnConfig(**fields).make((), 2, graph=CLUB.graph)


@pytest.mark.parametrize(("name", "penalized", "every"), [("gcn", 1, 2), ("gat", 6, 6)])
def test_the_penalty_is_of_the_first_layers_matrix_or_of_all(name, penalized, every):
    model, params, state, x, _ = helpers.instance(name)
    _, new = model.apply(params, state, x, train=True)
    squares = [
        np.sum(np.square(leaf, dtype=float))
        for path, leaf in core.trees.flatten(params).items()
        if not path.endswith("bias")
    ]
    wanted = 0.1 / 2 * sum(squares[:penalized])
    assert len(squares) == every
    assert float(core.added_loss(new)) == pytest.approx(wanted, rel=1e-5)
    assert core.added_loss(helpers.instance("sage").state) is None


def test_the_batch_chooses_rows_of_the_outputs_of_all_vertices():
    model = helpers.make(REGISTRY["gcn"])
    params, state = model.init(jax.random.key(0))
    every, _ = model.apply(params, state, jnp.arange(9), train=False)
    some, _ = model.apply(params, state, jnp.array([7, 2, 7]), train=False)
    np.testing.assert_array_equal(some, every[jnp.array([7, 2, 7])])
    none, _ = model.apply(params, state, jnp.array([9, -1]), train=False)
    assert jnp.isnan(none).all()


def test_a_network_of_words_sees_no_edge():
    entry = REGISTRY["words"]
    graph = entry.given["graph"]
    none = graphs.make_graph([], [], graph.vertices, features=graph.features)
    model, other = (entry.config.make((), 3, graph=each) for each in (graph, none))
    params, state = model.init(jax.random.key(0))
    x = jnp.arange(9)
    y, same = (m.apply(params, state, x, train=False)[0] for m in (model, other))
    np.testing.assert_array_equal(y, same)


def test_dropout_draws_in_training_alone():
    model = club(layer="gat", hidden=4, heads=2)
    params, state = model.init(jax.random.key(0))
    x = jnp.arange(34)
    apply = jax.jit(model.apply, static_argnames="train")
    one, same, other = (
        apply(params, state, x, train=True, key=jax.random.key(seed))[0]
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()
    still, _ = apply(params, state, x, train=False)
    assert (still != one).any()
    with pytest.raises(core.ConfigError, match=r"dropout=0\.5 needs a key"):
        model.apply(params, state, x, train=True)


WHOLE = ("commnet", "agnn", "monet", "vanilla_attention", "g_gcn", "edge_conv")


def test_each_layer_that_weighs_edges_learns_from_a_step():
    """On a graph with loops, edges that are there twice and a vertex without any."""
    rng = np.random.default_rng(0)
    ends = rng.integers(0, 6, (2, 12))
    x = rng.normal(size=(8, 5)).astype("f4") / 4
    graph = graphs.make_graph(*np.append(ends, ends[:, :3], 1), 8, features=x)
    made = {
        name: models.GnnConfig(layer=name, hidden=4, heads=2, dropout=0.0).make(
            (), 3, graph=graph
        )
        for name in WHOLE
    }
    first = {name: model.init(jax.random.key(1)) for name, model in made.items()}

    @jax.jit
    def step(every):
        def loss(every):
            found = {}
            for name, (params, state) in every.items():
                y, _ = made[name].apply(params, state, jnp.arange(8), train=True)
                labels = jnp.arange(8) % 3
                found[name] = jnp.mean(metrics.cross_entropy(y, labels))
            return sum(found.values()), found

        (_, found), slopes = jax.value_and_grad(loss, has_aux=True)(every)
        moved = jax.tree.map(lambda p, g: p - 1e-3 * jnp.sign(g), every, slopes)
        return moved, found, slopes

    moved, before, slopes = step(first)
    _, after, _ = step(moved)
    for name in WHOLE:
        assert after[name] < before[name], name
        for path, slope in core.trees.flatten(slopes[name][0]).items():
            assert np.isfinite(slope).all(), (name, path)
            assert np.abs(slope).max() > 0, (name, path)


@pytest.mark.parametrize("name", ["commnet", "monet", "g_gcn"])
def test_layers_of_words_are_those_of_dense_features(name):
    dense = dataclasses.replace(CLUB.graph, features=np.eye(34, dtype="f4"))
    x = jnp.arange(34)

    def logits(graph):
        config = models.GnnConfig(layer=name, depth=1, dropout=0.0)
        model = config.make((), 2, graph=graph)
        return model.apply(*model.init(jax.random.key(0)), x, train=False)[0]

    found, expected = logits(CLUB.graph), logits(dense)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_layers_that_weigh_edges_say_what_they_do_not_take():
    for name in ("agnn", "vanilla_attention", "edge_conv"):
        with pytest.raises(core.ConfigError, match="must be dense: got SparseRows"):
            models.GnnConfig(layer=name).make((), 2, graph=CLUB.graph)
    for name in WHOLE:
        graph = dataclasses.replace(CLUB.graph, features=np.eye(34, dtype="f4"))
        with pytest.raises(core.ConfigError, match=f"allowed are .*: got {name}"):
            models.GnnConfig(layer=name).make((2, 4), 2, graph=graph)
    for near, name in (("edgeconv", "edge_conv"), ("comnet", "commnet")):
        with pytest.raises(core.ConfigError, match=f"did you mean '{name}'"):
            models.GnnConfig(layer=near)


def test_what_cannot_be_built_is_refused():
    make = models.GnnConfig(layer="gin").make
    with pytest.raises(core.ConfigError, match=r"inputs=\(3,\), outputs=2"):
        make((3,), 2, graph=CLUB.graph)
    with pytest.raises(core.ConfigError, match=r"with features .*: got graph=None"):
        make((), 2, graph=None)
    plain = dataclasses.replace(CLUB.graph, features=None)
    with pytest.raises(core.ConfigError, match="got none of them"):
        make((), 2, graph=plain)
    edges = dataclasses.replace(CLUB.graph, edge_features=np.ones((156, 2), np.float32))
    with pytest.raises(core.ConfigError, match="must be dense: got SparseRows"):
        make((), 2, graph=edges)
    with pytest.raises(core.ConfigError, match="layer"):
        models.GnnConfig(layer="gan")
    with pytest.raises(core.ConfigError, match=r"cora is vertices, .*model=gnn"):
        TrainingConfig(dataset=data.CoraConfig())
    with pytest.raises(core.ConfigError, match=r"take one of .*dataset=cora"):
        TrainingConfig(model=models.GnnConfig())


def test_a_layer_that_sees_no_edge_features_says_so_once(caplog):
    edges = np.ones((156, 2), np.float32)
    graph = graphs.make_graph(
        CLUB.graph.senders,
        CLUB.graph.receivers,
        34,
        features=np.eye(34, dtype=np.float32),
        edge_features=edges,
    )
    _gnn._log_blind.cache_clear()
    for layer in ("gat", "gin"):
        models.GnnConfig(layer=layer).make((), 2, graph=graph)
    assert caplog.text == ""
    for _ in range(2):
        models.GnnConfig(layer="sage").make((), 2, graph=graph)
    assert caplog.text.count("model.layer=sage does not see the features") == 1
    models.GnnConfig(layer="gcn").make((), 2, graph=CLUB.graph)
    assert "gcn" not in caplog.text


def propagate(graph, leaders, share=0.9, steps=200):
    """Label propagation: what two leaders pass on, from neighbour to neighbour."""
    a = np.zeros((34, 34))
    a[graph.receivers, graph.senders] = 1
    root = a.sum(1) ** -0.5
    s = root[:, None] * a * root
    given = np.zeros((34, 2))
    given[leaders, [0, 1]] = 1
    labels = given
    for _ in range(steps):
        labels = share * s @ labels + (1 - share) * given
    return labels.argmax(1)


@pytest.mark.acceptance("gnn-models", 9)
def test_two_labelled_members_tell_where_the_club_went():
    model = club(dropout=0.0)
    tx = optax.adam(0.01)
    batch = jax.tree.map(jnp.asarray, CLUB.train.gather(np.arange(2)))

    @jax.jit
    @jax.vmap
    def train(key):
        params, state = model.init(key)

        def loss(params):
            logits, _ = model.apply(params, state, batch["x"], train=True)
            return jnp.mean(metrics.cross_entropy(logits, batch["y"]))

        def step(carry, _):
            params, opt = carry
            updates, opt = tx.update(jax.grad(loss)(params), opt)
            return (optax.apply_updates(params, updates), opt), None

        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, 200)
        return model.apply(params, state, jnp.arange(34), train=False)[0].argmax(-1)

    found = train(jax.random.split(jax.random.key(0), 10))
    right = np.mean(np.sum(found == CLUB.train.labels, axis=1))
    by_propagation = np.sum(propagate(CLUB.graph, [0, 33]) == CLUB.train.labels)
    assert right >= 31
    assert right >= by_propagation - 1


def test_cora_is_what_was_published_and_rewired_keeps_its_degrees():
    cora, control = (data.CoraConfig(rewired=flag).load() for flag in (False, True))
    graph, other = cora.graph, control.graph
    pairs = set(zip(graph.senders.tolist(), graph.receivers.tolist(), strict=True))
    assert len(pairs) == 2 * 5278
    assert pairs == {(b, a) for a, b in pairs}
    assert np.bincount(cora.train.gather(np.arange(140))["y"]).tolist() == 7 * [20]
    assert len(graph.features.columns) == 49216
    sums = graphs.make_dense(graph.features).sum(1)
    np.testing.assert_allclose(sums, 1, atol=1e-6)
    test = data.CoraConfig(holdout="test").load().validation
    assert (len(test), test.numbers[0], test.numbers[-1]) == (1000, 1708, 2707)
    for end in ("senders", "receivers"):
        np.testing.assert_array_equal(
            np.bincount(getattr(graph, end)), np.bincount(getattr(other, end))
        )
    labels = cora.train.labels
    alike = [np.mean(labels[g.senders] == labels[g.receivers]) for g in (graph, other)]
    assert alike[0] > 0.8
    assert alike[1] < 0.25
