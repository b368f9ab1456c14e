"""Factors, inverses and kl-clip against loops and dense solves in numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjax import models
from hpcjax.core import ConfigError
from hpcjax.optim import kfac
from hpcjax.optim.kfac import _statistics
from tests.optim.kfac import problems
from tests.oracles import kfac as oracle

GEOMETRIES = {
    # name: options of the layer, (top, left) zeros that they put before a 7×6 image
    "stride 2": ({"kernel_size": 3, "stride": 2}, (1, 1)),
    "SAME": ({"kernel_size": 3, "stride": 2, "padding": "SAME"}, (1, 0)),
    "VALID": ({"kernel_size": 2, "padding": "VALID"}, (0, 0)),
    "dilation 2": ({"kernel_size": 3, "dilation": 2}, (2, 2)),
    "explicit": ({"kernel_size": 3, "padding": ((2, 0), (0, 1))}, (2, 0)),
}


def definite(rng, n):
    root = rng.standard_normal((n, n + 2))
    return root @ root.T / n


@pytest.mark.quick("False")
@pytest.mark.acceptance("kaisa", 1)
@pytest.mark.parametrize("prediv", [True, False])
def test_the_eigen_method_is_the_dense_kronecker_solve(prediv):
    rng = np.random.default_rng(0)
    a, g = definite(rng, 5), definite(rng, 3)
    gradient = rng.standard_normal((3, 5))
    with jax.enable_x64(True):
        factors = {"a": jnp.asarray(a), "g": jnp.asarray(g)}
        matrix = jnp.asarray(gradient.T)
        found = {}
        for method in ("eigen", "inverse"):
            options = kfac.KfacOptions(method=method, prediv=prediv)
            items = kfac.decompose(options, factors, 0.1)
            found[method] = np.asarray(kfac.precondition(options, items, matrix, 0.1))
    exact = oracle.solve_kronecker(a, g, gradient, 0.1)
    split = oracle.solve_factors(a, g, gradient, 0.1, 0.1)
    np.testing.assert_allclose(found["eigen"].T, exact, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found["inverse"].T, split, rtol=1e-10, atol=1e-10)
    assert np.abs(exact - split).max() > 1e-2


@pytest.mark.parametrize("prediv", [True, False])
def test_eigenvalues_that_rounding_made_negative_are_zero(prediv):
    """Else a damping below them would turn the step around."""
    a, g = np.diag([1.0, -1e-3]), np.diag([1.0, 2.0])
    factors = {"a": jnp.asarray(a, jnp.float32), "g": jnp.asarray(g, jnp.float32)}
    options = kfac.KfacOptions(method="eigen", prediv=prediv)
    items = kfac.decompose(options, factors, 1e-4)
    made = kfac.precondition(options, items, jnp.ones((2, 2)), 1e-4)
    exact = 1 / (np.outer([1.0, 0.0], [1.0, 2.0]) + 1e-4)
    np.testing.assert_allclose(np.abs(made), exact, rtol=1e-4)
    assert (np.asarray(made) > 0).all()


HARD = {
    "zero": np.zeros((4, 4)),
    "one row": np.ones((1, 1)),
    "rank 1": np.outer(np.arange(4.0), np.arange(4.0)),
    "rank 2 of 6": np.diag([1.0, 2.0, 0, 0, 0, 0]),
    "huge": 1e20 * np.eye(3),
    "tiny": 1e-20 * np.eye(3),
}


def backward_error(factor):
    """What a decomposition in float32 may add to a factor; diagonal ones are exact."""
    diagonal = (factor == np.diag(np.diag(factor))).all()
    return 0.0 if diagonal else 16 * 2.0**-24 * np.linalg.norm(factor, 2)


@pytest.mark.faults(11)
@pytest.mark.parametrize("method", ["eigen", "inverse"])
@pytest.mark.parametrize("prediv", [True, False])
@pytest.mark.parametrize("left", HARD)
@pytest.mark.parametrize("right", HARD)
def test_hard_factors_give_what_float64_gives(left, right, prediv, method):
    a, g, damping = HARD[left], HARD[right], 1e-3
    gradient = np.random.default_rng(0).standard_normal((len(g), len(a)))
    solve = {
        "eigen": lambda: oracle.solve_kronecker(a, g, gradient, damping),
        "inverse": lambda: oracle.solve_factors(a, g, gradient, damping, damping),
    }
    options = kfac.KfacOptions(method=method, prediv=prediv)
    factors = {"a": jnp.asarray(a, jnp.float32), "g": jnp.asarray(g, jnp.float32)}
    items = kfac.decompose(options, factors, damping)
    matrix = jnp.asarray(gradient.T, jnp.float32)
    found = np.asarray(kfac.precondition(options, items, matrix, damping)).T
    assert np.isfinite(found).all()
    # Relative to the least damped curvature: A⊗G + γI, or the two factors' own.
    lost = backward_error(a), backward_error(g)
    if method == "eigen":
        room = lost[0] * np.linalg.norm(g, 2) + lost[1] * np.linalg.norm(a, 2)
    else:
        room = sum(lost)
    room *= math.sqrt(gradient.size) / damping
    if room > 0.5:
        # Float32 does not tell which curvature is zero; nothing is less than damped.
        least = damping if method == "eigen" else damping**2
        assert np.linalg.norm(found) <= 1.001 * np.linalg.norm(gradient) / least
        return
    expected = solve[method]()
    # Of the largest entry: where curvature is zero, that is the gradient over γ.
    largest = np.abs(expected).max()
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=(2e-4 + room) * largest + 1e-30
    )


@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_pi_damping_shares_by_mean_eigenvalues(method):
    rng = np.random.default_rng(1)
    a, g = 9 * definite(rng, 4), definite(rng, 3)
    gradient, damping = rng.standard_normal((3, 4)), 0.3
    pi = oracle.pi(a, g)
    expected = oracle.solve_factors(
        a, g, gradient, pi * np.sqrt(damping), np.sqrt(damping) / pi
    )
    with jax.enable_x64(True):
        options = kfac.KfacOptions(method=method, pi_damping=True)
        factors = {"a": jnp.asarray(a), "g": jnp.asarray(g)}
        items = kfac.decompose(options, factors, damping)
        found = kfac.precondition(options, items, jnp.asarray(gradient.T), damping)
    np.testing.assert_allclose(np.asarray(found).T, expected, rtol=1e-10)


@pytest.mark.slow
def test_packed_inverses_are_the_same_inverses():
    rng = np.random.default_rng(2)
    factors = {"a": definite(rng, 5), "g": definite(rng, 4)}
    factors = jax.tree.map(lambda f: jnp.asarray(f, jnp.float32), factors)
    matrix = jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)
    found = []
    for packed in (False, True):
        options = kfac.KfacOptions(method="inverse", symmetry_aware=packed)
        items = kfac.decompose(options, factors, 0.1)
        found.append(kfac.precondition(options, items, matrix, 0.1))
    assert items["inverse_a"].shape == (15,)
    np.testing.assert_array_equal(*found)


def captured(model, x, labels_shape, **options):
    """A and G of the one layer, and its inputs and output gradients per example."""
    chosen = kfac.plan(model, **options)
    params, _ = model.init(jax.random.key(0))
    y = jax.random.randint(jax.random.key(3), labels_shape, 0, 3)
    found = problems.differentiated(chosen, model, params, x, y)
    outputs = model.apply(params, {}, x, train=True)[0]
    slopes = jax.grad(lambda o: problems.cross_entropy(o, y)[0])(outputs)
    (path,) = found.statistics
    return found.statistics[path], np.asarray(slopes)


@pytest.mark.quick("shape1-False", "shape0-False")
@pytest.mark.acceptance("kaisa", 2)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shape", [(6, 5), (3, 4, 5)])
def test_dense_factors_are_means_over_rows(shape, use_bias):
    class Wrapped(models.Dense):
        def __call__(self, x, *, train, key):
            return super().__call__(x)

    with jax.enable_x64(True):
        model = models.from_nnx(
            lambda: Wrapped(5, 3, use_bias=use_bias, policy=problems.FLOAT64)
        )
        x = jax.random.normal(jax.random.key(1), shape, jnp.float64)
        found, slopes = captured(model, x, shape[:-1])
    a, g = oracle.dense_factors(np.asarray(x), slopes, use_bias)
    np.testing.assert_allclose(found["a"], a, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found["g"], g, rtol=1e-12, atol=1e-14)


@pytest.mark.quick("VALID-False-4194304")
@pytest.mark.acceptance("kaisa", 2)
@pytest.mark.parametrize(
    ("name", "use_bias", "elements"),
    [("stride 2", False, 1), ("SAME", True, 2**22), ("VALID", False, 2**22),
     ("dilation 2", True, 1), ("explicit", False, 2**22)],
)  # fmt: skip
def test_conv_factors_are_those_of_explicit_patches(
    name, use_bias, elements, monkeypatch
):
    monkeypatch.setattr(_statistics, "_ELEMENTS", elements)
    geometry, before = GEOMETRIES[name]
    stride, dilation = geometry.get("stride", 1), geometry.get("dilation", 1)
    kernel = (geometry["kernel_size"],) * 2
    factors = {}
    with jax.enable_x64(True):
        model = problems.one_conv(2, 3, use_bias=use_bias, **geometry)
        x = jax.random.normal(jax.random.key(1), (3, 7, 6, 2), jnp.float64)
        params, _ = model.init(jax.random.key(0))
        shape = jax.eval_shape(lambda: model.apply(params, {}, x, train=True)[0]).shape
        for convention in ("kfc", "reference"):
            found, slopes = captured(
                model, x, shape[:-1], conv_normalization=convention
            )
            a, g = oracle.conv_factors(
                np.asarray(x), slopes, kernel, stride, before, dilation, use_bias,
                convention == "reference",
            )  # fmt: skip
            np.testing.assert_allclose(found["a"], a, rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(found["g"], g, rtol=1e-10, atol=1e-12)
            factors[convention] = found
    positions = shape[1] * shape[2]
    kfc, reference = factors["kfc"], factors["reference"]
    np.testing.assert_allclose(kfc["a"], positions**3 * reference["a"], rtol=1e-6)
    np.testing.assert_allclose(kfc["g"], positions**2 * reference["g"], rtol=1e-6)


def updated_g(g_scale, x, y, terms):
    """The running G, with α so small that only this batch counts."""
    model = problems.mlp()
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    found = problems.differentiated(chosen, model, params, x, y)
    tx = kfac.scale_by_kfac(chosen, factor_decay=1e-30, g_scale=g_scale)
    _, state = tx.update(
        found.grads, tx.init(params), params, taps=found.statistics, loss_terms=terms
    )
    return state.factors["head"]["g"][0]


@pytest.mark.slow
@pytest.mark.acceptance("kaisa", 2)
def test_per_example_g_does_not_depend_on_the_batch_size():
    x, y = problems.batch(8)
    double = (jnp.concatenate([x, x]), jnp.concatenate([y, y]))
    per_example = [updated_g("per_example", *b, len(b[0])) for b in ((x, y), double)]
    np.testing.assert_allclose(*per_example, rtol=1e-5, atol=1e-7)
    mean_loss = [updated_g("mean_loss", *b, len(b[0])) for b in ((x, y), double)]
    np.testing.assert_allclose(mean_loss[0], 4 * mean_loss[1], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.acceptance("kaisa", 2)
def test_masked_tokens_count_by_the_scored_ones():
    """G of a token loss is the mean over rows of single losses' gradients."""
    model = problems.mlp()
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    x, y = problems.batch(8)
    weight = jnp.array([1, 1, 0, 1, 0, 0, 1, 1], jnp.float32)

    def forward(params, taps):
        return model.apply(params, {}, x, train=True, taps=taps)

    def loss(outputs, labels):
        log = jax.nn.log_softmax(outputs)
        losses = -jnp.take_along_axis(log, labels[:, None], axis=1)[:, 0]
        return jnp.sum(weight * losses) / weight.sum(), None

    taps = kfac.make_taps(chosen, model, params, {}, x)
    found = kfac.differentiate(forward, loss, params, taps, y)
    tx = kfac.scale_by_kfac(chosen, factor_decay=1e-30)
    _, state = tx.update(
        found.grads, tx.init(params), taps=found.statistics, loss_terms=weight.sum()
    )
    outputs = np.asarray(model.apply(params, {}, x, train=True)[0], np.float64)
    slopes = oracle.softmax(outputs) - np.eye(3)[np.asarray(y)]
    slopes = slopes * np.asarray(weight)[:, None]
    expected = slopes.T @ slopes / len(x)
    np.testing.assert_allclose(state.factors["head"]["g"][0], expected, rtol=1e-5)


