"""The grid that sends the fewest words, against all grids one by one."""

import itertools
import math

import jax
import pytest

from hpcjax import core, cost, models
from hpcjax.core import ConfigError
from hpcjax.sharding import Grid, MatrixLayer

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


def test_features_of_a_block():
    assert cost.grid_features(BLOCK) == (12 * WIDTH, 4 * WIDTH)


def test_what_fits_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"no grid of 4 devices fits: .*memory=10 "):
        cost.best_grid(BLOCK, ROWS, 4, memory=10)
    with pytest.raises(ConfigError, match=r"scheme must be .*: got megatrom"):
        cost.comm_volume(BLOCK, ROWS, Grid(), "megatrom")
    with pytest.raises(ConfigError, match="a number to the 3: got row=2, col=2"):
        cost.comm_volume(BLOCK, ROWS, Grid(row=2, col=2), "colossal3d")
