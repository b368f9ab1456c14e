"""The network of digits, and the modes that it is evaluated in."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.magicube import attention, network, products


def test_a_pattern_of_all_keys_is_dense_attention():
    cfg = attention.Config(zeros=1e-9, steps=1)
    mixes = attention._mixes(cfg)
    dense, sparse = (
        network.pixels(cfg.model, mixes[name]) for name in ("dense", "float")
    )
    params, state = dense.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), "float32")
    y, same = (
        model.apply(params, state, x, train=False)[0] for model in (dense, sparse)
    )
    np.testing.assert_allclose(y, same, atol=1e-5)


def test_every_eighth_query_has_the_keys_of_its_pattern():
    pattern = attention._mixes(attention.Config())["float"].keywords["pattern"]
    kept = np.asarray(pattern.to_dense()) != 0
    assert (kept.sum(1) == 6).all()
    for rows in kept.reshape(8, 8, 64):
        assert (rows == rows[0]).all()


def test_patterns_have_the_zeros_asked_for_and_a_full_row():
    rng = np.random.default_rng(0)
    for kind in ("random", "magnitude"):
        mask = products._pattern(products.Config(kind=kind), rng)
        assert abs(1 - mask.mean() - 0.9) < 0.001
    long = products._pattern(products.Config(kind="long"), rng)
    assert long[16].all()
    sizes = products._pattern(products.Config(kind="magnitude"), rng).sum(1)
    assert sizes.max() > 3 * sizes.mean()