def logistic():
    """Two classes, a bias, one example; its probabilities, inputs and K-FAC."""
    model = models.mlp((3,), 2, widths=(), policy=problems.FLOAT64)
    params, _ = model.init(jax.random.key(0))
    x = jnp.array([[0.5, -1.0, 2.0]])
    outputs = model.apply(params, {}, x, train=True)[0]
    p = oracle.softmax(np.asarray(outputs))[0]
    return model, params, x, p


def exact_block(x, p):
    """Σ_c p_c vec(∇) vec(∇)ᵀ over the labels, vec column by column of (out, in)."""
    wide = np.append(np.asarray(x)[0], 1.0)
    block = 0.0
    for label, probability in enumerate(p):
        gradient = np.outer(p - np.eye(len(p))[label], wide).reshape(-1, order="F")
        block = block + probability * np.outer(gradient, gradient)
    return block


@pytest.mark.slow
@pytest.mark.acceptance("kaisa", 3)
def test_the_exact_fisher_is_the_expectation_over_labels():
    with jax.enable_x64(True):
        model, params, x, p = logistic()
        found = problems.differentiated(
            kfac.plan(model), model, params, x, jnp.array([0]), fisher="exact"
        ).statistics["head"]
    np.testing.assert_allclose(found["g"], np.diag(p) - np.outer(p, p), atol=1e-12)
    block = np.kron(np.asarray(found["a"]), np.asarray(found["g"]))
    np.testing.assert_allclose(block, exact_block(x, p), atol=1e-10)


