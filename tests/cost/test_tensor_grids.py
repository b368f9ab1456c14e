"""The grid that sends the fewest words, against all grids one by one."""

import dataclasses
import functools
import itertools
import math

import jax
import pytest

from hpcjax import core, cost, data, models, perf, train
from hpcjax.core import ConfigError
from hpcjax.models import CausalLmConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs.training import with_stacks
from hpcjax.sharding import Grid, MatrixLayer, Tensor3dConfig

WIDTH = 2**7 * 3
BLOCK = tuple(
    MatrixLayer(inputs=k * WIDTH, outputs=n * WIDTH, transposed=turned, count=1)
    for k, n, turned in ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
)
ROWS = 4096


def words(grid):
    """The block's words as the paper has them: 8 B H / G (G_c - 1 + 3 (G_r - 1))."""
    devices = math.prod(grid)
    return 8 * ROWS * WIDTH / devices * (grid.col - 1 + 3 * (grid.row - 1))


@pytest.mark.acceptance("tensor3d", 4)
@pytest.mark.parametrize(
    ("devices", "bracket"), [(4, 3), (8, 6), (16, 10), (32, 16), (64, 24)]
)
def test_the_best_grid_of_a_block_is_the_papers(devices, bracket):
    best, *_ = cost.best_grid(BLOCK, ROWS, devices, parts=devices)
    assert best.grid.col - 1 + 3 * (best.grid.row - 1) == bracket
    assert best.total == pytest.approx(8 * ROWS * WIDTH / devices * bracket)
    megatron = cost.comm_volume(BLOCK, ROWS, best.grid, "megatron")
    alone = Grid(col=devices)
    assert sum(megatron.values()) == cost.comm_volume(BLOCK, ROWS, alone)["col"]
    assert sum(megatron.values()) == pytest.approx(words(alone))


