"""A model cut in two dimensions, in the loop: its numbers and its checkpoints."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from hpcjax import data, optim, sharding, train
from hpcjax.core import ConfigError, trees
from hpcjax.models import BLOOM, GPT2, LLAMA, CausalLmConfig, MlpConfig
from hpcjax.sharding import Grid, Tensor3dConfig

GPT = CausalLmConfig(depth=2, width=16, heads=4)
MLP = MlpConfig(widths=(8, 12))
# So small that the gradient's norm is more in every step.
SGD = optim.SgdConfig(lr=0.5, momentum=0.9, clip_norm=0.1)
ADAM = optim.AdamWConfig(lr=1e-2, eps=1e-3)
ROWS = 8
ALONE = Grid()
MODELS = {
    "gpt": GPT,
    "llama": dataclasses.replace(GPT, options=LLAMA, kv_heads=2, mlp_width=12),
    "bloom": dataclasses.replace(GPT, options=BLOOM),
    "untied": dataclasses.replace(
        GPT, options=dataclasses.replace(GPT2, tied_head=False), remat="full"
    ),
    "pieces": dataclasses.replace(GPT, pieces=2),
    "mlp": MLP,
}
GRIDS = [
    Grid(data, depth, row, 8 // (data * depth * row))
    for data in (1, 2, 4, 8)
    for depth in (1, 2, 4, 8)
    for row in (1, 2, 4, 8)
    if 8 % (data * depth * row) == 0 and 8 // (data * depth * row) <= 4
]


def dataset(model):
    if model is MLP:
        return data.noise_images(2 * ROWS, (4, 4, 1), 6, seed=0)
    return data.noise_tokens(2 * ROWS, 6, 24, seed=0)


@functools.cache
def task(grid, model=GPT, optimizer=SGD, zero=0):
    own = dataset(model)
    made = model.make(own.inputs, own.outputs)
    parallel = Tensor3dConfig(
        row=grid.row,
        col=grid.col,
        depth=grid.depth,
        zero=zero,
        stacked=getattr(model, "stacks", ()),
    )
    devices = int(np.prod(grid))
    method = train.compose(
        made,
        own,
        optimizer,
        parallel=None if grid is ALONE else parallel,
        batch_size=ROWS,
        steps=2,
        devices=devices,
    )
    return train.supervised(made, method, own)


@functools.cache
def trained(grid, model=GPT, optimizer=SGD, zero=0):
    """Parameters after two steps, the last loss and error, and a validation's."""
    made = task(grid, model, optimizer, zero)
    mesh = made.mesh(int(np.prod(grid)))
    state = train.init_state(made, 0, mesh)
    step = train.train_step(made, mesh, train.state_shapes(made, mesh))
    for number in range(2):
        rows = made.dataset.train.gather(np.arange(ROWS) + ROWS * number)
        state, metrics = step(state, sharding.place_batch(rows, mesh))
    figures = [float(metrics[name]) for name in ("loss", "error")]
    return trees.flatten(jax.device_get(state.params)), figures


def check(grid, model=GPT, optimizer=SGD, zero=0):
    ours, figures = trained(grid, model, optimizer, zero)
    theirs, wanted = trained(ALONE, model, optimizer)
    norms = {path: np.linalg.norm(leaf) for path, leaf in theirs.items()}
    least = 1e-3 * np.sqrt(sum(norm**2 for norm in norms.values()))
    for path, leaf in theirs.items():
        error = np.linalg.norm(ours[path] - leaf) / max(norms[path], least)
        assert error <= 1e-5, path
    np.testing.assert_allclose(figures, wanted, rtol=1e-5)


def name(grid):
    return "x".join(map(str, grid))


@pytest.mark.quick("1x1x2x4", "2x2x2x1")
@pytest.mark.acceptance("tensor3d", 1, 7)
@pytest.mark.parametrize("grid", GRIDS, ids=name)
def test_every_grid_trains_as_one_device(grid):
    check(grid)


