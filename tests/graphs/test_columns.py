"""Layers of which each device has some columns, against the whole on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hpcjax import data, graphs, models
from hpcjax.core import ConfigError

DEVICES = 4
# Heads are groups of columns, and a norm and a score are of all devices' columns.
FEW = ("gat", "gin")
OTHERS = (
    *("gcn", "sage", "mlp", "commnet", "agnn", "monet", "vanilla_attention", "g_gcn"),
    "edge_conv",
)
SOURCE = data.CommunityGraphConfig(vertices=30, degree=5.0, classes=7)


def both(layers):
    """Losses and slopes of each layer, whole and by columns, from two programs.

    No width is divided by the devices: slices are filled up.
    """
    parts = data.PartitionedVerticesConfig(
        source=SOURCE, partitions=DEVICES, method="hash"
    ).load()
    rng, vertices = np.random.default_rng(0), parts.graph.vertices
    wanted = rng.normal(size=(vertices, 3)).astype("f4")
    cut = graphs.partition(parts.graph, DEVICES, parts.owner)
    batch = {"features": cut.take(np.asarray(parts.graph.features))}
    score = cut.take(np.ones(vertices, "f4"))
    right = cut.take(wanted)
    cfg = {
        layer: models.GnnConfig(
            layer=layer, hidden=5, heads=3, dropout=0.0, scheme="features"
        )
        for layer in layers
    }
    ours, theirs, params = {}, {}, {}
    for layer, own in cfg.items():
        ours[layer] = own.make(parts.inputs, 3, **parts.given, devices=DEVICES)
        whole = models.GnnConfig(layer=layer, hidden=5, heads=3, dropout=0.0)
        theirs[layer] = whole.make((), 3, graph=parts.graph)
        params[layer], _ = theirs[layer].init(jax.random.key(1))
    # Biases and such start at 0 and 1, where a slice of another device would not show.
    leaves, tree = jax.tree.flatten(params)
    leaves = [each + 0.3 * rng.normal(size=each.shape).astype("f4") for each in leaves]
    params = jax.tree.unflatten(tree, leaves)

    def on_one(params):
        def loss(own, layer):
            logits, _ = theirs[layer].apply(own, {}, np.arange(vertices), train=True)
            return jnp.tanh(logits - wanted).sum() / vertices

        return {
            layer: jax.value_and_grad(loss)(own, layer) for layer, own in params.items()
        }

    def on_device(params, batch, score, right):
        def loss(own, layer):
            logits, _ = ours[layer].apply(own, {}, batch, train=True)
            return (jnp.tanh(logits - right) * score[..., None]).sum() / vertices

        params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        found = {
            layer: jax.value_and_grad(loss)(own, layer) for layer, own in params.items()
        }
        return lax.psum(found, "data")

    cut_over = PartitionSpec("data")
    step = jax.shard_map(
        on_device,
        mesh=Mesh(np.array(jax.devices()[:DEVICES]), "data"),
        in_specs=(PartitionSpec(), cut_over, cut_over, cut_over),
        out_specs=PartitionSpec(),
    )
    options = {"xla_backend_optimization_level": 0}
    program = jax.jit(step).lower(params, batch, score, right).compile(options)
    one = jax.jit(on_one).lower(params).compile(options)
    return program(params, batch, score, right), one(params)


@pytest.mark.parametrize("layers", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_columns_of_layers_are_those_of_the_whole(layers):
    """Losses and slopes of two layers of each kind."""
    ours, theirs = both(layers)
    for layer in layers:
        pair = [jax.tree.leaves(found[layer]) for found in (ours, theirs)]
        assert max(np.abs(right).max() for right in pair[1]) > 0.1
        for own, right in zip(*pair, strict=True):
            np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-5)


def test_drops_features_of_edges_and_groups():
    """Whole numbers of attention are dropped alike everywhere, columns are not."""
    rng, axis = np.random.default_rng(2), "data"
    ends = rng.integers(0, 12, (2, 40))
    edges = rng.normal(size=(40, 2)).astype("f4")
    graph = graphs.make_graph(*ends, 12, edge_features=edges)
    x = rng.normal(size=(12, 10)).astype("f4")
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    score = {name: draw(3, 5) for name in ("receiver", "sender", "edge_attention")}
    bias = draw(15)
    gat = {"kernel": draw(10, 3, 5), "edge": draw(2, 3, 5), **score, "bias": bias}
    small = {name: each.astype("bfloat16") for name, each in gat.items()}
    small |= score | {"bias": bias}
    conv = {"kernel_0": draw(30, 6), "bias_0": draw(6)}
    conv |= {"kernel_1": draw(6, 3), "bias_1": draw(3)}
    key = jax.random.key(3)

    def apply(x):
        heads = graphs.gat(graph, x, gat, dropout=0.5, key=key)
        found = [heads, graphs.gat(graph, x, small)]
        return [*found, graphs.edge_conv(graph, graphs.like(x, heads, 15, 3), conv)]

    def on_device(rows):
        x = graphs.rows_to_columns(rows, axis)
        ones = graphs.like(x, jnp.ones((500, 2)), 8)
        kept = graphs.drop_entries(ones, 0.25, key).values
        return [*apply(x), kept]

    whole = apply(x)
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), axis)
    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=PartitionSpec(axis),
        out_specs=PartitionSpec(None, axis),
    )
    *found, kept = jax.jit(step)(x)
    for groups, own, right in zip((3, 3, 1), found, whole, strict=True):
        # Of devices, groups, and slices of them, to groups of columns.
        parts = np.asarray(own, "f4").reshape(12, DEVICES, groups, -1)
        width = right.shape[1] // groups
        joined = parts.swapaxes(1, 2).reshape(12, groups, -1)[..., :width]
        np.testing.assert_allclose(
            joined.reshape(12, -1), np.asarray(right, "f4"), rtol=2e-5, atol=2e-5
        )
    assert set(np.unique(kept)) == {0, np.float32(1 / 0.75)}
    same = np.corrcoef(np.asarray(kept).T) - np.eye(8)
    assert np.abs(same).max() < 0.2  # of 500 draws, 4 deviations
    assert np.mean(kept) == pytest.approx(1, abs=0.05)


def test_what_takes_no_columns_says_so():
    graph = graphs.make_graph([0], [1], 2, edge_features=np.ones((1, 1)))
    own = graphs.Columns(values=jnp.ones((2, 1)), width=4, axis="data")
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    for name in ("gcn", "chebnet"):
        kernel = params["kernel"] if name == "gcn" else params["kernel"][None]
        with pytest.raises(ConfigError, match=r"take arrays: got features=.*Columns"):
            graphs.gnn_layer(name, "global")(graph, own, params | {"kernel": kernel})
    edge = {"edge": jnp.ones((1, 4)), "epsilon": jnp.zeros(())}
    with pytest.raises(ConfigError, match="vertices' dense ones: got Columns"):
        graphs.gin(graph, own, edge)
