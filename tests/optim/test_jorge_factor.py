"""One preconditioner: against numpy, closed forms and the products it may use."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax import optim
from hpcjax.optim import JorgeOptions, jorge_factor
from tests.oracles import jorge as oracle

FORBIDDEN = {
    *("eigh", "eig", "svd", "qr", "geqrf", "householder_product", "cholesky"),
    *("triangular_solve", "lu", "schur", "hessenberg", "tridiagonal_solve"),
}


def _state(root, options=None):
    root = jnp.asarray(root)
    made = optim.jorge_factor_init(root.shape[0], options, str(root.dtype))
    return made._replace(matrix=root)


def _updates(matrix, options, scale, steps):
    """L̂ after `steps` updates with the gradient scale·matrix, jitted."""

    def body(state, _):
        return optim.jorge_factor_update(state, scale * matrix, options), None

    start = optim.jorge_factor_init(matrix.shape[0], options, str(matrix.dtype))
    return jax.jit(lambda: jax.lax.scan(body, start, None, steps)[0])()


@pytest.mark.quick("4", "1", "2")
@pytest.mark.acceptance("jorge", 1)
@pytest.mark.parametrize("seed", range(5))
def test_update_on_commuting_matrices_is_the_series_and_close_to_the_root(seed):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    other, _ = np.linalg.qr(rng.normal(size=(9, 9)))
    roots, s = rng.uniform(0.5, 2, 6), rng.uniform(0.1, 10, 6)
    gradient = basis * np.sqrt(s) @ other[:6]
    options = JorgeOptions(max_gain=None)
    with jax.enable_x64(True):
        state = _state(basis * roots @ basis.T, options)
        new = optim.jorge_factor_update(state, jnp.asarray(gradient), options)
        got = np.diag(basis.T @ np.asarray(new.matrix) @ basis)
        nu, beta2 = float(new.nu), float(new.beta2)
    x = roots**4 * s
    assert nu == pytest.approx(np.sqrt((x**2).sum()), rel=1e-12)
    series = 1 - x / (4 * nu) + 5 * x**2 / (32 * nu**2)
    expected = ((nu + 1) / nu) ** 0.25 * roots * series
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    exact = (beta2 * roots**-4 + (1 - beta2) * s) ** -0.25
    ratio = got / exact
    assert ratio.min() >= 1 - 1e-12
    assert ratio.max() <= 1.0778


@pytest.mark.acceptance("jorge", 2)
@pytest.mark.parametrize(("root", "s"), [(1.0, 3.0), (0.2, 1e-3), (31.6, 1.0)])
def test_scalar_update_is_the_harmonic_mean_times_a_constant(root, s):
    options = JorgeOptions(max_gain=None)
    with jax.enable_x64(True):
        gradient = jnp.full((1, 1), np.sqrt(s))
        new = optim.jorge_factor_update(
            _state(np.full((1, 1), root)), gradient, options
        )
        got, nu, beta2 = (float(v) for v in (new.matrix[0, 0], new.nu, new.beta2))
    old = root**-4
    # 1 − β₂ is 1/(ν + 1); the difference itself would lose ν·eps.
    mean = beta2 * old + s / (nu + 1)
    assert mean == pytest.approx(2 * s * old / (s + old), rel=1e-12)
    assert got / mean**-0.25 == pytest.approx(0.90625 / 2**-0.25, rel=1e-12)
    assert got / mean**-0.25 == pytest.approx(1.0777, abs=1e-4)


@pytest.mark.acceptance("jorge", 2)
@pytest.mark.parametrize(("order", "fixed"), [(1, 0.46286), (2, 2.07235), (3, 0.63307)])
@pytest.mark.parametrize(("s", "steps"), [(1e-4, 60), (1.0, 60), (100.0, 80)])
def test_scalar_fixed_points(order, fixed, s, steps):
    options = JorgeOptions(order=order)
    with jax.enable_x64(True):
        end = _updates(jnp.ones((1, 1)), options, np.sqrt(s), steps)
        root = float(end.matrix[0, 0])
    assert root**4 * s == pytest.approx(fixed, abs=1e-3)


def test_scalar_start_error_after_31_updates():
    with jax.enable_x64(True):
        end = _updates(jnp.ones((1, 1)), JorgeOptions(), 1.0, 31)
        assert float(end.matrix[0, 0]) ** 4 == pytest.approx(7.07, abs=0.01)


def _primitives(jaxpr):
    """Names of all primitives, through the jaxprs in parameters of equations."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _primitives(inner)


