"""Transformers whose attention has a pattern: masked attention in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hpcjax import layers, models
from hpcjax.core import ConfigError, Policy
from hpcjax.models.block import Attention, Sizes
from tests.models.test_transformer import forward

TOKENS = np.arange(16) * 3 % 11
SPARSE = models.SparseAttentionConfig(zeros=0.5, vector=4, seed=3)


def config_of(family=models.GPT2, **sparse):
    options = dataclasses.replace(
        family, sparse=dataclasses.replace(SPARSE, **sparse), init_scale=0.3
    )
    return models.CausalLmConfig(width=16, heads=2, depth=2, options=options)


def model_of(config):
    sizes = {field: getattr(config, field) for field in ("width", "heads", "depth")}
    return models.causal_lm((16,), 11, options=config.options, **sizes)


@pytest.mark.parametrize("family", [models.GPT2, models.LLAMA], ids=["gpt2", "llama"])
def test_logits_are_those_of_masked_attention(family):
    config = config_of(family)
    model = model_of(config)
    params, state = model.init(jax.random.key(0))
    pattern = layers.random_pattern(16, zeros=0.5, vector=4, seed=3, causal=True)
    mask = np.tril(np.asarray(pattern.to_dense(), bool))
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    expected = forward(wide, TOKENS, config, mask)
    found, _ = jax.jit(lambda x: model.apply(params, state, x, train=True))(
        jnp.asarray(TOKENS)[None]
    )
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=1e-4)


def test_few_bits_are_near_floats_and_cannot_be_trained():
    found = []
    for bits in ("float", "8-8", "4-4"):
        model = model_of(config_of(bits=bits))
        params, state = model.init(jax.random.key(0))
        x = jnp.asarray(TOKENS)[None]
        found.append(model.apply(params, state, x, train=False)[0])
    near, far = (jnp.abs(each - found[0]).max() for each in found[1:])
    assert 0 < near < 0.1 * far

    def loss(params):
        return jnp.sum(model.apply(params, state, x, train=True)[0])

    with pytest.raises(ConfigError, match='in a config "float"'):
        jax.grad(loss)(params)


def test_a_cache_is_refused():
    model = model_of(config_of())
    params, _ = model.init(jax.random.key(0))
    cache = models.empty_cache(model, 1, 16)
    x = models.Decoding(tokens=jnp.zeros((1, 1), int), cache=cache)
    with pytest.raises(ConfigError, match="not to a pattern: got model"):
        model.apply(params, {}, x, train=False)


def test_a_mask_is_refused():
    sizes = Sizes.of_causal_lm(config_of(), Policy())
    x = jnp.zeros((1, 16, 16))
    model = models.from_nnx(lambda: Masked(sizes))
    params, _ = model.init(jax.random.key(0))
    with pytest.raises(ConfigError, match="takes no mask"):
        model.apply(params, {}, x, train=False)


class Masked(nnx.Module):
    """Attention to some keys of a pattern."""

    def __init__(self, sizes):
        self.attention = Attention(sizes)

    def __call__(self, x, *, train, key):
        return self.attention(x, jnp.arange(16)[None], jnp.ones((1, 16, 16), bool))


@pytest.mark.parametrize(
    "fields", [{"kv_heads": 1}, {"options": models.BLOOM}, {"attention": "xla"}]
)
def test_what_does_not_go_with_a_pattern_is_refused(fields):
    options = dataclasses.replace(fields.get("options", models.GPT2), sparse=SPARSE)
    with pytest.raises(ConfigError, match="sparse attention has a key head for each"):
        models.CausalLmConfig(width=16, heads=2, **(fields | {"options": options}))
