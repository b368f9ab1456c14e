"""Decoding with a cache against the forward pass over the whole sequence."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, models
from hpcjax.core import trees
from tests.models.helpers import instance
from tests.models.registry import REGISTRY

kernel = importlib.import_module("hpcjax.kernels._clustered_attention.blocked")
FAMILIES = (
    *("gpt2", "opt", "opt_350m", "bloom", "llama", "llama_heads"),
    *("moe", "post_norm"),
)
SIZE = 6


def tokens_of(shape, seed=0):
    made = np.random.default_rng(seed).integers(0, 11, shape)
    return jnp.asarray(made, jnp.int32)


def forward(found, tokens):
    """Logits of each place, by a pass over the places up to it alone."""
    logits, _ = found.model.apply(found.params, {}, tokens, train=False)
    return logits


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def step(params, tokens, cache, *, model):
    x = models.Decoding(tokens=tokens, cache=cache)
    return model.apply(params, {}, x, train=False)[0]


@pytest.mark.quick("opt-True", "llama_heads-True")
@pytest.mark.acceptance("lm-models", 5)
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_give_what_the_whole_pass_gives(family, unrolled):
    found = instance(family)
    tokens = tokens_of((3, SIZE))
    expected = forward(found, tokens)
    lengths = jnp.array([2, 3, 1])
    cache = models.empty_cache(found.model, 3, SIZE, unrolled=unrolled)
    # Prompts of different lengths, filled up on the right with other tokens.
    prompts = jnp.where(jnp.arange(3) < lengths[:, None], tokens[:, :3], 7)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.runs)]
    logits, cache = step(found.params, prompts, cache, model=found.model)
    assert buffers == [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.runs)
    ], "the cache is written where it is"
    for row, length in enumerate(np.asarray(lengths)):
        np.testing.assert_allclose(
            logits[row, :length], expected[row, :length], atol=1e-5, rtol=1e-5
        )
    cache = models.Cache(runs=cache.runs, length=lengths + 0)
    for number in range(SIZE - 3):
        place = jnp.asarray(lengths) + number
        token = jnp.take_along_axis(tokens, place[:, None], axis=1)
        logits, cache = step(found.params, token, cache, model=found.model)
        wanted = expected[jnp.arange(3), place]
        np.testing.assert_allclose(logits[:, 0], wanted, atol=1e-5, rtol=1e-5)
    assert cache.length.tolist() == [5, 6, 4]


# SmolLM2-135M's shapes.
SMOLLM2 = models.CausalLmConfig(
    depth=30,
    width=576,
    heads=9,
    kv_heads=3,
    mlp_width=1536,
    options=dataclasses.replace(models.LLAMA, tied_head=True),
)


def compiled_step(model, batch, size, time):
    """The program that reads `time` tokens with room for `size`, and its cache."""
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    cache = jax.eval_shape(lambda: models.empty_cache(model, batch, size))
    tokens = jax.ShapeDtypeStruct((batch, time), jnp.int32)

    def read(params, tokens, cache):
        at = jnp.full((batch, 1), time - 1)
        x = models.Decoding(tokens=tokens, cache=cache, at=at)
        return model.apply(params, {}, x, train=False)[0]

    program = jax.jit(read, donate_argnums=2).lower(params, tokens, cache).compile()
    return program.memory_analysis(), trees.num_bytes(cache)


def test_a_step_copies_no_cache():
    """Of 377 MB of cache, 14 MB of temporaries: weights of a layer, and blocks."""
    memory, held = compiled_step(SMOLLM2.make((2048,), 49152), 4, 2048, 1)
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes <= 0.2 * held


def test_a_long_prompt_needs_no_square_of_scores():
    """All scores of 8,192 tokens would take 2.4 GB for one layer's heads."""
    memory, _ = compiled_step(SMOLLM2.make((8192,), 49152), 1, 8192, 8192)
    assert memory.temp_size_in_bytes <= 1.5 * 2**30


def test_a_token_reads_the_blocks_that_are_filled_alone():
    found = instance("llama")
    tokens = tokens_of((2, 4))
    room = 2 * kernel.KEYS + 3
    cache = models.empty_cache(found.model, 2, room)
    unread = jnp.arange(room)[:, None, None] >= kernel.KEYS
    poisoned = jax.tree.map(lambda rows: jnp.where(unread, jnp.nan, rows), cache.runs)
    cache = models.Cache(runs=poisoned, length=cache.length)
    x = models.Decoding(tokens=tokens, cache=cache)
    (logits, _), _ = found.model.apply(found.params, {}, x, train=False)
    np.testing.assert_allclose(logits, forward(found, tokens), atol=1e-5)


def test_experts_of_a_limited_capacity_are_refused():
    options = dataclasses.replace(
        models.LLAMA, experts=models.ExpertsConfig(count=2, capacity_factor=1.0)
    )
    model = models.CausalLmConfig(width=8, heads=2, options=options).make((6,), 11)
    with pytest.raises(core.ConfigError, match="capacity_factor=None"):
        models.empty_cache(model, 1, 4)


