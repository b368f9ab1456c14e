"""BERT's fused block equals its plain one, forward and backward."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.data_movement import layer
from hpcjax import core, ir, kernels, models
from hpcjax.core import trees

PLAIN = models.BertConfig(width=8, depth=2, heads=2)
TOKENS = (
    jnp.stack(
        [
            jnp.arange(12).reshape(2, 6) % 11,
            jnp.ones((2, 6), int),
            jnp.ones((2, 6), int),
        ],
        axis=-1,
    )
    .at[0, 4:, 2]
    .set(0)
)


def run(config, policy):
    """Logits, and gradients of the parameters and of an observed layer's slot."""
    model = config.make((6, 3), 11, policy)
    params, state = model.init(jax.random.key(0))
    place = "blocks/mlp/up"
    tap = core.Tap(backward=lambda x, g: jnp.einsum("...i,...j->ij", x, g))
    slots = {place: jnp.zeros((2, 8, 32))}

    @jax.jit
    def fn(params, slots):
        taps = {
            path: dataclasses.replace(tap, slot=slot) for path, slot in slots.items()
        }
        out, _ = model.apply(params, state, TOKENS, train=True, taps=taps)
        return (out.tokens.astype(jnp.float32) ** 2).mean(), out.tokens

    (_, words), grads = jax.value_and_grad(fn, argnums=(0, 1), has_aux=True)(
        params, slots
    )
    return np.asarray(words, np.float64), grads


@pytest.mark.slow
@pytest.mark.acceptance("data-movement", 1)
@pytest.mark.parametrize(
    ("policy", "tolerance"),
    [(core.Policy(), 1e-5), (core.Policy(compute="bfloat16"), 2e-2)],
    ids=["float32", "bfloat16"],
)
def test_the_fused_bert_is_the_plain_one(policy, tolerance):
    words, (grads, slots) = run(PLAIN, policy)
    fused = dataclasses.replace(PLAIN, block="fused")
    own_words, (own_grads, own_slots) = run(fused, policy)
    atol = tolerance * (1 + abs(words).max())
    np.testing.assert_allclose(own_words, words, rtol=0, atol=atol)
    pairs = zip(
        trees.flatten((own_grads, own_slots)).items(),
        trees.flatten((grads, slots)).items(),
        strict=True,
    )
    for (path, own), (other, want) in pairs:
        assert path == other
        scale = max(1e-3, float(jnp.abs(want).max()))
        assert float(jnp.abs(own - want).max()) <= tolerance * scale, path


RATES = {"attention": 0.1, "out": 0.2, "up": 0.3, "down": 0.4}
SIZES = ir.encoder_sizes(batch=2, length=5, heads=2, width=8)


@pytest.mark.slow
@pytest.mark.acceptance("data-movement", 1)
@pytest.mark.parametrize("implementation", ["reference", "interpreted"])
def test_with_dropout_the_fused_layer_is_the_plain_one_with_the_same_masks(
    implementation,
):
    if implementation == "interpreted":
        pytest.importorskip("triton", reason="`make kernels` has not been called")
    rng = np.random.default_rng(0)

    def draw(axes):
        return jnp.asarray(rng.normal(size=[SIZES[a] for a in axes]), jnp.float32)

    params = {name: draw(axes) for name, axes in layer.PARAMETERS.items()}
    x, g = draw(layer.INPUT), draw(layer.INPUT)
    seeds = {name: jnp.uint32(n) for n, name in enumerate(RATES)}
    fused_axes = layer.MASKS | {"out": "bji"}
    masks = {}
    for name, rate in RATES.items():
        own = fused_axes[name]
        kept = kernels.keep_mask(seeds[name], [SIZES[a] for a in own], rate)
        order = [own.index(a) for a in layer.MASKS[name]]
        masks[name] = kept.transpose(order) / (1 - rate)
    want, pull = jax.vjp(lambda p, x: layer.plain_layer(p, x, masks), params, x)
    fused = functools.partial(layer.fused_layer, seeds=seeds, rate=RATES)
    fused = functools.partial(fused, implementation=implementation)
    got, own_pull = jax.vjp(fused, params, x)
    np.testing.assert_allclose(got, want, atol=1e-5)
    pairs = zip(jax.tree.leaves(own_pull(g)), jax.tree.leaves(pull(g)), strict=True)
    for own, other in pairs:
        scale = 1 + float(jnp.abs(other).max())
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-5 * scale)
