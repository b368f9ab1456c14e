"""Inverse roots and Shampoo against numpy and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import optim
from hpcjax.core.errors import ConfigError
from hpcjax.optim.matrix_roots import largest_eigenvalue
from tests.oracles import jorge as oracle


def _spd(condition, size=12, seed=0):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.normal(size=(size, size)))
    return basis * np.geomspace(1, 1 / condition, size) @ basis.T * 3.0


@jax.jit
def _both_roots(matrix):
    newton = optim.inverse_root_newton(matrix, 4)
    return newton, optim.inverse_root_eigh(matrix, 4, damping="ridge")


@pytest.mark.acceptance("jorge", 7)
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_newton_equals_eigh_with_a_ridge(condition):
    with jax.enable_x64(True):
        newton, eigh = jax.device_get(_both_roots(jnp.asarray(_spd(condition))))
    difference = np.linalg.norm(newton.root - eigh) / np.linalg.norm(eigh)
    assert difference <= 1e-5
    assert newton.error < 1e-6
    assert 6 <= newton.iterations <= 20


@pytest.mark.acceptance("jorge", 7)
@pytest.mark.parametrize("damping", ["floor", "ridge"])
@pytest.mark.parametrize("condition", [1e2, 1e4])
def test_root_to_the_minus_four_is_the_damped_matrix(condition, damping):
    matrix = _spd(condition)
    with jax.enable_x64(True):
        root = np.asarray(
            optim.inverse_root_eigh(jnp.asarray(matrix), 4, 1e-6, damping)
        )
    inverse = np.linalg.inv(root)
    shift = 1e-6 * 3.0 if damping == "ridge" else 0.0
    damped = matrix + shift * np.eye(12)
    found = np.linalg.matrix_power(inverse, 4)
    assert np.linalg.norm(found - damped) / np.linalg.norm(damped) <= 1e-8


@pytest.mark.parametrize(("condition", "gap"), [(1e3, 1.3e-4), (1e6, 0.09)])
def test_floor_and_ridge_are_different_matrices(condition, gap):
    with jax.enable_x64(True):
        matrix = jnp.asarray(_spd(condition))
        floor = optim.inverse_root_eigh(matrix, 4, damping="floor")
        ridge = optim.inverse_root_eigh(matrix, 4, damping="ridge")
    found = np.linalg.norm(floor - ridge) / np.linalg.norm(floor)
    assert gap / 2 < found < gap * 2


@pytest.mark.parametrize("power", [1, 2, 3, 4, 6])
def test_powers_against_numpy(power):
    matrix = _spd(100.0, size=5)
    with jax.enable_x64(True):
        eigh = optim.inverse_root_eigh(jnp.asarray(matrix), power, eps=0.0)
        newton = optim.inverse_root_newton(jnp.asarray(matrix), power, eps=0.0)
    expected = oracle.inverse_root(matrix, power)
    np.testing.assert_allclose(eigh, expected, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(newton.root, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_newton_converges_whatever_the_spectrum(seed, rank):
    half = np.random.default_rng(seed).normal(size=(8, rank))
    with jax.enable_x64(True):
        newton, eigh = jax.device_get(_both_roots(jnp.asarray(half @ half.T)))
    assert newton.error < 1e-6
    difference = np.linalg.norm(newton.root - eigh) / np.linalg.norm(eigh)
    assert difference < 1e-5


def test_roots_of_rank_deficient_and_zero_matrices_are_finite():
    for matrix in (jnp.ones((4, 4)), jnp.zeros((4, 4)), jnp.full((1, 1), 1e-30)):
        assert bool(jnp.isfinite(optim.inverse_root_eigh(matrix, 4)).all())
        assert bool(jnp.isfinite(optim.inverse_root_newton(matrix, 4).root).all())


def test_largest_eigenvalue_where_simple_starts_fail():
    # All ones is orthogonal to the top vector; the largest diagonal misleads.
    matrix = jnp.asarray([[1.0, -0.9, 0.0], [-0.9, 1.0, 0.0], [0.0, 0.0, 1.5]])
    assert float(largest_eigenvalue(matrix)) == pytest.approx(1.9, rel=1e-5)
    assert float(largest_eigenvalue(jnp.zeros((3, 3)))) == 0


@pytest.mark.parametrize("b2", [0.9, 1.0])
@pytest.mark.parametrize("root", ["eigh", "newton"])
def test_steps_equal_numpy(b2, root):
    gradients = oracle.problem(0, 7, (4, 6))
    with jax.enable_x64(True):
        tx = optim.scale_by_shampoo(
            b1=0.5, b2=b2, root=root, root_damping="ridge", stats_every=2, roots_every=3
        )
        update = jax.jit(tx.update)
        state = tx.init({"w": jnp.asarray(gradients[0])})
        found = []
        for gradient in gradients:
            updates, state = update({"w": jnp.asarray(gradient)}, state)
            found.append(np.asarray(updates["w"]))
    stats = [1e-6 * np.eye(4), 1e-6 * np.eye(6)]
    roots, momentum = [None, None], np.zeros((4, 6))
    for step, g in enumerate(gradients):
        if step % 2 == 0:
            new = 1 - b2 if b2 < 1 else 1.0
            stats[0] = b2 * stats[0] + new * g @ g.T
            stats[1] = b2 * stats[1] + new * g.T @ g
        if step % 3 == 0:
            roots = [
                oracle.inverse_root(
                    s + 1e-6 * np.linalg.eigvalsh(s)[-1] * np.eye(len(s))
                )
                for s in stats
            ]
        momentum = 0.5 * momentum + 0.5 * roots[0] @ g @ roots[1]
        # Newton stops at a residual of 1e-6; the statistics' condition is 1e6.
        error = np.linalg.norm(found[step] - momentum) / np.linalg.norm(momentum)
        assert error < (1e-9 if root == "eigh" else 1e-5)


HARD = oracle.hard_gradients()


@pytest.mark.quick("eigh-ridge")
@pytest.mark.faults(11)
@pytest.mark.parametrize(
    ("root", "damping"), [("eigh", "floor"), ("eigh", "ridge"), ("newton", "ridge")]
)
def test_hard_gradients_give_what_float64_gives(root, damping):
    tx = optim.scale_by_shampoo(
        b1=0.0, b2=0.9, root=root, root_damping=damping, roots_every=1
    )
    given = {kind: jnp.asarray(each, jnp.float32) for kind, each in HARD.items()}
    update, state = jax.jit(tx.update), tx.init({k: g[0] for k, g in given.items()})
    found = {kind: [] for kind in HARD}
    for step in range(5):
        updates, state = update({k: g[step] for k, g in given.items()}, state)
        for kind, made in updates.items():
            found[kind].append(made)
    for kind, gradients in HARD.items():
        # float32 errs by 1.2e-7 of the largest eigenvalue. That is an eighth of the
        # smallest one, ε times it, but little of these gradients lies along that one.
        for made, exact in zip(
            found[kind], oracle.shampoo(gradients, damping, 0.9), strict=True
        ):
            tolerance = 1e-4 * np.abs(exact).max()
            np.testing.assert_allclose(made, exact, rtol=0, atol=tolerance)


@pytest.mark.slow
def test_exponent_override_and_blocks():
    gradient = {"w": jnp.diag(jnp.asarray([4.0, 9.0, 16.0]))}
    tx = optim.scale_by_shampoo(b1=0.0, b2=1.0, exponent_override=8, block_size=2)
    updates, state = tx.update(gradient, tx.init(gradient))
    np.testing.assert_allclose(jnp.diag(updates["w"]), [2, 3, 4], rtol=1e-4)
    assert {f.matrix.shape[0] for f in optim.factors_of(state).values()} == {1, 2}


def test_failed_statistics_are_counted_and_not_taken():
    params = {"w": jnp.ones((2, 2))}
    tx = optim.scale_by_shampoo(roots_every=1)
    _, state = tx.update(params, tx.init(params))
    _, after = tx.update({"w": jnp.full((2, 2), 1e30)}, state)
    name = "w/left/0"
    np.testing.assert_array_equal(
        optim.factors_of(after)[name].statistic, optim.factors_of(state)[name].statistic
    )
    assert float(optim.inspect(after)["shampoo_failed"]) == 2


@pytest.mark.parametrize(
    "options",
    [{"b2": 0.0}, {"roots_every": 0}, {"eps": 0.0}, {"exponent_override": 0}],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        optim.ShampooConfig(**options)
    with pytest.raises(ConfigError, match=next(iter(options))):
        optim.scale_by_shampoo(**options)
