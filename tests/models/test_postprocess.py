"""Models that post-process ensembles, against their definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from hpcjax import core, layers, metrics, models
from hpcjax.core.errors import ConfigError
from hpcjax.models._member_attention import MemberBlock

SHAPES = {"members": (5, 8, 4, 2), "fields": (5, 8, 7)}


@functools.cache
def draw(seed=0, batch=3):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(batch, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }


def predict(model, params=None, x=None):
    own, state = model.init(jax.random.key(0))
    x = draw() if x is None else x
    return model.apply(own if params is None else params, state, x, train=False)[0]


@pytest.mark.parametrize(
    "make",
    [
        models.raw_ensemble,
        functools.partial(models.emos, variant="ens10"),
        functools.partial(models.point_mlp, widths=(4,)),
        functools.partial(models.field_cnn, width=2),
        functools.partial(models.field_unet, width=2),
    ],
)
def test_a_network_starts_as_the_raw_ensemble(make):
    target = np.asarray(draw()["members"][..., 0], np.float64)
    found = predict(make(SHAPES, 2))
    np.testing.assert_allclose(found.mean, target.mean(-1), atol=1e-6)
    np.testing.assert_allclose(found.std, target.std(-1), rtol=1e-5)


@pytest.mark.acceptance("ens10", 6)
def test_sizes_are_those_of_the_paper():
    for levels, mlp, unet in ((7, 2562, 633_698), (11, 3586, 636_002)):
        point = {"members": (9, 8, 2, levels), "fields": (9, 8, 2 * levels + 3)}
        assert models.num_params(models.point_mlp(point, 2)) == mlp
        fields = {"members": (9, 8, 2, levels), "fields": (9, 8, 2 * levels)}
        assert models.num_params(models.field_unet(fields, 2)) == unet


def test_emos_is_four_coefficients():
    params = {"a": 0.3, "b": 0.9, "c": 0.2, "d": 1.5}
    arrays = jax.tree.map(jnp.float32, params)
    found = predict(models.emos(SHAPES, 2), arrays)
    target = np.asarray(draw()["members"][..., 0], np.float64)
    np.testing.assert_allclose(found.mean, 0.3 + 0.9 * target.mean(-1), atol=1e-6)
    variance = 0.04 + 2.25 * target.var(-1)
    np.testing.assert_allclose(found.std, np.sqrt(variance), rtol=1e-5)
    grid = jnp.arange(40.0).reshape(5, 8)
    points = {name: grid + value for name, value in arrays.items()}
    found = predict(models.emos(SHAPES, 2, per_point=True), points)
    expected = grid + 0.3 + (grid + 0.9) * target.mean(-1)
    np.testing.assert_allclose(found.mean, expected, rtol=1e-4, atol=1e-4)
    flat = predict(models.emos(SHAPES, 2, variant="climatology"))
    np.testing.assert_array_equal(flat.std, np.ones((3, 5, 8)))
    scattered = models.emos(SHAPES, 2, jitter=0.5)
    first, other = (scattered.init(jax.random.key(seed))[0] for seed in (0, 1))
    assert not np.allclose(first["b"], other["b"])


def test_a_member_of_equal_values_has_no_infinite_score():
    x = draw() | {"members": jnp.ones((3, 5, 8, 4, 2))}
    for make in (models.raw_ensemble, models.emos):
        model = make(SHAPES, 2)
        params, state = model.init(jax.random.key(0))

        def loss(params, model=model, state=state):
            found = model.apply(params, state, x, train=True)[0]
            return metrics.crps_gaussian(*found[:2], jnp.zeros((3, 5, 8))).mean()

        value, slopes = jax.value_and_grad(loss)(params)
        assert np.isfinite(value)
        assert all(np.isfinite(each).all() for each in jax.tree.leaves(slopes))


def test_around_the_globe_there_is_no_border():
    x = draw()["fields"]
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 7, 2))
    for padding, turns in (("periodic", True), ("zero", False)):
        pad = functools.partial(layers.pad_globe, size=1, padding=padding)

        def convolve(x, pad=pad):
            return layers.conv(pad(x), kernel, padding="VALID")

        turned = convolve(jnp.roll(x, 3, axis=2))
        same = np.allclose(turned, jnp.roll(convolve(x), 3, axis=2), atol=1e-5)
        assert same == turns
    with pytest.raises(ValueError, match="at most 8 longitudes: got 9"):
        layers.pad_globe(x, 9)
    unet = models.field_unet(SHAPES, 2, width=2)
    params, state = unet.init(jax.random.key(0))
    noisy = jax.tree.map(lambda p: p + 0.1, params)
    apply = jax.jit(lambda x: unet.apply(noisy, state, x, train=False)[0].mean)
    # By what both halvings divide.
    turned = apply(jax.tree.map(lambda a: jnp.roll(a, 4, axis=2), draw()))
    np.testing.assert_allclose(turned, jnp.roll(apply(draw()), 4, axis=2), rtol=1e-3)


@pytest.mark.acceptance("ens-postprocess", 12)
def test_emos_finds_the_coefficients_that_made_the_truth():
    rng = np.random.default_rng(0)
    m, s = 3 * rng.normal(size=(100_000, 1)), np.sqrt(rng.gamma(2, 0.5, (100_000, 1)))
    members = m + s * rng.normal(size=(100_000, 5))
    mean, variance = members.mean(1), members.var(1)
    y = 1 + 0.8 * mean + np.sqrt(0.2 + 1.5 * variance) * rng.normal(size=100_000)
    shapes = {"members": (1, 1, 5, 1), "fields": (1, 1, 3)}
    model = models.emos(shapes, 2, variant="softplus")
    x = {"members": jnp.asarray(members, "f4").reshape(-1, 1, 1, 5, 1)}
    y = jnp.asarray(y, "f4")

    @jax.jit
    @jax.value_and_grad
    def score(found):
        params = dict(zip("abcd", found, strict=True))
        mean, std = (
            each[:, 0, 0] for each in model.apply(params, {}, x, train=True)[0][:2]
        )
        return metrics.crps_gaussian(mean, std, y).mean()

    def call(found):
        return [np.asarray(each, np.float64) for each in score(jnp.float32(found))]

    start, _ = model.init(jax.random.key(0))
    first = [float(start[name]) for name in "abcd"]
    a, b, c, d = optimize.minimize(call, first, jac=True, method="BFGS").x
    c, d = np.logaddexp(0, [c, d])
    np.testing.assert_allclose([a, b, d], [1, 0.8, 1.5], rtol=0.03)
    assert c == pytest.approx(0.2, rel=0.06)


@pytest.mark.acceptance("ens10", 8)
def test_attention_across_members_knows_no_order():
    def call(block, x, *, train, key):
        return block(x, train=train)

    block = models.from_nnx(lambda: MemberBlock(3, core.Policy()), call=call)
    params, state = block.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 5, 8, 3))
    apply = jax.jit(lambda p, x: block.apply(p, state, x, train=False)[0])
    np.testing.assert_allclose(apply(params, x), jax.nn.relu(x), atol=1e-6)
    noisy = jax.tree.map(
        lambda p: p + 0.3 * jax.random.normal(jax.random.key(2), p.shape), params
    )
    order = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(
        apply(noisy, x[:, order]), apply(noisy, x)[:, order], atol=1e-5
    )
    assert not np.allclose(apply(noisy, x), jax.nn.relu(x), atol=1e-2)
    model = models.member_attention(SHAPES, 2, width=3)
    own, state = model.init(jax.random.key(0))
    moved = jax.tree.map(lambda p: p + 0.1, own)
    mixed = draw() | {"members": draw()["members"][..., order, :]}
    one, other = (model.apply(moved, state, x, train=False)[0] for x in (draw(), mixed))
    np.testing.assert_allclose(one.mean, other.mean, atol=1e-5)
    np.testing.assert_allclose(one.std, other.std, atol=1e-5)


def test_attention_is_the_papers_sum():
    block = MemberBlock(2, core.Policy())
    x = np.asarray(jax.random.normal(jax.random.key(3), (1, 3, 2, 2, 2)), np.float64)
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(2, 2)) for name in ("query", "key", "value")}

    def call(module, x, *, train, key):
        return module(x, train=train)

    model = models.from_nnx(lambda: block, call=call)
    params, state = model.init(jax.random.key(0))
    for name, kernel in weights.items():
        params[name]["kernel"] = jnp.asarray(kernel, jnp.float32)
    params["output"]["kernel"] = jnp.eye(2)
    y = (x - x.mean((2, 3, 4), keepdims=True)) / np.sqrt(
        x.var((2, 3, 4), keepdims=True) + 1e-5
    )
    flat = y.reshape(3, 4, 2)
    q, k, v = (flat @ weights[name] for name in ("query", "key", "value"))
    q, k = np.maximum(q, 0), np.maximum(k, 0)
    out = np.empty_like(v)
    for head in range(2):
        for j in range(3):
            scores = [(k[i, :, head] * q[j, :, head]).sum() / 2 for i in range(3)]
            share = np.exp(scores) / np.exp(scores).sum()
            others = v[:, :, head] - v[:, :, head].mean(0)
            out[j, :, head] = v[j, :, head] + (share[:, None] * others).sum(0)
    expected = np.maximum(x + out.reshape(x.shape), 0)
    found = model.apply(params, state, jnp.asarray(x, jnp.float32), train=False)[0]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.emos((8, 8, 3), 2), "shapes of 'members' and 'fields'"),
        (lambda: models.emos(SHAPES, 2, variant="x"), "variant must be one of"),
        (
            lambda: models.field_unet(SHAPES | {"fields": (1, 8, 7)}, 2),
            "at least 4 points on a side",
        ),
        (
            lambda: models.member_attention(SHAPES | {"members": (5, 8, 1, 2)}, 2),
            "members must be at least 2: got 1",
        ),
    ],
)
def test_what_a_model_cannot_take_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