def _assert_products_only(function, products, *arguments):
    names = list(_primitives(jax.make_jaxpr(function)(*arguments).jaxpr))
    assert names.count("dot_general") == products
    assert not [n for n in names if n in FORBIDDEN or "custom" in n or "call" in n]


@pytest.mark.acceptance("jorge", 3)
@pytest.mark.parametrize("symmetrize", [False, True])
@pytest.mark.parametrize(("order", "products"), [(1, 5), (2, 6), (3, 7)])
def test_update_is_matrix_products_alone(order, products, symmetrize):
    options = JorgeOptions(order=order, symmetrize=symmetrize)
    update = functools.partial(optim.jorge_factor_update, options=options)
    state, gradient = optim.jorge_factor_init(4, options), jnp.ones((4, 5))
    _assert_products_only(update, products, state, gradient)
    # The same count must be found inside cond, jit and scan.
    nested = jax.jit(
        lambda s, g: jax.lax.scan(
            lambda c, _: (
                jax.lax.cond(g.sum() > 0, lambda: update(c, g), lambda: c),
                None,
            ),
            s,
            None,
            2,
        )[0]
    )
    _assert_products_only(nested, products, state, gradient)


@pytest.mark.acceptance("jorge", 3)
def test_whole_transform_has_the_two_factors_products_and_two_more():
    tx = optim.scale_by_jorge(update_every=3, init="grad")
    params = {"kernel": jnp.ones((4, 5))}
    _assert_products_only(tx.update, 6 + 6 + 2, params, tx.init(params))


def test_counter_of_primitives_sees_factorizations():
    def solve(a):
        return jax.lax.cond(a.sum() > 0, jnp.linalg.cholesky, lambda x: x, a)

    with pytest.raises(AssertionError):
        _assert_products_only(jax.jit(solve), 0, jnp.eye(3))


@pytest.mark.acceptance("jorge", 4)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_dynamic_beta2_puts_the_series_on_the_edge_of_its_disc(scale):
    gradients = scale * oracle.problem(0, 5, (6, 9))
    options = JorgeOptions()
    with jax.enable_x64(True):
        state = optim.jorge_factor_init(6, options, "float64")
        for gradient in jnp.asarray(gradients):
            before = np.asarray(state.matrix)
            state = optim.jorge_factor_update(state, gradient, options)
            nu, beta2 = float(state.nu), float(state.beta2)
            gram = np.asarray(gradient) @ np.asarray(gradient).T
            x = np.linalg.matrix_power(before, 4) @ gram
            assert nu == pytest.approx(np.linalg.norm(x), rel=1e-10)
            assert beta2 == pytest.approx(nu / (nu + 1), rel=1e-14)
            # What enters the series.
            step = jorge_factor._step(jnp.asarray(x), jnp.ones(()), options)
            assert float(jnp.linalg.norm(step.y)) == pytest.approx(1, rel=1e-12)
            assert np.linalg.norm(x / nu) == pytest.approx(1, rel=1e-10)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    seed=st.integers(0, 1000),
    order=st.sampled_from([1, 2, 3]),
    symmetrize=st.booleans(),
    max_gain=st.sampled_from([None, 1.0, 1.5]),
    beta2=st.sampled_from(["dynamic", 0.99]),
)
def test_updates_equal_numpy(rows, columns, seed, order, symmetrize, max_gain, beta2):
    gradients = oracle.problem(seed, 3, (rows, columns))
    options = JorgeOptions(
        eps=1.0, order=order, symmetrize=symmetrize, max_gain=max_gain, beta2=beta2
    )
    expected = np.eye(rows)
    with jax.enable_x64(True):
        state = optim.jorge_factor_init(rows, options, "float64")
        update = jax.jit(optim.jorge_factor_update, static_argnums=2)
        for gradient in gradients:
            state = update(state, jnp.asarray(gradient), options)
            expected, nu, used = oracle.factor_step(
                expected,
                gradient,
                order,
                None if beta2 == "dynamic" else beta2,
                1.0,
                max_gain,
                symmetrize,
            )
        got = jax.device_get(state)
    # Three updates, each of eight products of length ≤ 7.
    tolerance = 1e3 * np.finfo(float).eps * np.abs(expected).max()
    np.testing.assert_allclose(got.matrix, expected, rtol=1e-10, atol=tolerance)
    assert float(got.nu) == pytest.approx(nu, rel=1e-9)
    assert float(got.beta2) == pytest.approx(used, rel=1e-9)
    assert int(got.updates) == 3