@pytest.mark.quick("mlp")
@pytest.mark.parametrize("model", [each for each in MODELS if each != "gpt"])
def test_every_kind_of_layer_is_cut_right(model):
    check(Grid(1, 2, 2, 2), MODELS[model])


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(2, 1, 2, 2), Grid(2, 2, 1, 2)], ids=name)
def test_the_optimizers_state_is_spread_too(grid):
    check(grid, optimizer=ADAM, zero=1)


@pytest.mark.slow
@pytest.mark.acceptance("tensor3d", 8)
@pytest.mark.faults(5)
def test_a_checkpoint_of_a_grid_goes_on_on_another(tmp_path):
    here, there = (task(grid, GPT, ADAM) for grid in (Grid(1, 1, 2, 4), Grid(2, 1, 4)))
    mesh, other = here.mesh(8), there.mesh(8)
    like = train.state_shapes(here, mesh)
    step = train.train_step(here, mesh, like)
    rows = here.dataset.train.gather(np.arange(ROWS))
    state, _ = step(train.init_state(here, 0, mesh), sharding.place_batch(rows, mesh))
    saved = jax.device_get((state.params, state.opt_state))
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        shapes = train.state_shapes(there, other)
        moved = checkpoints.restore(shapes, mesh=other).state
    got = jax.device_get((moved.params, moved.opt_state))
    jax.tree.map(np.testing.assert_array_equal, got, saved)
    again = train.train_step(there, other, shapes)
    _, metrics = step(state, sharding.place_batch(rows, mesh))
    _, theirs = again(moved, sharding.place_batch(rows, other))
    assert float(theirs["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)


def needed_by(jaxpr, variable):
    """What a result of a program is computed of."""
    needed = {variable}
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed |= {v for v in equation.invars if not hasattr(v, "val")}
    return needed


@pytest.mark.acceptance("tensor3d", 6)
def test_pieces_of_a_batch_do_not_wait_for_each_other():
    model = MODELS["pieces"].make((6,), 24)
    params, state = model.init(jax.random.key(0))
    tokens = dataset(GPT).train.gather(np.arange(4))["x"]
    whole = GPT.make((6,), 24)
    y, _ = model.apply(params, state, tokens, train=True)
    wanted, _ = whole.apply(params, state, tokens, train=True)
    np.testing.assert_allclose(y, wanted, atol=1e-6)
    traced = jax.make_jaxpr(lambda x: model.apply(params, state, x, train=True)[0])
    (scan,) = [e for e in traced(tokens).jaxpr.eqns if e.primitive.name == "scan"]
    body, first = scan.params["jaxpr"].jaxpr, scan.params["num_consts"]
    count = scan.params["num_carry"]
    carried = [
        at for at in range(count) if body.invars[first + at].aval.shape == (2, 6, 16)
    ]
    assert len(carried) == 2
    for at in carried:
        needs = needed_by(body, body.outvars[at])
        assert {other for other in carried if body.invars[first + other] in needs} == {
            at
        }
    with pytest.raises(ConfigError, match="got 3 rows, pieces=2"):
        model.apply(params, state, tokens[:3], train=True)


def test_passes_of_a_weighted_batch_add_up_to_one_device_s():
    rows = dataset(MLP).train.gather(np.arange(ROWS))
    weight = np.arange(ROWS, dtype=np.float32) // 2 % 3  # none on the first devices

    def step(grid, passes):
        made = task(grid, MLP)
        mesh = made.mesh(int(np.prod(grid)))
        config = train.TrainConfig(batch_size=ROWS, accumulate=passes)
        made = train.accumulating(made, config, mesh)
        state = train.init_state(made, 0, mesh)
        program = train.train_step(made, mesh, state)
        placed = sharding.place_batch({**rows, "weight": weight}, mesh)
        state, metrics = program(state, placed)
        return jax.device_get((state.params, metrics["loss"]))

    found, wanted = step(Grid(2, 2, 2, 1), 2), step(ALONE, 1)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_chunks_of_the_loss_are_refused():
    model = dataclasses.replace(GPT, loss_chunk=2)
    with pytest.raises(
        ConfigError, match=r"loss_chunk=2 goes with a whole head, .*tensor3d"
    ):
        trained(Grid(1, 1, 2, 2), model)
