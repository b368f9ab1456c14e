"""Networks of the spread, against their definitions and a network of each level."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, layers, models
from hpcjax.core.errors import ConfigError
from hpcjax.models import _spread_nets as nets

# Two leads and two levels of three channels, and the place.
AXES = (2, 2)
SHAPES = {"members": (8, 16, 4, 2), "fields": (8, 16, 15)}
UNET = functools.partial(models.unet3d, SHAPES, 2, base=2, poolings=1, axes=AXES)
LSTM = functools.partial(models.conv_lstm, SHAPES, 2, width=3, axes=AXES)
HALF = core.Policy(compute="bfloat16")


@functools.cache
def draw(seed=0, batch=2):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(batch, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }


@functools.cache
def noisy(make, **options):
    """The model and its parameters, of which none is zero."""
    model = make(**options)
    params, _ = jax.jit(model.init)(jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.jit(lambda p, x: model.apply(p, {}, x, train=True)[0]), jax.tree.map(
        lambda p: p + 0.1 * jnp.asarray(rng.normal(size=p.shape), p.dtype), params
    )


def predict(make, x, **options):
    apply, params = noisy(make, **options)
    return apply(params, x)


@pytest.mark.acceptance("weather-uncertainty", 1)
def test_sizes_and_pooled_sides_are_the_papers(monkeypatch):
    shapes = {"members": (32, 64, 2, 7), "fields": (32, 64, 3 * 2 * 13 + 3)}
    seen = []
    run = nets._Step.__call__
    monkeypatch.setattr(
        nets._Step, "__call__", lambda s, x: (seen.append((s, x.shape)), run(s, x))[1]
    )
    for base, count in ((32, 17_142_689), (16, 4_341_201), (8, 1_113_065)):
        model = models.unet3d(shapes, 2, base=base, axes=(3, 2))
        assert models.num_params(model) == count
    own = {name: jnp.zeros((1, *shape)) for name, shape in shapes.items()}
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    out, _ = jax.eval_shape(
        lambda p, x: model.apply(p, {}, x, train=False), params, own
    )
    assert out.std.shape == (1, 32, 64)
    widths = [shape[-1] // 2 for _, shape in seen]
    base = 8
    assert len(widths) == 17
    assert widths[:6] == [42, 2 * base, 2 * base, 3 * base, 4 * base, 5 * base]
    joined = [7 + 5, 10, 10 + 4, 7, 7 + 3, 6, 6 + 2, 4]
    assert widths[6:14] == [base * each for each in joined]
    assert widths[14:] == [4 * base + 42, 4 * base, 2 * base]
    rows = [shape[1] for _, shape in seen]
    assert rows == [32, 32, 16, 8, 4, 2, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 32]
    assert all(shape[-1] % 2 == 0 for _, shape in seen)


@pytest.mark.acceptance("weather-uncertainty", 2)
def test_levels_are_mixed_by_the_outer_slices_alone():
    x = draw()
    y = np.asarray(x["fields"]).copy()
    own = y[..., :-3].reshape(2, 8, 16, 2, 2, 3)
    swapped = np.concatenate([own[..., ::-1, :].reshape(2, 8, 16, 12), y[..., -3:]], -1)
    turned = x | {"fields": jnp.asarray(swapped)}
    assert not np.allclose(predict(UNET, x).std, predict(UNET, turned).std, atol=1e-3)
    apply, params = noisy(UNET)
    flat = jax.tree.map(
        lambda p: p.at[jnp.array([0, 2])].set(0) if p.ndim == 5 else p, params
    )
    # Of each level a 2-D network, and the mean of what both put out.
    shapes = SHAPES | {"fields": (8, 16, 9)}
    single = models.unet3d(shapes, 2, base=2, poolings=1, axes=(2, 1))
    single = jax.jit(lambda x, apply=single.apply: apply(flat, {}, x, train=False)[0])
    raw = np.log(np.expm1(np.asarray(x["members"][..., 0].std(-1), np.float64)))
    found = []
    for level in range(2):
        fields = np.concatenate(
            [own[..., level, :].reshape(2, 8, 16, 6), y[..., -3:]], -1
        )
        std = single(x | {"fields": jnp.asarray(fields)}).std
        found.append(np.log(np.expm1(np.asarray(std, np.float64))) - raw)
    both = np.log1p(np.exp(raw + np.mean(found, 0)))
    np.testing.assert_allclose(apply(flat, x).std, both, atol=1e-5)


def test_three_levels_are_convolved_as_in_three_dimensions():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 5, 6, 3, 2)), jnp.float32)
    step = models.from_nnx(
        lambda: nets._Step(2, 4, 3, "zero", core.Policy()),
        call=lambda step, x, *, train, key: step(x),
    )
    params, _ = step.init(jax.random.key(0))
    found = step.apply(params, {}, x.reshape(1, 5, 6, 6), train=False)[0]
    expected = jax.lax.conv_general_dilated(
        jnp.moveaxis(x, 3, 1),
        params["kernel"],
        (1, 1, 1),
        "SAME",
        dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
    )
    expected = jnp.moveaxis(expected, 1, 3).reshape(found.shape)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.acceptance("weather-uncertainty", 3)
def test_doubling_has_no_seam():
    x = np.random.default_rng(0).normal(size=(2, 3, 5, 4))

    def double(x, axis, mode):
        """Half-pixel centres: a quarter of the one neighbour, then of the other."""
        width = [(1, 1) if each == axis else (0, 0) for each in range(4)]
        wide = np.pad(x, width, mode=mode)
        low, own, high = (
            np.take(wide, np.arange(x.shape[axis]) + at, axis) for at in range(3)
        )
        pair = np.stack([0.75 * own + 0.25 * low, 0.75 * own + 0.25 * high], axis + 1)
        shape = [side * (1 + (each == axis)) for each, side in enumerate(x.shape)]
        return pair.reshape(shape)

    for padding, mode in (("zero", "edge"), ("periodic", "wrap")):
        found = layers.double_globe(jnp.asarray(x, jnp.float32), padding)
        expected = double(double(x, 1, "edge"), 2, mode)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    halved = nets.halve(found)
    parts = [found[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    np.testing.assert_array_equal(halved, np.max(parts, 0))


@pytest.mark.acceptance("weather-uncertainty", 4)
def test_the_cell_is_the_papers_loop():
    rng = np.random.default_rng(0)
    gates, kernel = rng.normal(size=(3, 1, 2, 3, 4 * 2)), rng.normal(size=(2, 8))
    c = h = np.zeros((1, 2, 3, 2))
    memory = output = jnp.zeros((1, 2, 3, 2))

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    for each in gates:
        i, f, o, g = np.split(each + h @ kernel, 4, -1)
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        own = jnp.asarray(each, jnp.float32) + output @ jnp.asarray(kernel, jnp.float32)
        memory, output = nets.conv_lstm_cell(own, memory)
    np.testing.assert_allclose(memory, c, atol=1e-5)
    np.testing.assert_allclose(output, h, atol=1e-5)
    # The leads' order counts, and finite differences agree with the gradient.
    x = draw()
    apply, params = noisy(LSTM)
    own = x["fields"][..., :12].reshape(2, 8, 16, 2, 6)[..., ::-1, :]
    other = jnp.concatenate([own.reshape(2, 8, 16, 12), x["fields"][..., 12:]], -1)
    assert not np.allclose(
        apply(params, x).std, apply(params, x | {"fields": other}).std
    )
    flat, build = jax.flatten_util.ravel_pytree(params)
    way = jnp.asarray(np.random.default_rng(2).normal(size=flat.shape), jnp.float32)

    @jax.jit
    def loss(at):
        return apply(build(flat + at * way), x).std.mean()

    slope = float(jax.jit(jax.grad(loss))(0.0))
    step = 1e-3
    assert slope == pytest.approx(
        float(loss(step) - loss(-step)) / (2 * step), rel=2e-2
    )


@pytest.mark.acceptance("weather-uncertainty", 5)
@pytest.mark.parametrize(("make", "part"), [(UNET, 2), (LSTM, 2)])
def test_the_globe_has_no_seam(make, part):
    x = draw()
    turned = jax.tree.map(lambda a: jnp.roll(a, part, axis=2), x)
    found = predict(make, turned).std
    np.testing.assert_allclose(
        found, jnp.roll(predict(make, x).std, part, 2), atol=1e-5
    )
    apply, params = noisy(make, padding="zero")
    seam = np.abs(apply(params, turned).std - jnp.roll(apply(params, x).std, part, 2))
    assert seam.max() > 1e-3


@pytest.mark.acceptance("weather-uncertainty", 10, 12)
@pytest.mark.parametrize("make", [UNET, LSTM])
def test_half_precision_and_remat_are_the_same_network(make):
    x = draw()
    raw = np.asarray(x["members"][..., 0].std(-1))
    model = make()
    start = jax.jit(
        lambda x: model.apply(model.init(jax.random.key(0))[0], {}, x, train=False)[0]
    )(x)
    np.testing.assert_allclose(start.std, raw, rtol=1e-4)
    np.testing.assert_allclose(start.mean, x["members"][..., 0].mean(-1), atol=1e-6)

    def slopes(**options):
        apply, params = noisy(make, **options)
        optimizer = optax.adam(1e-3)
        differentiate = jax.value_and_grad(
            lambda params: ((apply(params, x).std - 1.5 * raw) ** 2).mean()
        )

        def advance(state, _):
            loss, grads = differentiate(state[0])
            updates, moments = optimizer.update(grads, state[1])
            moved = optax.apply_updates(state[0], updates), moments
            return moved, (loss, jax.flatten_util.ravel_pytree(grads)[0])

        start = params, optimizer.init(params)
        run = jax.jit(lambda start: jax.lax.scan(advance, start, length=50)[1])
        losses, grads = run(start)
        return grads[0], np.asarray(losses)

    wide, losses = slopes()
    np.testing.assert_allclose(slopes(remat=True)[0], wide, atol=1e-5)
    narrow, low = slopes(policy=HALF)
    assert losses[-1] < 0.9 * losses[0]
    assert low[0] == pytest.approx(losses[0], rel=0.01)
    assert low[40:].mean() == pytest.approx(losses[40:].mean(), rel=0.05)
    norms = jnp.linalg.norm(wide) * jnp.linalg.norm(narrow)
    assert jnp.vdot(wide, narrow) > 0.99 * norms
    assert not np.array_equal(wide, narrow)
    far = predict(make, x | {"fields": -1e4 * x["fields"]}, policy=HALF).std
    assert (np.asarray(far) >= 0).all()
    assert np.isfinite(far).all()


def test_the_papers_output_may_be_negative_and_what_is_cropped_stays_raw():
    x = draw()
    assert float(predict(UNET, x, positive="none").std.min()) < 0
    shapes = {"members": (9, 17, 4, 2), "fields": (9, 17, 15)}
    model = models.unet3d(shapes, 2, base=2, poolings=1, axes=AXES, crop=True)
    params = noisy(UNET)[1]
    apply = jax.jit(lambda x: model.apply(params, {}, x, train=False)[0])
    wide = {
        name: jnp.pad(each, ((0, 0), (0, 1), (0, 1), *[(0, 0)] * (each.ndim - 3)))
        for name, each in x.items()
    }
    found = apply(wide).std
    np.testing.assert_allclose(found[:, :8, :16], predict(UNET, x).std, atol=1e-5)
    assert float(jnp.abs(found[:, 8:]).max()) < 1e-5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.unet3d(SHAPES, 2, axes=AXES), r"divide by 32.*\(8, 16\)"),
        (lambda: LSTM(poolings=4), "crop=true leaves"),
        (lambda: UNET(axes=(5, 2)), "5 leads and 2 levels"),
        (lambda: UNET(poolings=6), "poolings must be from 1 to 5"),
    ],
)
def test_what_a_network_cannot_halve_or_split_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
