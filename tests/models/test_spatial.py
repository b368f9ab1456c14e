"""Networks of fields: their sizes, and what a spatial mixture of experts learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import data, layers, models
from hpcjax.core import ConfigError
from hpcjax.data import heat
from hpcjax.layers import RoutingLoss

SIZE = 12


@functools.cache
def plate(size, runs=8):
    """Training pairs on a plate, its materials and their stencils."""
    cfg = data.HeatConfig(size=size, runs=runs, holdout_runs=1, steps=20)
    source = cfg.load().train
    batch = source.gather(np.arange(len(source)))
    stencils = np.zeros((3, 3, 1, 3), np.float32)
    for index, d in enumerate(cfg.diffusivities):
        stencils[:, :, 0, index] = [[0, d, 0], [d, 1 - 4 * d, d], [0, d, 0]]
    return batch, heat.place_materials(size, 3), stencils


def learn(loss, start, batch, *, steps, lr, rows=8, final=1.0):
    """Parameters after steps of Adam, whose rate falls to `final` of what it was."""
    schedule = optax.cosine_decay_schedule(lr, steps, final)
    tx = optax.adam(schedule)
    count = len(batch["x"])

    def step(carry, index):
        params, inner = carry
        chosen = jax.random.randint(
            jax.random.fold_in(jax.random.key(7), index), (rows,), 0, count
        )
        grads = jax.grad(loss)(params, batch["x"][chosen], batch["y"][chosen])
        updates, inner = tx.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
    return run((start, tx.init(start)))[0]


def gate_of_true_filters(size, *, steps, lr, runs=8):
    """The share of places that get the right filter when the gate alone learns."""
    batch, materials, stencils = plate(size, runs)
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(gate, x, y):
        options = {"routing_loss": RoutingLoss(quantile=0.3)}
        found = layers.spatial_experts(x, stencils, gate, 1, **options)
        return jnp.mean((found - y) ** 2)

    gate = jax.random.uniform(jax.random.key(1), (size, size, 3), minval=-3, maxval=3)
    before = (layers.routing_map(gate)[..., 0] == materials).mean()
    assert before < 0.5
    gate = learn(loss, gate, batch, steps=steps, lr=lr)
    return float((layers.routing_map(gate)[..., 0] == materials).mean())


@pytest.mark.acceptance("smoe", 5)
def test_a_gate_finds_the_materials_of_true_filters():
    assert gate_of_true_filters(SIZE, steps=1000, lr=1e-2) == 1.0


@pytest.mark.slow
@pytest.mark.acceptance("smoe", 5)
@pytest.mark.parametrize(
    ("lr", "steps", "least"), [(1e-2, 1000, 1.0), (1e-3, 5000, 0.999)]
)
def test_a_gate_finds_the_materials_of_the_published_plate(lr, steps, least):
    assert gate_of_true_filters(64, steps=steps, lr=lr, runs=50) >= least


def fit_filters(materials, *, rows=8):
    """Filters learnt with a fixed gate, and those of least squares, a material each."""
    batch, _, _ = plate(SIZE)
    gate = jnp.asarray(np.eye(3, dtype=np.float32)[materials])
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(kernel, x, y):
        return jnp.mean((layers.spatial_experts(x, kernel, gate, 1) - y) ** 2)

    start = jnp.zeros((3, 3, 1, 3))
    learnt = learn(loss, start, batch, steps=3000, lr=2e-2, rows=rows, final=0.01)
    taken = np.asarray(layers.patches(batch["x"], (3, 3)), np.float64)
    solved = np.stack(
        [
            np.linalg.lstsq(
                taken[:, where].reshape(-1, 9),
                np.asarray(batch["y"])[:, where].ravel(),
                rcond=None,
            )[0]
            for where in (materials == each for each in range(3))
        ],
        axis=-1,
    )
    return np.asarray(learnt), solved.reshape(3, 3, 1, 3)


@pytest.mark.acceptance("smoe", 6)
def test_with_the_true_map_filters_are_those_of_least_squares():
    _, materials, stencils = plate(SIZE)
    learnt, solved = fit_filters(materials)
    np.testing.assert_allclose(solved, stencils, rtol=0, atol=1e-5)
    np.testing.assert_allclose(learnt, stencils, rtol=0, atol=1e-2)


def test_sizes_are_those_of_the_layers():
    field = (64, 64, 1)
    assert models.num_params(models.smoe(field, 1)) == 27 + 12_288
    assert models.num_params(models.locally_connected(field, 1)) == 36_864
    assert models.num_params(models.cnn(field, 1)) == 4 * 10 + 37
    assert models.num_params(models.cnn(field, 1, coordinates=True)) == 4 * 28 + 37


@pytest.mark.parametrize("coordinates", [False, True])
def test_a_residual_network_gives_its_input_until_it_learns_a_change(coordinates):
    options = {"coordinates": coordinates, "residual": True}
    model = models.cnn((6, 5, 2), 2, **options)
    params, state = model.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 5, 2)), jnp.float32)
    np.testing.assert_array_equal(model.apply(params, state, x, train=False)[0], x)
    params["head"]["bias"] += jnp.array([1.0, -2.0])
    moved = model.apply(params, state, x, train=False)[0] - x
    np.testing.assert_allclose(moved, moved * 0 + jnp.array([1, -2]), atol=1e-6)


@pytest.mark.parametrize("gate", ["conv", "coord_conv"])
def test_a_gate_may_depend_on_the_example(gate):
    model = models.smoe((5, 6, 2), 2, gate=gate, weighted=True, widths=(3,))
    params, state = model.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 6, 2)), jnp.float32)

    def loss(params):
        return jnp.mean(model.apply(params, state, x, train=True)[0] ** 2)

    grads = jax.grad(loss)(params)
    assert (jnp.abs(grads["gate"]["kernel"]).sum((0, 1, 3)) > 0).all()
    wide = 3 + 2 * (gate == "coord_conv")
    assert params["gate"]["kernel"].shape == (3, 3, wide, 6)


def test_a_mixture_of_forecasts_puts_out_a_gaussian():
    shapes = {"members": (5, 8, 4, 2), "fields": (5, 8, 7)}
    model = models.smoe(shapes, 2, padding="periodic", filter_scale=1e-6)
    params, state = model.init(jax.random.key(0))
    rng = np.random.default_rng(0)
    x = {
        name: jnp.asarray(rng.normal(size=(3, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }
    found, _ = model.apply(params, state, x, train=False)
    members = np.asarray(x["members"][..., 0])
    np.testing.assert_allclose(found.mean, members.mean(-1), atol=1e-4)
    np.testing.assert_allclose(found.std, members.std(-1), rtol=1e-4)
    turned = jax.tree.map(lambda each: jnp.roll(each, 3, axis=2), x)
    gate = jnp.roll(params["gate"], 3, axis=1)
    again, _ = model.apply(params | {"gate": gate}, state, turned, train=False)
    np.testing.assert_allclose(again.std, jnp.roll(found.std, 3, 2), rtol=1e-6)


@pytest.mark.acceptance("smoe", 12)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.smoe((8, 8), 1), r"\(height, width, channels\)"),
        (lambda: models.cnn((8, 8, 1), 0), r"\(height, width, channels\)"),
        (lambda: models.smoe((8, 8, 1), 1, experts=1), "experts"),
        (lambda: models.smoe((8, 8, 1), 1, kernel_size=2), "must be odd"),
        (lambda: models.locally_connected((8, 8, 1), 1, kernel_size=4), "must be odd"),
        (lambda: models.cnn((8, 8, 1), 1, widths=(0,)), "widths"),
        (lambda: models.cnn((8, 8, 2), 1, residual=True), "channels=2, outputs=1"),
        (lambda: models.smoe({"fields": (8, 8, 1)}, 2), "'members' and 'fields'"),
    ],
)
def test_bad_values_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
