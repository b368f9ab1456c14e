"""Scores against numpy: dense Hessians, elimination, conservation; layer collapse."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.core import ConfigError, masks
from hpcjax.optim import sparsify
from hpcjax.optim.sparsify import Global, Uniform


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def network(widths, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {
        f"layer{i}": jnp.asarray(rng.normal(size=(a, b)) * np.sqrt(2 / a), dtype)
        for i, (a, b) in enumerate(itertools.pairwise(widths))
    }


def apply(params, inputs, act=jax.nn.relu):
    *hidden, last = params.values()
    for kernel in hidden:
        inputs = act(inputs @ kernel)
    return inputs @ last


def batch(rows, inputs, outputs, dtype=np.float32):
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(rows, inputs)), rng.normal(size=(rows, outputs))
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def loss(params, batch):
    x, y = batch
    return jnp.mean(jnp.square(apply(params, x, jnp.tanh) - y))


def numeric_gradient(params, data, step=1e-5):
    """Central differences of the loss, in float64 by numpy alone."""
    x, y = map(np.asarray, data)
    flat = {k: np.array(v) for k, v in params.items()}

    def value():
        return np.mean((np.tanh(x @ flat["layer0"]) @ flat["layer1"] - y) ** 2)

    found = {}
    for name, leaf in flat.items():
        found[name] = np.zeros_like(leaf)
        for at in np.ndindex(leaf.shape):
            old = leaf[at]
            leaf[at] = old + step
            high = value()
            leaf[at] = old - step
            found[name][at] = (high - value()) / (2 * step)
            leaf[at] = old
    return found


@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.usefixtures("float64")
def test_snip_and_grasp_are_those_of_finite_differences():
    params = network((3, 4, 2), dtype=np.float64)
    data = batch(6, 3, 2, np.float64)
    grads = numeric_gradient(params, data)
    products = {k: np.abs(np.asarray(params[k]) * grads[k]) for k in params}
    total = sum(p.sum() for p in products.values())
    found = sparsify.snip(loss, params, data)
    for name, product in products.items():
        np.testing.assert_allclose(found[name], product / total, rtol=1e-6)
    # H g is the change of the gradient along g.
    moved = [
        numeric_gradient({k: params[k] + s * 1e-4 * grads[k] for k in params}, data)
        for s in (1, -1)
    ]
    found = sparsify.grasp(loss, params, data)
    for name in params:
        curved = (moved[0][name] - moved[1][name]) / 2e-4
        np.testing.assert_allclose(found[name], params[name] * curved, atol=1e-5)


@pytest.mark.acceptance("sparsity", 1)
def test_synflow_conserves_its_sum_from_layer_to_layer():
    params = network((16, 12, 8, 4))
    found = sparsify.synflow(apply, params, jnp.zeros(16))
    sums = [float(jnp.sum(leaf)) for leaf in found.values()]
    np.testing.assert_allclose(sums, sums[0], rtol=1e-5)
    flow = np.ones(16)
    for kernel in params.values():
        flow = flow @ np.abs(np.asarray(kernel))
    np.testing.assert_allclose(sums[0], flow.sum(), rtol=1e-5)
    assert all(np.all(np.asarray(leaf) >= 0) for leaf in found.values())


def collapse(score, density=0.005, rounds=1):
    params = network((64, 100, 100, 10), seed=2)
    kept = sparsify.at_init(
        score, params, rounds=rounds, distribution=Global(sparsity=1 - density)
    )
    counts = [int(n) for n in masks.count_true(kept).values()]
    assert sum(counts) == round(density * (6400 + 10_000 + 1000))
    return counts


@pytest.mark.slow
def test_where_hardly_anything_is_left_synflow_leaves_more_of_the_thinnest_layer():
    x, _ = batch(100, 64, 10)
    labels = jnp.arange(100) % 10

    def cross_entropy(params, batch):
        x, y = batch
        return -jnp.mean(jax.nn.log_softmax(apply(params, x))[jnp.arange(len(y)), y])

    inputs = jnp.zeros(64)
    flow = collapse(lambda p: sparsify.synflow(apply, p, inputs), rounds=100)
    slope = collapse(lambda p: sparsify.snip(cross_entropy, p, (x, labels)))
    assert min(flow) >= 15
    assert min(slope) <= 2 / 3 * min(flow)


@pytest.mark.slow
def test_what_was_pruned_in_a_round_stays_so():
    params = network((6, 5, 4))
    rounds = []

    def score(params):
        # The least are wanted in later rounds; pruned ones would come first.
        return jax.tree.map(lambda w: -jnp.abs(w), params)

    for count in (1, 2, 4):
        kept = sparsify.at_init(
            score, params, rounds=count, distribution=Uniform(sparsity=0.75)
        )
        rounds.append(kept)
        counts = {k: int(v) for k, v in masks.count_true(kept).items()}
        assert counts == {"layer0": 8, "layer1": 5}
    for later in rounds[1:]:
        np.testing.assert_array_equal(rounds[0]["layer0"], later["layer0"])


def test_a_layer_that_scores_would_empty_is_reported_or_refused():
    params = network((6, 5, 4))
    scores = {"layer0": jnp.ones((6, 5)), "layer1": jnp.zeros((5, 4))}
    few = Global(sparsity=0.8)
    with pytest.warns(sparsify.LayerCollapseWarning, match=r"nothing of \['layer1'\]"):
        kept = sparsify.one_shot(params, scores, distribution=few)
    assert {k: int(n) for k, n in masks.count_true(kept).items()} == {
        "layer0": 9,
        "layer1": 1,
    }
    with pytest.raises(ConfigError, match=r"keep nothing of \['layer1'\]"):
        sparsify.one_shot(params, scores, distribution=few, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify.one_shot(params, scores, distribution=Global(sparsity=0.1))
    broken = scores | {"layer0": jnp.full((6, 5), jnp.nan)}
    with pytest.raises(ConfigError, match=r"NaN in \['layer0'\]"):
        sparsify.one_shot(params, broken)
    # Masks of other shapes would be those of no parameter.
    for wrong in ({"layer0": jnp.ones((5, 6))}, {"layer0": None}, {"other": 1.0}):
        with pytest.raises(ConfigError, match=r"differing=\[.(layer0|other)"):
            sparsify.one_shot(params, scores | wrong)


def quadratic(n, seed=1):
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(n, n))
    return root @ root.T + 0.1 * np.eye(n), rng.normal(size=n)


@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.usefixtures("float64")
def test_obs_is_the_exact_increase_of_the_quadratic_and_its_best_answer():
    hessian, weights = quadratic(6)
    inverse = np.linalg.inv(hessian)
    found = sparsify.obs(jnp.asarray(weights), jnp.asarray(inverse))
    for q in range(6):
        rest = np.delete(np.arange(6), q)
        # Least ½ δᵀHδ with δ_q = −w_q, by eliminating the others.
        others = -np.linalg.solve(
            hessian[np.ix_(rest, rest)], hessian[rest, q] * -weights[q]
        )
        change = np.insert(others, q, -weights[q])
        np.testing.assert_allclose(found[q], change @ hessian @ change / 2, atol=1e-8)
        kept = jnp.arange(6) != q
        moved = sparsify.obs_remove(jnp.asarray(weights), jnp.asarray(inverse), kept)
        np.testing.assert_allclose(moved, weights + change, atol=1e-8)
        assert moved[q] == 0


@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.usefixtures("float64")
def test_the_inverse_fisher_is_that_of_numpy_in_every_block():
    grads = np.random.default_rng(2).normal(size=(7, 12))
    found = sparsify.fisher_inverse(jnp.asarray(grads), 4, 1e-2)
    for number in range(3):
        own = grads[:, 4 * number : 4 * number + 4]
        fisher = own.T @ own / 7 + 1e-2 * np.eye(4)
        np.testing.assert_allclose(found[number], np.linalg.inv(fisher), rtol=1e-8)
    with pytest.raises(ConfigError, match="block must divide the weights"):
        sparsify.fisher_inverse(jnp.asarray(grads), 5)


@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.usefixtures("float64")
def test_scores_of_a_kronecker_product_are_obs_of_the_whole_matrix():
    a, _ = quadratic(3, seed=3)
    g, _ = quadratic(2, seed=4)
    kernel = np.random.default_rng(5).normal(size=(3, 2))
    whole = np.linalg.inv(np.kron(a, g))
    expected = sparsify.obs(jnp.asarray(kernel.ravel()), jnp.asarray(whole))
    found = sparsify.kfac_obs(*map(jnp.asarray, (kernel, a, g)))
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-9)
    damped = sparsify.kfac_obs(
        *map(jnp.asarray, (kernel, a - np.eye(3), g)), damping=1.0
    )
    shifted = sparsify.kfac_obs(*map(jnp.asarray, (kernel, a, g + np.eye(2))))
    np.testing.assert_allclose(damped, shifted, rtol=1e-9)


@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.usefixtures("float64")
def test_damage_by_the_diagonal_of_the_hessian():
    hessian, weights = quadratic(5)
    hessian = np.diag(np.diag(hessian))  # of which the estimate is exact
    params = {"w": jnp.asarray(weights)}

    def loss(params):
        return params["w"] @ jnp.asarray(hessian) @ params["w"] / 2

    diagonal = sparsify.hutchinson_diagonal(loss, params, jax.random.key(0), 3)
    np.testing.assert_allclose(diagonal["w"], np.diag(hessian), rtol=1e-9)
    found = sparsify.obd(params, diagonal)["w"]
    for q in range(5):
        off = np.where(np.arange(5) == q, weights, 0)
        np.testing.assert_allclose(found[q], off @ hessian @ off / 2, rtol=1e-9)


@pytest.mark.acceptance("sparsity", 1)
def test_wanda_is_magnitude_times_the_norm_of_an_input():
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)
    found = sparsify.wanda(jnp.asarray(kernel), jnp.asarray(np.linalg.norm(x, axis=0)))
    expected = [
        [abs(w) * np.sqrt((x[:, i] ** 2).sum()) for w in row]
        for i, row in enumerate(kernel)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.usefixtures("float64")
def test_woodfisher_is_obs_of_every_block_of_a_parameter():
    rng = np.random.default_rng(0)
    params, grads = rng.normal(size=(3, 4)), rng.normal(size=(9, 3, 4))
    found = sparsify.woodfisher(
        {"w": jnp.asarray(params)}, {"w": jnp.asarray(grads)}, block=5, damping=0.1
    )
    kept = rng.random(12) < 0.6
    scores, left = np.zeros(12), np.zeros(12)
    for start in (0, 5, 10):  # the last block has two weights
        at = slice(start, min(start + 5, 12))
        own, weights = grads.reshape(9, 12)[:, at], params.ravel()[at]
        inverse = np.linalg.inv(own.T @ own / 9 + 0.1 * np.eye(own.shape[1]))
        scores[at] = weights**2 / (2 * np.diag(inverse))
        moved = weights.copy()
        for q in np.flatnonzero(~kept[at]):
            moved -= weights[q] / inverse[q, q] * inverse[:, q]
        left[at] = np.where(kept[at], moved, 0)
    np.testing.assert_allclose(found.scores["w"].ravel(), scores, rtol=1e-8)
    pruned = found.remove({"w": jnp.asarray(kept.reshape(3, 4))})["w"]
    np.testing.assert_allclose(pruned.ravel(), left, rtol=1e-7)


def test_removing_by_woodfisher_costs_less_than_by_magnitude_for_every_seed():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=(5, *shape)), jnp.float32)

    x = draw(1000, 8) @ draw(8, 8)
    y = jnp.tanh(x @ draw(8, 2) / 4) + 0.3 * draw(1000, 2)
    start = {"layer0": draw(8, 12) / 3, "layer1": draw(12, 2) / 3}

    def one(given):
        x, y, params = given

        def step(params, _):
            grads = jax.grad(loss)(params, (x, y))
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), None

        params, _ = jax.lax.scan(step, params, None, 400)
        each = jax.vmap(jax.grad(loss), (None, 0))(params, (x[:, None], y[:, None]))
        fisher = sparsify.woodfisher(params, each, block=24)

        def half(scores):
            return {k: masks.keep_largest(s, s.size // 2) for k, s in scores.items()}

        plain = masks.apply(params, half(jax.tree.map(jnp.abs, params)))
        clever = fisher.remove(half(fisher.scores))
        return [loss(p, (x, y)) for p in (params, plain, clever)]

    # One seed after the other, in one program.
    learn = jax.jit(lambda given: jax.lax.map(one, given))
    dense, plain, clever = learn((x, y, start))
    assert np.all(dense < clever)
    assert np.all(clever < plain)


def test_lamp_divides_by_all_scores_that_are_as_large():
    scores = np.array([[3.0, 1.0, 2.0], [2.0, 0.0, 2.0]])
    squares = scores**2
    expected = [s / squares[squares >= s].sum() if s else 0 for s in squares.ravel()]
    found = sparsify.lamp(jnp.asarray(scores, jnp.float32))
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: sparsify.fisher_inverse(jnp.ones((0, 4)), 2), "examples must be"),
        (lambda: sparsify.fisher_inverse(jnp.ones((1, 4)), 0), "block must be"),
        (lambda: sparsify.fisher_inverse(jnp.ones((1, 4)), 2, 0.0), "damping must be"),
        (
            # Gradients of the batch, where those of single examples are wanted.
            lambda: sparsify.woodfisher({"w": jnp.ones((3, 2))}, {"w": jnp.eye(3, 2)}),
            "grads must have the shapes",
        ),
        (
            lambda: sparsify.kfac_obs(jnp.eye(2), jnp.eye(2), jnp.eye(2), -1.0),
            "damping must be",
        ),
    ],
)
def test_second_order_refuses_what_it_cannot_use(call, words):
    with pytest.raises(ConfigError, match=words):
        call()
