"""MS-SSIM against its formula, and the losses of spread that use it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from hpcjax import metrics
from hpcjax.core.errors import ConfigError

WEIGHTS = np.array([0.0448, 0.2856, 0.3001])
SMALL = {"scales": 3, "window": 5, "sigma": 1.0}


def define(x, y, data_range):
    """Three scales of five taps, by scipy's filter where the window is within."""
    product = 1.0
    for scale, weight in enumerate(WEIGHTS / WEIGHTS.sum()):

        def blur(field):
            return ndimage.gaussian_filter(field, 1.0, radius=2)[2:-2, 2:-2]

        mx, my = blur(x), blur(y)
        c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
        both = 2 * (blur(x * y) - mx * my) + c2
        shape = both / (blur(x * x) - mx**2 + blur(y * y) - my**2 + c2)
        light = (2 * mx * my + c1) / (mx**2 + my**2 + c1)
        product *= (light * shape if scale == 2 else shape).mean() ** weight
        if scale < 2:
            parts = [(i, j) for i in (0, 1) for j in (0, 1)]
            x, y = (sum(z[i::2, j::2] for i, j in parts) / 4 for z in (x, y))
    return product


def fields(shape=(20, 24), seed=0):
    rng = np.random.default_rng(seed)
    x = ndimage.gaussian_filter(rng.normal(size=shape), 2.0) * 3 + 1
    return x, x + 0.1 * rng.normal(size=shape)


@pytest.mark.acceptance("ens-postprocess", 5)
def test_several_scales_are_the_formula():
    x, y = fields()
    assert float(metrics.ms_ssim(x, x, data_range=2.0, **SMALL)) == pytest.approx(1)
    found = metrics.ms_ssim(x, y, data_range=2.0, **SMALL)
    assert float(found) == pytest.approx(define(x, y, 2.0), abs=1e-4)
    assert float(metrics.ms_ssim(x, -x, data_range=2.0, **SMALL)) >= 0
    one = metrics.ms_ssim(x, y, data_range=2.0, scales=1)
    assert float(one) == pytest.approx(float(metrics.ssim(x, y, data_range=2.0)))


@pytest.mark.acceptance("ens-postprocess", 5)
@pytest.mark.parametrize(
    ("side", "options", "least"),
    [(160, {}, 161), (40, {"scales": 3}, 41), (16, SMALL, 17)],
)
def test_fields_too_small_are_told_how_large_they_must_be(side, options, least):
    with pytest.raises(ConfigError, match=f"needs {least} points a side"):
        metrics.ms_ssim(
            np.ones((side, 200)), np.ones((side, 200)), data_range=1.0, **options
        )
    run = jax.eval_shape(
        lambda x: metrics.ms_ssim(x, x, data_range=1.0, **options),
        jnp.ones((least, least)),
    )
    assert run.shape == ()


def score(std, spread, area, **asked):
    batch = {
        **{"y": 0 * spread, "efi": 0 * spread, "spread": spread, "area": area},
        **{"scale": jnp.full(len(spread), 2.0), **asked},
    }
    batch = {name: jnp.asarray(each, jnp.float32) for name, each in batch.items()}
    outputs = types.SimpleNamespace(mean=0 * batch["y"], std=jnp.asarray(std, "f4"))
    return metrics.gaussian_totals(outputs, batch).means()


def test_the_loss_is_what_the_batch_asks_for():
    x, y = fields()
    y = np.abs(y)
    x = np.abs(x)
    area = np.ones((1, *x.shape))
    area[:, :3] = 0
    std, spread = x[None], y[None]
    square = 4 * np.mean((x - y)[3:] ** 2)
    crps = np.mean(np.asarray(metrics.crps_gaussian(0.0, 2 * x, 0.0))[3:])
    for asked in ((1, 0, 0), (0, 1, 0), (1, 1, 0)):
        found = score(std, spread, area, asked=[asked])
        assert float(found["spread"]) == pytest.approx(square, rel=1e-4)
        expected = asked[0] * crps + asked[1] * square
        assert float(found["loss"]) == pytest.approx(expected, rel=1e-4)
    scored = np.where(area[0] > 0, x, y)
    alike = define(2 * scored, 2 * y, 4.3)
    expected = 0.16 * 2 * np.abs(x - y)[3:].mean() + 0.84 * (1 - alike)
    found = score(std, spread, area, structure=[4.3])
    assert float(found["loss"]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("asked", [{"asked": [(0, 1, 0)]}, {"structure": [4.3]}])
def test_a_spread_below_zero_has_a_finite_slope(asked):
    _, y = fields()

    def loss(std):
        return score(std, np.abs(y)[None], np.ones((1, *y.shape)), **asked)["loss"]

    slope = jax.jit(jax.grad(loss))(jnp.full((1, *y.shape), -0.3))
    assert np.isfinite(slope).all()
    assert (np.asarray(slope) < 0).any()
