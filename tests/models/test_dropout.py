"""Dropout of transformers: masks by example and place, in plain and fused blocks."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import core, models
from hpcjax.core import ConfigError
from hpcjax.core.keys import BatchKey

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (4, 6)))
KEY = jax.random.key(3)
RATES = {"dropout": 0.3, "attention_dropout": 0.2}
POST = {"norm_position": "post", "final_norm": False}


def lm(*, remat="none", pieces=1, **options):
    config = models.CausalLmConfig(
        depth=2,
        width=8,
        heads=2,
        remat=remat,
        pieces=pieces,
        options=models.TransformerOptions(init_scale=0.5, **options),
    )
    return config.make((6,), 11, core.Policy())


def encoder(**options):
    config = models.BertConfig(depth=2, width=8, heads=2, head="masked_lm", **options)
    return config.make((6,), 11, core.Policy())


def outputs(model, tokens=TOKENS, key=KEY, *, train=True):
    params, state = model.init(jax.random.key(0))
    run = jax.jit(lambda p, x, key: model.apply(p, state, x, train=train, key=key)[0])
    return np.asarray(run(params, tokens, key))


def text(model, key=KEY):
    params, state = jax.eval_shape(model.init, KEY)

    def fn(params):
        return model.apply(params, state, TOKENS, train=True, key=key)[0].sum()

    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(jax.grad(fn))(params)))


@pytest.mark.acceptance("data-movement", 1)
def test_fused_and_plain_blocks_drop_the_same():
    """And rates of zero are the network without dropout."""
    plain, fused = (lm(block=b, **POST, **RATES) for b in ("plain", "fused"))
    found = outputs(plain)
    np.testing.assert_allclose(outputs(fused), found, atol=2e-5)
    none = outputs(lm(**POST))
    assert abs(found - none).max() > 0.1
    np.testing.assert_array_equal(outputs(plain, key=None, train=False), none)
    np.testing.assert_allclose(outputs(fused, key=None, train=False), none, atol=2e-5)


@pytest.mark.parametrize("make", [lm, encoder])
def test_without_dropout_nothing_is_drawn(make):
    assert text(make()) == text(make(), key=None)
    assert "random" not in text(make())
    assert "random" in text(make(dropout=0.1))


@pytest.mark.parametrize("make", [lm, encoder])
@pytest.mark.parametrize("rate", RATES)
def test_a_training_pass_without_a_key_is_refused(make, rate):
    with pytest.raises(ConfigError, match=f"{rate}=0.5.* needs a key"):
        text(make(**{rate: 0.5}), key=None)


def test_masks_are_of_the_row_in_the_whole_batch_and_of_the_block():
    model = lm(**RATES)
    whole = outputs(model)
    rows = jnp.arange(2, 4)
    part = outputs(model, TOKENS[2:], BatchKey(key=KEY, rows=rows))
    np.testing.assert_allclose(part, whole[2:], atol=1e-5)
    pieces = outputs(lm(pieces=2, remat="full", **RATES))
    np.testing.assert_allclose(pieces, whole, atol=1e-5)
    assert abs(outputs(model, key=jax.random.key(4)) - whole).max() > 0.1


def test_devices_draw_what_one_draws():
    model = lm(**RATES)
    params, state = model.init(jax.random.key(0))
    whole = outputs(model)

    def local(params, x, rows):
        key = BatchKey(key=KEY, rows=rows)
        return model.apply(params, state, x, train=True, key=key)[0]

    for count in (2, 4):
        mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,))
        specs = (P(), P("data"), P("data"))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"))
        found = jax.jit(run)(params, TOKENS, jnp.arange(4))
        np.testing.assert_allclose(found, whole, atol=1e-5)


def test_recomputed_blocks_have_the_gradient_of_the_masks_they_drew():
    def gradient(remat):
        model = lm(remat=remat, **RATES)
        params, state = model.init(jax.random.key(0))

        def loss(params):
            y, _ = model.apply(params, state, TOKENS, train=True, key=KEY)
            return (y**2).mean()

        return jax.jit(jax.grad(loss))(params)

    for one, other in zip(
        *(jax.tree.leaves(gradient(r)) for r in ("none", "full")), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_a_fused_block_cannot_is_refused_by_name():
    for wrong in (
        {"norm_position": "pre"},
        {"norm": "rms"},
        {"use_bias": False},
        {"mlp": "silu_gated"},
        {"position": "alibi"},
        {"experts": models.ExpertsConfig()},
    ):
        (name,) = wrong
        with pytest.raises(ConfigError, match=rf"block=fused takes.*{name}="):
            models.TransformerOptions(**{"block": "fused", **POST, **wrong})
    fused = models.TransformerOptions(block="fused", **POST)
    for wrong in ({"kv_heads": 2}, {"attention": "xla"}):
        with pytest.raises(ConfigError, match="block=fused has a key head for each"):
            models.CausalLmConfig(options=fused, **wrong)
    sparse = models.SparseAttentionConfig()
    with pytest.raises(ConfigError, match="sparse attention drops no weights"):
        models.TransformerOptions(sparse=sparse, attention_dropout=0.1)


def test_a_model_that_is_cut_and_attention_of_others_drop_nothing():
    model = lm(dropout=0.1)
    with pytest.raises(ConfigError, match=r"model.options.dropout=0.0: got 0.1"):
        model.cut()
    options = models.TransformerOptions(attention_dropout=0.1)
    config = models.CausalLmConfig(width=8, heads=2, options=options, attention="xla")
    with pytest.raises(core.UnsupportedOp, match="no dropout"):
        text(config.make((6,), 11, core.Policy()))


def test_an_unrolled_model_drops():
    options = models.TransformerOptions(**RATES)
    config = models.CausalLmConfig(width=8, heads=2, options=options)
    model = models.unrolled_causal_lm(config, 6, 11)
    with pytest.raises(ConfigError, match="needs a key"):
        text(model, key=None)
    assert "random" in text(model)


@pytest.mark.parametrize("rate", [1.0, -0.1])
def test_rates_are_shares(rate):
    for config in (models.TransformerOptions, models.BertConfig):
        with pytest.raises(ConfigError, match=r"dropout must be in \[0, 1\)"):
            dataclasses.replace(config(), dropout=rate)
