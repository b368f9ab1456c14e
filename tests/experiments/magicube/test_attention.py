"""The network of digits, and the modes that it is evaluated in."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.magicube import attention, network, products, spmm_time, tables
from hpcjax import core, models

SMALL = {
    "size": 64,
    "outputs": 16,
    "inner": 1,
    "repetitions": 2,
    "implementation": "reference",
}


def test_a_pattern_of_all_keys_is_dense_attention():
    cfg = attention.Config(sparse=models.SparseAttentionConfig(zeros=1e-9))
    dense, sparse = (attention._network(cfg, mode) for mode in ("dense", "float"))
    params, state = dense.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), "float32")
    y, same = (
        model.apply(params, state, x, train=False)[0] for model in (dense, sparse)
    )
    np.testing.assert_allclose(y, same, atol=1e-5)


def test_a_mode_is_a_choice_of_bits_and_scales(monkeypatch):
    monkeypatch.setattr(network, "pixels", lambda config: config.options.sparse)
    chosen = [attention._network(attention.Config(), mode) for mode in attention.MODES]
    assert chosen[0] is None
    assert [each.bits for each in chosen[1:]] == [*attention.MODES[1:-1], "4-4"]
    assert {each.scales for each in chosen[1:-1]} == {"calibrated"}
    assert chosen[-1].scales == "published"


def test_without_attention_only_the_rest_counts():
    cfg = attention.Config(model=models.CausalLmConfig(width=16, heads=2, depth=1))
    whole = attention._network(cfg, "dense")
    params, state = whole.init(jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), "float32")

    def change(model, part):
        """Returns how far outputs move when the parameters of a part grow."""
        leaves = core.trees.flatten(params)
        more = {path: leaf + 1.0 * (part in path) for path, leaf in leaves.items()}
        before, after = (
            model.apply(each, state, x, train=False)[0]
            for each in (params, core.trees.unflatten(params, more))
        )
        return jnp.abs(after - before).max()

    without = attention.drop_attention(whole)
    assert change(without, "attention/") == 0 < change(whole, "attention/")
    assert change(without, "mlp") > 0


def test_patterns_have_the_zeros_asked_for_and_a_full_row():
    rng = np.random.default_rng(0)
    for kind in ("random", "magnitude"):
        mask = products._pattern(products.Config(kind=kind), rng)
        assert abs(1 - mask.mean() - 0.9) < 0.001
    long = products._pattern(products.Config(kind="long"), rng)
    assert long[16].all()
    sizes = products._pattern(products.Config(kind="magnitude"), rng).sum(1)
    assert sizes.max() > 3 * sizes.mean()


@pytest.mark.slow
def test_times_are_those_of_exact_products():
    sizes = dataclasses.replace(spmm_time.Config(), **SMALL)
    rows = {"all": spmm_time.run(sizes, None).expand_dims("seed")}
    table = tables.spmm(rows)
    assert not table["wrong"].sel(row=list(spmm_time.OWN)).any()
    ratio = table["sparse"].sel(row=[spmm_time.BCOO, spmm_time.BCSR]).max()
    assert ratio == 1