def test_gain_and_asymmetry_are_of_the_matrix():
    options = JorgeOptions(max_gain=None)
    gradients = oracle.problem(3, 20, (5, 4))
    state = optim.jorge_factor_init(5, options)
    for gradient in jnp.asarray(gradients, jnp.float32):
        state = optim.jorge_factor_update(state, gradient, options)
    root = np.asarray(state.matrix, np.float64)
    rows = np.linalg.norm(root, axis=1)
    assert float(state.gain) == pytest.approx(
        rows.max() / rows.min() * 1e-6**0.25, rel=1e-5
    )
    asymmetry = np.linalg.norm(root - root.T) / np.linalg.norm(root)
    assert float(state.asymmetry) == pytest.approx(asymmetry, rel=1e-4)
    assert asymmetry > 1e-3


@pytest.mark.slow
@pytest.mark.acceptance("jorge", 6)
def test_zero_gradients_leave_the_matrix_bit_for_bit():
    gradients = jnp.asarray(oracle.problem(0, 5, (6, 9)), jnp.float32)
    state = optim.jorge_factor_init(6)
    for gradient in gradients:
        state = optim.jorge_factor_update(state, gradient)
    after = state
    for _ in range(100):
        after = optim.jorge_factor_update(after, jnp.zeros((6, 9)))
    np.testing.assert_array_equal(after.matrix, state.matrix)
    assert int(after.updates) == 5


@pytest.mark.parametrize("columns", [2, 2000])  # extremes of many drop NaN
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_non_finite_gradients_leave_the_factor(bad, columns):
    state = optim.jorge_factor_init(3)
    gradient = jnp.ones((3, columns)).at[1, 1].set(bad)
    after = optim.jorge_factor_update(state, gradient)
    np.testing.assert_array_equal(after.matrix, state.matrix)
    assert int(after.updates) == 0


@pytest.mark.faults(11)
@pytest.mark.parametrize("init", ["eps", "grad"])
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e-4, 1e4, 1e10, 1e20])
@pytest.mark.parametrize("shape", [(1, 1), (6, 9)])
def test_any_scale_stays_finite(scale, init, shape):
    options = JorgeOptions(init=init)
    gradients = jnp.asarray(scale * oracle.problem(1, 20, shape), jnp.float32)

    def body(state, gradient):
        state = optim.jorge_factor_start(state, gradient)
        return optim.jorge_factor_update(state, gradient, options), None

    start = optim.jorge_factor_init(shape[0], options)
    state = jax.jit(lambda g: jax.lax.scan(body, start, g)[0])(gradients)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in state)


HARD = oracle.hard_gradients()


@pytest.mark.faults(11)
@pytest.mark.parametrize("init", ["eps", "grad"])
@pytest.mark.parametrize("kind", HARD)
def test_hard_gradients_give_what_float64_gives(kind, init):
    options = JorgeOptions(init=init)
    state = optim.jorge_factor_init(HARD[kind].shape[1], options)
    for gradient in jnp.asarray(HARD[kind], jnp.float32):
        state = optim.jorge_factor_start(state, gradient)
        state = optim.jorge_factor_update(state, gradient, options)
    expected = oracle.factor(HARD[kind], init)
    # Five updates of eight products of length ≤ 6, each as long as the largest entry.
    tolerance = 5 * 8 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(state.matrix, expected, rtol=0, atol=tolerance)


def test_start_from_the_first_gradient_that_is_not_zero():
    options = JorgeOptions(init="grad")
    state = optim.jorge_factor_init(3, options)
    assert int(state.updates) == -1
    state = optim.jorge_factor_start(state, jnp.zeros((3, 2)))
    assert int(state.updates) == -1
    gradient = jnp.asarray(np.arange(6.0).reshape(3, 2), jnp.float32)
    started = optim.jorge_factor_start(state, gradient)
    expected = (np.sum(np.arange(6.0) ** 2) / 3) ** -0.25 * np.eye(3)
    np.testing.assert_allclose(started.matrix, expected, rtol=1e-6)
    again = optim.jorge_factor_start(started, 7 * gradient)
    np.testing.assert_array_equal(again.matrix, started.matrix)


def test_a_factor_that_has_not_started_is_not_updated():
    options = JorgeOptions(init="grad")
    state = optim.jorge_factor_init(2, options)
    after = optim.jorge_factor_update(state, jnp.full((2, 2), 1e-14), options)
    np.testing.assert_array_equal(after.matrix, state.matrix)


def test_fixed_beta2_counts_updates_outside_the_series_range():
    options = JorgeOptions(beta2=0.5, eps=1.0)
    state = optim.jorge_factor_init(1, options)
    state = optim.jorge_factor_update(state, jnp.full((1, 1), 0.9), options)
    assert int(state.diverged_updates) == 0
    state = optim.jorge_factor_update(state, jnp.full((1, 1), 9.0), options)
    assert int(state.diverged_updates) == 1
