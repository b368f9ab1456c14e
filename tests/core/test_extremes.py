"""What XLA's extremes leave out of many numbers is found where it matters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import compress, solvers
from hpcjax.compress import _codes
from hpcjax.core.extremes import largest
from hpcjax.layers import _sparse_attention
from hpcjax.optim import matrix_roots
from hpcjax.solvers import green

MANY = 5000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axis", [None, 0, (0, 1)])
def test_the_largest_is_nan_where_one_is(dtype, axis):
    x = np.random.default_rng(0).random((MANY, 3))
    bad = x.copy()
    bad[4321, 1] = np.nan
    for given in (x, bad):
        cast = jnp.asarray(given, dtype)
        wanted = np.max(np.asarray(cast, np.float64), axis)
        found = jax.jit(largest, static_argnums=1)(cast, axis)
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float64), wanted)
    assert jnp.isnan(largest(jnp.full(MANY, jnp.nan)))
    assert largest(jnp.zeros((0, 3)), 0).tolist() == [0, 0, 0]


def test_a_fixed_point_of_nan_does_not_converge():
    def spoil(x):
        return x.at[7].set(jnp.nan)

    found = solvers.fixed_point(
        spoil, jnp.ones(MANY), mixing=1.0, tolerance=1e-3, limit=9
    )
    assert not found.converged
    assert found.iterations == 1


def test_decimation_of_nan_is_not_done():
    x = jnp.ones((2, 64, 64), jnp.complex64).at[1, 3, 3].set(jnp.nan)
    assert not (green._size(x) <= 1e9).all()
    assert jnp.isfinite(green._size(x)).tolist() == [True, False]


def test_codes_and_grids_of_nan_have_a_scale_of_nan():
    y = jnp.ones((MANY, 4)).at[4444, 2].set(jnp.nan)
    _, scale = _codes.quantize(y, 4)
    assert jnp.isnan(scale).tolist() == [False, False, True, False]
    grid = compress.fit_grid(y, compress.GridSpec(bits=4))
    assert jnp.isnan(grid.scale).reshape(-1).tolist() == [False, False, True, False]
    _, unit = _sparse_attention._round(y, 8)
    assert jnp.isnan(unit)


def test_a_root_of_nan_is_not_found():
    matrix = jnp.eye(64).at[3, 3].set(jnp.nan)
    found = matrix_roots.inverse_root_newton(matrix, 4, 1e-6)
    assert jnp.isnan(found.error)
    assert found.iterations == 0
