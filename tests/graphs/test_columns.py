"""Layers of which each device has some columns, against the whole on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from hpcjax import data, graphs, models

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