@pytest.mark.acceptance("kaisa", 3)
def test_the_true_fisher_draws_its_own_labels():
    draws = 4096
    with jax.enable_x64(True):
        model, params, x, p = logistic()
        chosen = kfac.plan(model)

        def one(key):
            return problems.differentiated(
                chosen, model, params, x, jnp.array([0]), fisher="true", key=key
            ).statistics["head"]["g"]

        every = np.asarray(
            jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(5), draws))
        )
    expected = np.diag(p) - np.outer(p, p)
    error = every.std(0) / np.sqrt(draws)
    assert (np.abs(every.mean(0) - expected) <= 4 * error).all()
    assert np.abs(every[0] - expected).max() > 0.01
    at_label = [np.outer(p - e, p - e) for e in np.eye(2)]
    differs = np.abs(every - at_label[0]).max((1, 2)) > 1e-9
    assert 0 < differs.mean() < 1
    np.testing.assert_allclose(differs.mean(), p[1], atol=4 * np.sqrt(p[1] / draws))


@pytest.mark.slow
def test_the_exact_fisher_takes_one_label_an_example():
    """Several places of one example share what the layers before them did."""
    model = models.causal_lm((4,), 7, depth=1, width=4, heads=2)
    params, _ = model.init(jax.random.key(0))
    x = jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ConfigError, match=r"\(2, 4, 7\)"):
        problems.differentiated(kfac.plan(model), model, params, x, x, fisher="exact")


