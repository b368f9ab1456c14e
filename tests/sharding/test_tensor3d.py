"""Matrices cut in two dimensions: their parts, and what their products send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import cost, layers, models, perf, sharding
from hpcjax.core import ConfigError, shards
from hpcjax.core.varying import vary_like
from hpcjax.models import CausalLmConfig, MlpConfig
from hpcjax.sharding import Grid
from tests.tolerances import assert_sums_close

LM = CausalLmConfig(depth=2, width=16, heads=4)
# Inputs, outputs, and whether they are cut the other way round.
CHAIN = ((16, 24, False), (24, 16, True), (16, 32, False), (32, 8, True))


def lm(**fields):
    return CausalLmConfig(depth=2, width=16, **{"heads": 4, **fields}).make((6,), 24)


def specs_of(model, grid):
    return sharding.spread_matrices(model, grid, stacked=LM.stacks).held


def test_a_language_models_layers_alternate():
    held = specs_of(lm(), Grid(row=2, col=2))
    assert held["blocks/attention/query/kernel"] == P(None, "row", "col")
    assert held["blocks/attention/output/kernel"] == P(None, "col", "row")
    assert held["blocks/mlp/up/bias"] == P(None, "col")
    assert held["blocks/mlp/down/kernel"] == P(None, "col", "row")
    assert held["blocks/mlp_norm/scale"] == P(None, "row")
    assert held["embed/table"] == P("col", "row")
    deep = specs_of(lm(), Grid(depth=2, row=2, col=2))
    assert deep["blocks/mlp/up/kernel"] == P(None, "row", ("col", "depth"))
    # Of a stack each device has all layers.
    assert "depth" not in str(deep["blocks/mlp_norm/scale"][0])


def test_a_chain_alternates_and_its_outputs_are_whole():
    model = MlpConfig(widths=(8, 12)).make((4, 4, 1), 6)
    held = sharding.spread_matrices(model, Grid(row=2, col=4)).held
    assert held["dense_0/kernel"] == P("row", "col")
    assert held["dense_1/kernel"] == P("col", "row")
    assert held["head/kernel"] == P("row", None)
    assert "head/bias" not in held


def test_what_a_chain_sends_is_not_known():
    with pytest.raises(ConfigError, match="language models alone"):
        sharding.list_matrices(MlpConfig(widths=(8,)).make((8,), 6))


def test_layers_are_in_the_order_of_their_numbers():
    model = MlpConfig(widths=(8,) * 12).make((8,), 6)
    held = sharding.spread_matrices(model, Grid(row=2, col=2)).held
    for number in range(12):
        wanted = P("col", "row") if number % 2 else P("row", "col")
        assert held[f"dense_{number}/kernel"] == wanted


def test_inputs_that_are_cut_otherwise_are_refused():
    mesh = sharding.make_mesh({"row": 2, "col": 2})
    part = functools.partial(shards.Part, cuts=((-2, "row"), (-1, "col")))

    def local(x, w):
        shared = layers.share_inputs(x, [part(value=w), part(value=w)])
        return layers.dense(shared, part(value=w))

    for spec, message in ((P(None, "col"), "got 4 that differ along"), (P(), None)):
        run = jax.shard_map(
            local, mesh=mesh, in_specs=(spec, P("row", "col")), out_specs=P(None, "col")
        )
        x, w = jnp.ones((2, 8)), jnp.ones((8, 6))
        if message:
            with pytest.raises(ConfigError, match=message):
                run(x, w)
        else:
            np.testing.assert_array_equal(run(x, w), x @ w)
    with pytest.raises(ConfigError, match="take shard_map with check_vma=True"):
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P("row", "col")),
            out_specs=P(None, "col"),
            check_vma=False,
        )(x, w)
    with pytest.raises(ConfigError, match="parts of its parameters communicates"):
        layers.dense(x, part(value=w))


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_a_table_is_looked_up_by_rows_that_devices_share_out(dtype):
    mesh = sharding.make_mesh({"col": 4})
    table = np.random.default_rng(0).normal(size=(256, 3)).astype(np.float32)
    tokens = np.array([0, 63, 64, 255], dtype)

    def local(table, tokens):
        part = shards.Part(value=table, cuts=((-2, "col"),))
        return layers.embedding(part, tokens)

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("col"), P()), out_specs=P())
    np.testing.assert_array_equal(run(table, tokens), table[tokens])
    outside = run(table, np.array([256, -1], np.int32))
    assert np.isnan(outside).all()


def test_layers_that_take_the_same_inputs_are_one():
    found = sharding.list_matrices(lm(options=models.LLAMA, mlp_width=20))
    sizes = [(each.inputs, each.outputs, each.transposed) for each in found]
    assert sorted(sizes) == [
        (16, 16, True),
        (16, 24, False),
        (16, 40, False),
        (16, 48, False),
        (20, 16, True),
    ]
    assert sorted(each.count for each in found) == [1, 2, 2, 2, 2]


@pytest.mark.acceptance("tensor3d", 9)
@pytest.mark.parametrize(
    ("make", "grid", "message"),
    [
        (lm, Grid(row=3), r"row must divide width: got width=16, row=3"),
        (lm, Grid(col=8), r"col must divide kv_heads: got kv_heads=4, col=8"),
        (
            functools.partial(lm, heads=8, kv_heads=2),
            Grid(col=4),
            "kv_heads=2, col=4",
        ),
        (functools.partial(lm, mlp_width=18), Grid(col=4), "mlp_width=18, col=4"),
        (
            functools.partial(
                lm, options=models.TransformerOptions(experts=models.ExpertsConfig())
            ),
            Grid(row=2),
            "without experts: got blocks/mlp",
        ),
        (
            lambda: MlpConfig(widths=(9,)).make((4,), 2),
            Grid(row=2, col=2),
            r"features of a layer: got 9, col=2 \(dense_0\)",
        ),
        (
            lambda: models.ResNetConfig(depth=8, width=2).make((8, 8, 1), 3),
            Grid(row=2),
            "chains of dense layers alone: got",
        ),
        (
            lambda: models.BertConfig(width=8).make((6, 3), 11),
            Grid(row=2),
            "chains of dense layers alone: got",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(make, grid, message):
    with pytest.raises(ConfigError, match=message):
        sharding.spread_matrices(make(), grid)


@pytest.mark.acceptance("tensor3d", 9)
def test_a_grid_must_divide_the_devices():
    with pytest.raises(ConfigError, match=r"got devices=8, row=3, col=1, depth=1"):
        Grid.of(8, row=3, col=1, depth=1)
    parallel = sharding.spread_matrices(lm(), Grid(row=2, col=2))
    with pytest.raises(ConfigError, match="spread over 4 devices"):
        parallel.mesh_shape(8)


def chain(grid, rows):
    """The slopes of a chain of layers without biases, and its arguments."""
    mesh = sharding.make_mesh(grid._asdict())
    specs = [P("col", "row") if turned else P("row", "col") for *_, turned in CHAIN]
    cuts = [shards.list_cuts({"": spec}, "", 2) for spec in specs]
    batch = P(("data", "depth"), "row")

    def local(x, ws):
        def loss(x, ws):
            for w, cut in zip(ws, cuts, strict=True):
                x = layers.dense(x, shards.Part(value=w, cuts=cut))
            return jnp.sum(x**2)

        return jax.grad(loss, argnums=(0, 1))(x, vary_like(ws, x))

    # As in training, gradients are local sums over data.
    outputs = (batch, [P(("data", "depth"), *spec) for spec in specs])

    def stacked(x, ws):
        dx, dws = local(x, ws)
        return dx, [dw[None] for dw in dws]

    run = jax.shard_map(stacked, mesh=mesh, in_specs=(batch, specs), out_specs=outputs)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, CHAIN[0][0])).astype(np.float32)
    ws = [rng.normal(size=size[:2]).astype(np.float32) for size in CHAIN]
    return mesh, jax.jit(run), x, ws


@pytest.mark.quick("16-grid0", "32-grid1")
@pytest.mark.acceptance("tensor3d", 2, 3)
@pytest.mark.acceptance("how-to-train", 3)
@pytest.mark.parametrize(
    ("rows", "grid"),
    [
        (16, Grid(1, 1, 2, 4)),
        (32, Grid(2, 1, 2, 2)),
        (16, Grid(1, 2, 4, 1)),
        (24, Grid(1, 2, 1, 4)),
        (16, Grid(2, 2, 2, 1)),
        (8, Grid(1, 1, 4, 2)),
    ],
)
def test_a_chain_sends_two_sums_a_layer_and_the_words_of_the_formula(rows, grid):
    mesh, run, x, ws = chain(grid, rows)
    lowered = run.lower(x, ws)
    compiled = lowered.compile()
    # Activations are never laid out anew.
    assert {kind for _, kind in perf.bytes_by_axis(compiled, mesh)} == {"all-reduce"}
    found = perf.ring_bytes_by_axis(compiled, mesh)
    assert all(len(axes) == 1 for axes in found)
    sent = {axis: found.get((axis,), 0) / 4 for axis in ("row", "col")}
    matrices = [
        sharding.MatrixLayer(inputs=k, outputs=n, transposed=turned, count=1)
        for k, n, turned in CHAIN
    ]
    wanted = cost.comm_volume(matrices, rows, grid)
    assert sent == pytest.approx({axis: wanted[axis] for axis in sent}, rel=1e-12)
    # XLA joins sums; in what JAX asks for there are two a layer.
    assert lowered.as_text().count("all_reduce") == 2 * len(CHAIN)


def test_a_chain_has_the_gradients_of_one_device():
    _, run, x, ws = chain(Grid(2, 1, 2, 2), 16)

    def loss(x, ws):
        for w in ws:
            x = x @ w
        return jnp.sum(x**2)

    dx, dws = run(x, ws)
    wanted = jax.grad(loss, argnums=(0, 1))(x, ws)
    # Each number has gone through every product: forward, and back.
    terms = 2 * sum(inputs for inputs, *_ in CHAIN)
    assert_sums_close(dx, wanted[0], terms=terms)
    for ours, theirs in zip(dws, wanted[1], strict=True):
        assert_sums_close(ours.sum(0), theirs, terms=terms)


@pytest.mark.acceptance("tensor3d", 5)
@pytest.mark.parametrize("scheme", ["optimus2d", "colossal3d"])
def test_the_peers_products_are_right_and_send_what_they_say(scheme):
    from experiments.tensor3d.products import Config, run

    found = run(Config(scheme=scheme, rows=8, inputs=16, outputs=24), None)
    assert float(found["apart"]) < 1e-5
    assert float(found["sent"]) == 4 * float(found["formula"])
    with pytest.raises(ConfigError, match="side² must divide"):
        Config(rows=6)