def test_tokens_taken_back_leave_no_trace():
    found = instance("llama")
    tokens = tokens_of((2, 5))
    cache = models.empty_cache(found.model, 2, 6)
    _, cache = step(found.params, tokens, cache, model=found.model)
    other = tokens_of((2, 3), seed=1)
    cache = models.Cache(runs=cache.runs, length=jnp.array([1, 3]))
    logits, _ = step(found.params, other, cache, model=found.model)
    for row, kept in enumerate((1, 3)):
        whole = jnp.concatenate([tokens[row, :kept], other[row]])[None]
        np.testing.assert_allclose(
            logits[row], forward(found, whole)[0, kept:], atol=1e-5, rtol=1e-5
        )


def test_logits_of_chosen_places_only():
    found = instance("gpt2")
    tokens = tokens_of((2, 4))
    x = models.Decoding(
        tokens=tokens,
        cache=models.empty_cache(found.model, 2, 4),
        at=jnp.array([[0], [2]]),
    )
    (logits, _), _ = found.model.apply(found.params, {}, x, train=False)
    assert logits.shape == (2, 1, 11)
    expected = forward(found, tokens)[jnp.arange(2), jnp.array([0, 2])]
    np.testing.assert_allclose(logits[:, 0], expected, atol=1e-5)


def test_an_attention_of_ones_own_sees_every_layer_in_order():
    found = instance("llama")

    def count(memory, shared, heads):
        mixed, memory, _ = models.attend_cached(memory, None, heads)
        seen = heads.hidden.mean(), heads.positions
        return mixed, (memory, shared, *seen), shared + 1

    cache = models.empty_cache(found.model, 1, 4)
    x = models.Decoding(
        tokens=tokens_of((1, 4)), cache=cache, shared=jnp.float32(3), attend=count
    )
    (logits, new), _ = found.model.apply(found.params, {}, x, train=False)
    ((kept, shared, hidden, positions),) = new.runs
    assert shared.tolist() == [3, 4]
    assert positions.tolist() == [[[0, 1, 2, 3]]] * 2
    assert kept.keys.shape == cache.runs[0].keys.shape
    np.testing.assert_allclose(logits, forward(found, x.tokens), atol=1e-5)
    # In front of the first block there is nothing but the tokens' vectors.
    words = found.params["embed"]["table"][x.tokens]
    assert hidden[0] == pytest.approx(float(words.mean()), abs=1e-6)
    assert abs(float(hidden[1] - hidden[0])) > 1e-4


def test_positions_beyond_a_learned_table_are_refused():
    found = instance("gpt2")
    with pytest.raises(core.ConfigError, match="6 positions: got size=7"):
        models.empty_cache(found.model, 1, 7)
    with pytest.raises(core.ConfigError, match="at least 1: got batch=0, size=3"):
        models.empty_cache(found.model, 0, 3)
    with pytest.raises(core.ConfigError, match="no causal language model"):
        models.empty_cache(instance("bert").model, 1, 3)


def test_memory_of_another_depth_is_refused():
    found = instance("llama")
    cache = models.empty_cache(found.model, 1, 4, unrolled=True)
    short = models.Cache(runs=cache.runs[:1], length=cache.length)
    x = models.Decoding(tokens=tokens_of((1, 4)), cache=short)
    with pytest.raises(ValueError, match="must be of 2 blocks: got"):
        found.model.apply(found.params, {}, x, train=False)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 4, 9])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_chunked_logits_give_the_same_loss_and_gradients(family, chunk):
    entry = REGISTRY[family]
    whole = instance(family)
    config = dataclasses.replace(entry.config, loss_chunk=chunk)
    model = config.make(entry.inputs, entry.outputs)
    labels = tokens_of(whole.x.shape, seed=2)

    def score(logits, labels):
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    def chunked(params):
        logits, _ = model.apply(params, {}, whole.x, train=True)
        return jnp.mean(logits.each(score, labels))

    def direct(params):
        logits, _ = whole.model.apply(params, {}, whole.x, train=True)
        return jnp.mean(score(logits, labels))

    ours, theirs = (jax.value_and_grad(f)(whole.params) for f in (chunked, direct))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6, rtol=1e-5),
        ours,
        theirs,
    )


def test_chunked_logits_are_never_whole():
    config = models.CausalLmConfig(depth=1, width=8, heads=2, loss_chunk=4)
    model = config.make((256,), 8192)
    params = jax.eval_shape(model.init, jax.random.key(0))[0]

    def loss(params, tokens):
        logits, _ = model.apply(params, {}, tokens, train=True)
        return jnp.sum(logits.each(lambda logits: logits.max(-1)))

    tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)
    compiled = jax.jit(jax.grad(loss)).lower(params, tokens).compile()
    logits = 2 * 256 * 8192 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 2
