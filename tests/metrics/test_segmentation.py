import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import metrics


def masks(seed):
    return np.random.default_rng(seed).random((5, 4, 3, 2)) < 0.4


@pytest.mark.parametrize("smooth", [0.0, 1.0])
def test_dice_equals_counting_pixels(smooth):
    one, other = masks(0), masks(1)
    found = metrics.dice(
        jnp.asarray(one, "float32"), jnp.asarray(other, "float32"), smooth=smooth
    )
    for row in range(5):
        for kind in range(2):
            a, b = set(), set()
            for place in np.ndindex(4, 3):
                a |= {place} if one[(row, *place, kind)] else set()
                b |= {place} if other[(row, *place, kind)] else set()
            expected = (2 * len(a & b) + smooth) / (len(a) + len(b) + smooth)
            assert float(found[row, kind]) == pytest.approx(expected, rel=1e-6)


def test_dice_of_nothing_is_one_and_has_a_gradient():
    empty = jnp.zeros((1, 3, 2))
    np.testing.assert_array_equal(metrics.dice(empty, empty), 1)
    gradient = jax.grad(lambda p: metrics.dice(p, empty).sum())(empty)
    assert np.isfinite(gradient).all()
    with pytest.raises(ValueError, match="smooth=-1"):
        metrics.dice(empty, empty, smooth=-1.0)


def test_dice_of_what_is_no_number_is_none():
    nothing = jnp.full((1, 4, 2), jnp.nan)
    assert jnp.isnan(metrics.dice(nothing, jnp.ones((1, 4, 2)))).all()