@pytest.mark.slow
@pytest.mark.parametrize("fisher", ["true", "exact"])
def test_labels_that_are_not_scored_stay_so(fisher):
    model, (x, y) = problems.mlp(), problems.batch(4)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))

    def loss(outputs, labels):
        scored = labels >= 0
        losses = -jnp.take_along_axis(
            jax.nn.log_softmax(outputs), jnp.maximum(labels, 0)[:, None], 1
        )[:, 0]
        return jnp.sum(jnp.where(scored, losses, 0)) / jnp.sum(scored), None

    def head(x, y):
        def forward(params, taps):
            return model.apply(params, {}, x, train=True, taps=taps)

        taps = kfac.make_taps(chosen, model, params, {}, x)
        return kfac.differentiate(
            forward, loss, params, taps, y, fisher=fisher, key=jax.random.key(1)
        ).statistics["head"]["g"]

    # Rows that count nothing: the sum over the rest, by more rows.
    masked = head(x, y.at[2:].set(-1))
    if fisher == "exact":
        np.testing.assert_allclose(2 * masked, head(x[:2], y[:2]), rtol=1e-5)
    assert float(jnp.trace(masked)) > 0
    assert not head(x, jnp.full(4, -1)).any()


@pytest.mark.quick("exact")
@pytest.mark.parametrize("fisher", ["true", "exact"])
def test_other_labels_cost_nothing_where_statistics_are_not_due(fisher):
    model, (x, y) = problems.mlp(), problems.batch(4)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))

    def run(active):
        return problems.differentiated(
            chosen, model, params, x, y,
            active=active, fisher=fisher, key=jax.random.key(1),
        )  # fmt: skip

    on, off = jax.jit(run)(1.0), jax.jit(run)(0.0)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(off.statistics))
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(on.statistics))
    for left, right in zip(
        jax.tree.leaves(on.grads), jax.tree.leaves(off.grads), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.acceptance("kaisa", 8)
@given(
    inner=st.floats(-1e6, 1e6, width=32),
    rate=st.floats(0, 10, width=32),
    bound=st.floats(1e-6, 10),
)
def test_kl_clip_is_its_formula(inner, rate, bound):
    found = kfac.kl_clip(jnp.float32(inner), jnp.float32(rate), bound)
    size = abs(float(np.float32(inner) * np.float32(rate) ** np.float32(2)))
    expected = min(1.0, float(np.sqrt(bound / size))) if size > 0 else 1.0
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.acceptance("kaisa", 8)
def test_kl_clip_without_curvature_or_bound_or_with_negative_products():
    one = jnp.float32(1.0)
    assert kfac.kl_clip(jnp.float32(0.0), one, 1e-3) == 1
    assert kfac.kl_clip(jnp.float32(1e9), one, None) == 1
    both = [kfac.kl_clip(jnp.float32(s), one, 1e-3) for s in (-7.0, 7.0)]
    np.testing.assert_allclose(both, np.sqrt(1e-3 / 7), rtol=1e-6)
    assert jnp.isnan(kfac.kl_clip(jnp.float32(jnp.nan), one, 1e-3))


@pytest.mark.slow
@pytest.mark.acceptance("kaisa", 8)
def test_the_updates_are_clipped_together_by_the_live_rate():
    model, (x, y) = problems.mlp(), problems.batch(8)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    found = problems.differentiated(chosen, model, params, x, y)

    def updates(**options):
        tx = kfac.scale_by_kfac(chosen, **options)
        return tx.update(
            found.grads, tx.init(params), params, taps=found.statistics, loss_terms=8
        )

    free, _ = updates(kl_clip=None)
    inner = sum(
        float(jnp.vdot(u, g))
        for u, g in zip(
            jax.tree.leaves(free), jax.tree.leaves(found.grads), strict=True
        )
    )
    clipped, state = updates(kl_clip=1e-3, learning_rate=lambda count: 3.0 + count)
    nu = np.sqrt(1e-3 / (9.0 * inner))
    np.testing.assert_allclose(state.metrics["kfac_nu"], nu, rtol=1e-5)
    for left, right in zip(
        jax.tree.leaves(clipped), jax.tree.leaves(free), strict=True
    ):
        np.testing.assert_allclose(left, nu * right, rtol=1e-4, atol=1e-8)


def test_damping_follows_how_well_the_model_told_the_change():
    cases = {-1.0: 0.95**5, -0.5: 1.0, -0.1: 0.95**-5, 0.3: 0.95**-5}
    for gained, factor in cases.items():
        found = kfac.adapt_damping(
            jnp.float32(0.1), jnp.float32(gained), jnp.float32(-1.0)
        )
        np.testing.assert_allclose(found, 0.1 * factor, rtol=1e-6)
    assert (
        kfac.adapt_damping(jnp.float32(1.0), jnp.float32(np.nan), jnp.float32(-1.0)) > 1
    )


@pytest.mark.slow
def test_layers_of_a_scanned_stack_are_matrices_of_their_own():
    """A stack gives what the same statistics give layer by layer."""
    model = models.causal_lm((4,), 7, depth=2, width=4, heads=2)
    chosen = kfac.plan(model, skip=(*kfac.SKIP,))
    assert {block.depth for block in chosen.blocks} == {2}
    params, _ = model.init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 4), 0, 7)
    found = problems.differentiated(
        chosen, model, params, tokens, (tokens + 1) % 7, active=1.0
    )
    options = {"damping": 0.1, "kl_clip": None, "factor_decay": 1e-30}
    tx = kfac.scale_by_kfac(chosen, **options)
    updates, state = tx.update(
        found.grads, tx.init(params), taps=found.statistics, loss_terms=12
    )
    path = "blocks/mlp/up"
    for layer in range(2):
        factors = {
            s: np.asarray(state.factors[path][s][layer], np.float64) for s in "ag"
        }
        gradient = found.grads["blocks"]["mlp"]["up"]
        matrix = np.vstack([gradient["kernel"][layer], gradient["bias"][layer][None]])
        expected = oracle.solve_kronecker(factors["a"], factors["g"], matrix.T, 0.1).T
        new = updates["blocks"]["mlp"]["up"]
        np.testing.assert_allclose(
            new["kernel"][layer], expected[:-1], rtol=1e-3, atol=1e-5
        )
        np.testing.assert_allclose(
            new["bias"][layer], expected[-1], rtol=1e-3, atol=1e-5
        )
    untouched = jax.tree.map(np.array_equal, updates["embed"], found.grads["embed"])
    assert all(jax.tree.leaves(untouched))