@pytest.mark.acceptance("tensor3d", 4)
@pytest.mark.parametrize("devices", [1, 2, 6, 12, 24, 48, 64])
def test_the_best_grid_is_the_least_of_all(devices):
    every = (
        [
            Grid(*sizes)
            for sizes in itertools.product(range(1, devices + 1), repeat=4)
            if math.prod(sizes) == devices
        ]
        if devices <= 24
        else [
            Grid(a, b, c, devices // (a * b * c))
            for a in range(1, devices + 1)
            for b in range(1, devices // a + 1)
            for c in range(1, devices // (a * b) + 1)
            if devices % (a * b * c) == 0
        ]
    )
    weights = sum(each.inputs * each.outputs for each in BLOCK)

    def total(grid):
        own = weights / (grid.row * grid.col)
        gradients = 2 * (grid.data - 1) / grid.data * own / grid.depth
        gathers = 3 * (grid.depth - 1) / grid.depth * own
        return words(grid) + gradients + gathers

    best, *_ = cost.best_grid(BLOCK, ROWS, devices)
    assert best.total == pytest.approx(min(map(total, every)))
    assert best.total == pytest.approx(total(best.grid))
    same = [grid for grid in every if total(grid) <= best.total * (1 + 1e-12)]
    assert best.grid.row == min(grid.row for grid in same)
    # In less memory more devices share a model.
    state = 16 * weights
    for grid, _ in cost.best_grid(BLOCK, ROWS, devices, memory=state / devices):
        assert grid.data == 1


def test_a_models_grids_are_those_that_it_can_be_cut_on():
    model = models.CausalLmConfig(depth=1, width=64, heads=2).make((4,), 64)
    found = cost.best_grid(model, 64, 16, parts=4, topk=99)
    # Two heads: 1x4 is none.
    assert {(each.grid.row, each.grid.col) for each in found} == {(2, 2), (4, 1)}
    assert found == sorted(found, key=lambda each: each.total)
    state = 16 * core.trees.num_params(jax.eval_shape(model.init, jax.random.key(0))[0])
    for grid, _ in cost.best_grid(model, 64, 16, memory=state / 16, topk=99):
        assert grid.data == 1
    with pytest.raises(ConfigError, match="topk=0"):
        cost.best_grid(model, 64, 16, topk=0)


LM = CausalLmConfig(depth=2, width=64, heads=32)
TOKENS, CONTEXT = 64, 8
EIGHT, SIXTEEN, THIRTY_TWO = (
    [
        Grid(*sizes)
        for sizes in itertools.product((1, 2, 4, 8, 16, 32), repeat=4)
        if math.prod(sizes) == devices
    ]
    for devices in (8, 16, 32)
)


@functools.cache
def lm(vocabulary, tied=True, remat="none"):
    options = dataclasses.replace(models.GPT2, tied_head=tied)
    own = dataclasses.replace(LM, options=options, remat=remat)
    return own.make((CONTEXT,), vocabulary)


def all_words(grid, vocabulary, tied=True, again=False):
    """Two blocks, their norms, a look-up, a head and a loss, written out.

    Again: what blocks sum and gather forwards, but for the last layer's output.
    """
    data, depth, row, col = grid
    share = [(devices - 1) / devices for devices in grid]
    own, blocks, norms, width = TOKENS / data / depth, 2, 5, 64
    along_row = own * (blocks * 12 * width + vocabulary) / col + 4 * own * norms
    along_col = own * (blocks * 4 * width + 2 * width) / row + 4 * own
    matrices = blocks * 12 * width**2 / row / col
    scales, biases = blocks * 2 * width / row, blocks * (7 / col + 4 / row) * width
    if again:
        along_row += own * blocks * 7 * width / col + 2 * own * (norms - 1)
        along_col += own * blocks * width / row
    tables = (2 - tied) * vocabulary * width / row / col + CONTEXT * width / row
    rest = biases + tables + 2 * width / row
    gathered = 3 * (matrices + scales) + 2 * rest
    gathered += again * (biases - blocks * width / row)
    gradients = 2 * (matrices + scales + rest) / depth
    words = gradients, gathered, 2 * along_row, 2 * along_col
    return [part * each for part, each in zip(share, words, strict=True)]


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [512, 4096, 65536])
def test_a_models_best_grid_is_the_least_of_all(vocabulary, tied, remat):
    for every in (EIGHT, SIXTEEN, THIRTY_TWO):
        devices, model = math.prod(every[0]), lm(vocabulary, tied, remat)
        found = cost.best_grid(model, TOKENS, devices, topk=99)
        assert {each.grid for each in found} == set(every)
        for grid, words in found:
            wanted = all_words(grid, vocabulary, tied, remat == "full")
            assert list(words.values()) == pytest.approx(wanted, rel=1e-12)
        assert found[0].total == min(each.total for each in found)


def count_asked(grid, model, vocabulary):
    """Words of a device in what JAX asks for, by axis; loops have two turns."""
    parallel = Tensor3dConfig(row=grid.row, col=grid.col, depth=grid.depth)
    own = data.noise_tokens(TOKENS // CONTEXT, CONTEXT, vocabulary)
    sizes = {"steps": 1, "devices": 8}
    method = train.compose(
        model,
        own,
        SgdConfig(lr=0.1),
        parallel=with_stacks(parallel, LM.stacks),
        batch_size=TOKENS // CONTEXT,
        **sizes,
    )
    task = train.supervised(model, method, own)
    mesh = task.mesh(8)
    state = train.state_shapes(task, mesh)
    batch = train.batch_shapes(task, TOKENS // CONTEXT, mesh)
    lowered = train.train_step(task, mesh, state).lower(state, batch)
    found = dict.fromkeys((*Grid._fields, "several"), 0.0)
    for each in perf.collectives(lowered):
        along = perf.axes_of(each, mesh)
        devices = math.prod(mesh.shape[axis] for axis in along)
        if devices > 1:
            words = each.bytes / 4 * perf.sent_per_byte(each.kind, devices)
            axis = along[0] if len(along) == 1 else "several"
            found[axis] += words * (each.times if each.bounded else LM.depth)
    return found


def check_asked(grid, model, vocabulary):
    """Compares what is asked for with the formula; returns it in all."""
    asked = count_asked(grid, model, vocabulary)
    words = cost.comm_volume(model, TOKENS, grid)
    # Metrics, and whether arrays are finite, along axes of which only one may be long.
    longer = {axis: asked[axis] - words[axis] for axis in words}
    assert 0 <= min(longer.values()) <= sum(longer.values()) + asked["several"] < 120
    return sum(asked.values())


def test_a_models_words_are_those_that_jax_asks_for():
    check_asked(Grid(1, 2, 2, 2), lm(2048, remat="full"), 2048)


@pytest.mark.slow
@pytest.mark.parametrize("options", [models.LLAMA, models.GPT2])
@pytest.mark.parametrize("remat", ["dots", "offload", "collectives"])
def test_so_they_are_of_other_blocks_computed_again(options, remat):
    for place in ("pre", "post"):
        own = dataclasses.replace(options, norm_position=place)
        model = dataclasses.replace(LM, options=own, remat=remat)
        check_asked(Grid(1, 2, 2, 2), model.make((CONTEXT,), 512), 512)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocabulary", [512, 65536])
def test_the_best_grid_is_the_least_that_jax_asks_for(vocabulary, tied):
    model = lm(vocabulary, tied)
    found = {grid: check_asked(grid, model, vocabulary) for grid in EIGHT}
    (best,) = cost.best_grid(model, TOKENS, 8, topk=1)
    assert found[best.grid] == min(found.values())


def test_a_whole_model_is_counted_by_one_scheme():
    with pytest.raises(ConfigError, match="megatron is a grid with row=1"):
        cost.comm_volume(lm(512), TOKENS, Grid(row=2, col=2), "megatron")


def test_features_of_a_block():
    assert cost.grid_features(BLOCK) == (12 * WIDTH, 4 * WIDTH)


def test_what_fits_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"no grid of 4 devices fits: .*memory=10 "):
        cost.best_grid(BLOCK, ROWS, 4, memory=10)
    with pytest.raises(ConfigError, match=r"scheme must be .*: got megatrom"):
        cost.comm_volume(BLOCK, ROWS, Grid(), "megatrom")
    with pytest.raises(ConfigError, match="a number to the 3: got row=2, col=2"):
        cost.comm_volume(BLOCK, ROWS, Grid(row=2, col=2), "colossal3d")
