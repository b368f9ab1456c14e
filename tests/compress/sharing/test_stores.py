"""Weights that stores make, against loops and other definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.compress import sharing
from hpcjax.compress.sharing import Layer, SharingOptions, make_plan
from tests.compress.sharing.test_plan import WHOLE, WRN

RNG = np.random.default_rng(0)


def generate(parameters, plan):
    """By name, what the parameters make."""
    made = sharing.generate(parameters, plan)
    return {name: np.asarray(weights) for name, weights in made.items()}


@pytest.mark.quick("1-repeat", "1-mask", "5-repeat")
@pytest.mark.acceptance("ssn", 1)
@pytest.mark.parametrize("upsample", ["inter", "repeat", "mask", "wavg"])
@pytest.mark.parametrize("percent", [1, 5, 50, 200])
def test_every_layer_has_its_shape_and_all_weights_are_in_the_budget(percent, upsample):
    budget = WHOLE * percent // 100
    plan = make_plan(WRN, (0,) * 29, budget, SharingOptions(upsample=upsample))
    drawn = jax.eval_shape(lambda key: sharing.init(key, plan), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(drawn["stores"])) == budget
    made = jax.eval_shape(lambda shared: sharing.generate(shared, plan), drawn)
    assert {name: leaf.shape for name, leaf in made.items()} == {
        layer.name: layer.shape for layer in WRN
    }
    if percent >= 5:
        beside = sum(leaf.size for leaf in jax.tree.leaves(drawn)) - budget
        assert beside < 0.01 * budget


@pytest.mark.acceptance("ssn", 4)
def test_templates_are_combined_linearly():
    layers = [Layer("a", (4, 5)), Layer("b", (4, 5))]
    plan = make_plan(layers, (0, 0), 100)
    parameters = sharing.init(jax.random.key(0), plan)
    store = np.asarray(parameters["stores"]["0"])
    templates = store.reshape(5, 4, 5)

    def weights(coefficients):
        return generate(
            parameters | {"coefficients": {"a": coefficients, "b": coefficients}}, plan
        )["a"]

    for number, row in enumerate(jnp.eye(5)):
        np.testing.assert_array_equal(weights(row), templates[number])
    one, two = jnp.asarray(RNG.normal(size=(2, 5)), "float32")
    both = 2 * weights(one) - 3 * weights(two)
    np.testing.assert_allclose(weights(2 * one - 3 * two), both, atol=1e-5)
    mean = make_plan(layers, (0, 0), 100, SharingOptions(combine="avg"))
    assert sharing.init(jax.random.key(0), mean)["coefficients"] == {}
    averaged = generate(parameters, mean)["b"]
    np.testing.assert_allclose(averaged, templates.mean(0), atol=1e-6)


def test_embeddings_make_coefficients_by_one_map():
    layers = [Layer("a", (4, 5)), Layer("b", (4, 5)), Layer("c", (2, 5))]
    options = SharingOptions(combine="emb", embedding=3, templates=2)
    plan = make_plan(layers, (0, 0, 0), 45, options)
    parameters = sharing.init(jax.random.key(1), plan)
    assert {k: v.shape for k, v in parameters["embeddings"].items()} == dict.fromkeys(
        "abc", (3,)
    )
    (kept,) = parameters["maps"].values()
    store = np.asarray(parameters["stores"]["0"])
    for layer, window in plan:
        alpha = np.asarray(parameters["embeddings"][layer.name] @ kept["kernel"])
        read = store[window.start : window.start + 2 * layer.size]
        wanted = np.tensordot(alpha, read.reshape(2, *layer.shape), 1)
        np.testing.assert_allclose(
            generate(parameters, plan)[layer.name], wanted, atol=1e-5
        )


def test_coefficients_begin_as_rows_of_an_orthogonal_matrix():
    layers = [Layer(str(i), (2, 2)) for i in range(6)]
    plan = make_plan(layers, (0,) * 6, 16)
    parameters = sharing.init(jax.random.key(0), plan)
    rows = np.stack([parameters["coefficients"][str(i)] for i in range(6)])
    np.testing.assert_allclose(rows.T @ rows, np.eye(4), atol=1e-5)


def bilinear(image, rows, columns):
    """Half-pixel centres: the pixel at i is read at (i + 1/2) · old / new - 1/2."""

    def weights(new, old):
        matrix = np.zeros((new, old))
        for i in range(new):
            at = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
            low = int(at)
            high = min(low + 1, old - 1)
            matrix[i, low] += 1 - (at - low)
            matrix[i, high] += at - low
        return matrix

    height, width = image.shape
    return weights(rows, height) @ image @ weights(columns, width).T


@pytest.mark.acceptance("ssn", 5)
def test_interpolation_has_half_pixel_centres():
    store = RNG.normal(size=152 * 7 * 3)
    made = sharing.interpolate(jnp.asarray(store, "float32"), (152, 7, 3), (160, 8, 3))
    image = store.reshape(152, 21)
    wanted = bilinear(image, 160, 24)
    np.testing.assert_allclose(made.reshape(160, 24), wanted, atol=1e-6)
    corners = np.stack(
        [np.interp(np.linspace(0, 151, 160), np.arange(152), c) for c in image.T], 1
    )
    corners = np.stack(
        [np.interp(np.linspace(0, 20, 24), np.arange(21), r) for r in corners]
    )
    assert np.abs(wanted - corners).max() > 0.1


@pytest.mark.acceptance("ssn", 6)
def test_copies_masks_and_mixtures_equal_loops():
    for numbers, shape in [(10, (4, 5)), (10, (3, 5)), (7, (5, 5)), (24, (5, 5))]:
        size = int(np.prod(shape))
        store = RNG.normal(size=numbers).astype("float32")
        wanted = np.array([store[i % numbers] for i in range(size)])
        made = sharing.repeat(jnp.asarray(store), shape)
        np.testing.assert_array_equal(made.ravel(), wanted)
        for window in (9, 3):
            usable = numbers - numbers % window
            if not usable:
                continue
            copies = -(-size // usable) - 1
            masks = RNG.normal(size=(copies, window)).astype("float32")
            flat = list(store[:usable])
            for mask in masks:
                flat += [store[i] * mask[i % window] for i in range(usable)]
            made = sharing.mask_copies(jnp.asarray(store), jnp.asarray(masks), shape)
            np.testing.assert_allclose(made.ravel(), flat[:size], rtol=1e-6)
        usable = numbers - numbers % 2
        rows = 2 * -(-size // usable)
        mixtures = RNG.normal(size=(rows, 2)).astype("float32")
        first, second = store[: usable // 2], store[usable // 2 : usable]
        flat = [a * x + b * y for a, b in mixtures for x, y in zip(first, second)]  # noqa: B905
        made = sharing.mix_halves(jnp.asarray(store), jnp.asarray(mixtures), shape)
        np.testing.assert_allclose(made.ravel(), flat[:size], rtol=1e-5, atol=1e-6)


@pytest.mark.acceptance("ssn", 6)
def test_a_store_that_masks_cannot_fill_in_two_has_a_third_copy():
    layers = [Layer("a", (4, 5)), Layer("b", (4, 5))]
    plan = make_plan(layers, (0, 0), 10, SharingOptions(upsample="mask"))
    parameters = sharing.init(jax.random.key(0), plan)
    assert parameters["upsamplers"]["a"].shape == (2, 9)
    np.testing.assert_allclose(parameters["upsamplers"]["a"], 1 / 18)
    store = np.asarray(parameters["stores"]["0"])
    made = generate(parameters, plan)["a"].ravel()
    np.testing.assert_allclose(made[:9], store[:9])
    np.testing.assert_allclose(made[9:18], store[:9] / 18, rtol=1e-6)
    np.testing.assert_allclose(made[18:], store[:2] / 18, rtol=1e-6)


@pytest.mark.quick("repeat-circular", "repeat-aligned")
@pytest.mark.acceptance("ssn", 7)
@pytest.mark.parametrize("placement", ["aligned", "circular"])
@pytest.mark.parametrize("upsample", ["inter", "mask", "wavg", "repeat"])
def test_the_gradient_of_a_store_is_the_sum_of_all_layers(placement, upsample):
    """Every weight is linear in the store: its matrix is read off unit vectors."""
    shapes = [(2, 3), (2, 3), (3, 3), (6, 5), (7, 2, 2, 1)]
    layers = [Layer(str(i), shape) for i, shape in enumerate(shapes)]
    options = SharingOptions(placement=placement, upsample=upsample, templates=2)
    plan = make_plan(layers, (0,) * 5, 14, options)
    assert {window.kind for window in plan.windows} == {"templates", upsample}
    parameters = sharing.init(jax.random.key(2), plan)

    def weights(store):
        made = sharing.generate(parameters | {"stores": {"0": store}}, plan)
        return jnp.concatenate([made[layer.name].ravel() for layer in layers])

    store = parameters["stores"]["0"]
    matrix = np.stack([weights(unit) for unit in jnp.eye(14)], 1)
    upstream = jnp.asarray(RNG.normal(size=matrix.shape[0]), "float32")
    gradient = jax.grad(lambda store: weights(store) @ upstream)(store)
    by_layer = np.split(matrix, np.cumsum([layer.size for layer in layers])[:-1])
    parts = np.split(np.asarray(upstream), np.cumsum([x.size for x in layers])[:-1])
    wanted = sum(a.T @ g for a, g in zip(by_layer, parts, strict=True))
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-4)
    (transposed,) = jax.linear_transpose(weights, store)(upstream)
    np.testing.assert_allclose(gradient, transposed, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("False")
@pytest.mark.acceptance("ssn", 9)
@pytest.mark.parametrize("softmax", [True, False])
def test_planted_families_are_found(softmax):
    """Twelve targets of two families; layers of one come to like coefficients."""
    import optax
    from sklearn.metrics import adjusted_rand_score

    found = 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(2, 256))
        families = np.arange(12) % 2
        targets = centres[families] + 0.3 * rng.normal(size=(12, 256))
        params = {
            "templates": jnp.asarray(rng.normal(size=(4, 256)) / 16),
            "alpha": jnp.asarray(rng.normal(size=(12, 4))),
        }
        fitted = _fit(params, jnp.asarray(targets), softmax, optax.adam(0.05))
        groups = sharing.cluster_layers(np.asarray(fitted["alpha"]), 2)
        found += adjusted_rand_score(families, groups) == 1.0
    assert found >= 4


def _fit(params, targets, softmax, tx):
    def loss(params):
        alpha = params["alpha"]
        mixed = (jax.nn.softmax(alpha) if softmax else alpha) @ params["templates"]
        return jnp.mean((mixed - targets) ** 2)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params), state)
        moved = jax.tree.map(lambda p, u: p + u, params, updates)
        return (moved, state), None

    return jax.lax.scan(step, (params, tx.init(params)), length=3000)[0][0]


def test_no_more_layers_than_groups_are_all_alone():
    assert sharing.cluster_layers(np.zeros((3, 4)), 3) == (0, 1, 2)


def test_candidates_are_parts_of_the_whole_store_resized():
    layers = [Layer("a", (4, 8)), Layer("b", (8, 4, 1, 1))]
    plan = sharing.plan_candidates(layers, 4 * 32 + 3)
    parameters = sharing.init(jax.random.key(0), plan)
    store = np.asarray(parameters["stores"]["0"])
    parts = store[:128].reshape(4, 32)
    for layer in layers:
        raw = np.asarray(parameters["coefficients"][layer.name])
        alpha = np.exp(raw) / np.exp(raw).sum()
        wanted = np.tensordot(alpha, parts, 1).reshape(layer.shape)
        made = generate(parameters, plan)[layer.name]
        np.testing.assert_allclose(made, wanted, atol=1e-5)
    params = {"shared": {plan.digest: parameters}}
    features = sharing.find_features(params, plan)
    np.testing.assert_array_equal(features[1], parameters["coefficients"]["b"])


@pytest.mark.parametrize("last", [False, True])
def test_a_store_begins_as_the_commonest_of_its_layers_would(last):
    layers = [Layer("a", (250, 32)), Layer("b", (250, 32))]
    layers.insert(2 if last else 0, Layer("rare", (4000, 2)))
    plan = make_plan(layers, (0, 0, 0), 8000)
    store = sharing.init(jax.random.key(0), plan)["stores"]["0"]
    np.testing.assert_allclose(np.std(store), np.sqrt(2 / 32), rtol=0.05)
