"""BLOOM's checkpoints against numpy, which reads the same file by itself."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from hpcjax import core, inference, models
from hpcjax.models import pretrained
from tests.models.helpers import instance
from tests.oracles.transformer import slope

DEPTH, WIDTH, HEADS, WORDS = 2, 12, 3, 17
# The keys of bloom-560m's file.
KEYS = {
    "model_type": "bloom",
    "n_layer": DEPTH,
    "n_embed": WIDTH,
    "num_attention_heads": HEADS,
    "vocab_size": WORDS,
    "layer_norm_epsilon": 1e-4,
    "apply_residual_connection_post_layernorm": False,
    "n_inner": None,
    "seq_length": 2048,
}
TOKENS = np.random.default_rng(1).integers(0, WORDS, (2, 9)).astype(np.int32)


@pytest.fixture(scope="module")
def tensors():
    """Random tensors with the names and shapes of BLOOM's files."""
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return rng.normal(size=shape, scale=0.4).astype(np.float32)

    def pair(name, *shape):
        return {f"{name}.weight": drawn(*shape), f"{name}.bias": drawn(shape[0])}

    found = {"word_embeddings.weight": drawn(WORDS, WIDTH)}
    found |= pair("word_embeddings_layernorm", WIDTH) | pair("ln_f", WIDTH)
    for layer in range(DEPTH):
        of = f"h.{layer}"
        found |= pair(f"{of}.input_layernorm", WIDTH)
        found |= pair(f"{of}.post_attention_layernorm", WIDTH)
        found |= pair(f"{of}.self_attention.query_key_value", 3 * WIDTH, WIDTH)
        found |= pair(f"{of}.self_attention.dense", WIDTH, WIDTH)
        found |= pair(f"{of}.mlp.dense_h_to_4h", 4 * WIDTH, WIDTH)
        found |= pair(f"{of}.mlp.dense_4h_to_h", WIDTH, 4 * WIDTH)
    return {f"transformer.{name}": value for name, value in found.items()}


def write(folder, tensors, **changes):
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(KEYS | changes))
    return folder


def logits(tensors, tokens):
    """Logits of one sequence, in float64, straight from the file's tensors."""
    own = {
        name.removeprefix("transformer."): value.astype(np.float64)
        for name, value in tensors.items()
    }

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + KEYS["layer_norm_epsilon"])
        return x * own[f"{name}.weight"] + own[f"{name}.bias"]

    def linear(x, name):
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    time, size = len(tokens), WIDTH // HEADS
    x = norm(own["word_embeddings.weight"][tokens], "word_embeddings_layernorm")
    for layer in range(DEPTH):
        of = f"h.{layer}"
        y = norm(x, f"{of}.input_layernorm")
        fused = linear(y, f"{of}.self_attention.query_key_value")
        fused = fused.reshape(time, HEADS, 3, size)
        mixed = np.zeros((time, HEADS, size))
        for head in range(HEADS):
            query, key, value = fused[:, head].swapaxes(0, 1)
            for i in range(time):
                scores = [
                    query[i] @ key[j] / math.sqrt(size) - slope(head, HEADS) * (i - j)
                    for j in range(i + 1)
                ]
                weights = np.exp(scores)
                mixed[i, head] = weights / weights.sum() @ value[: i + 1]
        x = x + linear(mixed.reshape(time, WIDTH), f"{of}.self_attention.dense")
        y = norm(x, f"{of}.post_attention_layernorm")
        up = linear(y, f"{of}.mlp.dense_h_to_4h")
        up = up / 2 * (1 + np.tanh(0.79788456 * up * (1 + 0.044715 * up**2)))
        x = x + linear(up, f"{of}.mlp.dense_4h_to_h")
    return norm(x, "ln_f") @ own["word_embeddings.weight"].T


def test_logits_equal_numpy(tensors, tmp_path):
    loaded = pretrained.load(write(tmp_path, tensors))
    assert (loaded.family, loaded.context, loaded.vocabulary) == ("bloom", 2048, WORDS)
    found, _ = loaded.model.apply(loaded.params, {}, jnp.asarray(TOKENS), train=False)
    expected = np.stack([logits(tensors, row) for row in TOKENS])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_what_is_saved_are_the_tensors_that_were_loaded(tensors, tmp_path):
    (tmp_path / "old").mkdir()
    # The published files lack the prefix.
    bare = {name.removeprefix("transformer."): each for name, each in tensors.items()}
    loaded = pretrained.load(write(tmp_path / "old", bare))
    pretrained.save(tmp_path / "new", loaded)
    written = safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
    assert pretrained.load(tmp_path / "new").config == loaded.config


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"apply_residual_connection_post_layernorm": True},
            core.UnsupportedOp,
            "apply_residual_connection_post_layernorm=False is implemented: got True",
        ),
        ({"n_inner": 20}, core.UnsupportedOp, "n_inner=None or 48 .*: got 20"),
        ({"n_layer": None}, core.DataFormatError, "as 'n_layer', found None"),
        ({"n_layer": 1}, core.DataFormatError, r"unexpected \['h.1.input_layernorm"),
    ],
)
def test_what_is_no_such_model_is_refused(tensors, tmp_path, changes, error, words):
    with pytest.raises(error, match=words):
        pretrained.load(write(tmp_path, tensors, **changes))


def test_a_model_without_some_of_its_heads_is_refused():
    """Slopes belong to heads: those that are left would have other ones."""
    with pytest.raises(core.ConfigError, match="alibi has a slope for each"):
        models.CausalLmConfig(width=12, heads=2, head_dim=4, options=models.BLOOM)


def test_methods_that_compute_scores_of_their_own_refuse_slopes():
    found = instance("bloom")
    speaker = inference.LanguageModel(model=found.model, params=found.params)
    tokens = jnp.zeros((1, 6), jnp.int32)
    with pytest.raises(core.UnsupportedOp, match="clustered heads have no linear"):
        inference.clustered_losses(
            speaker,
            tokens,
            inference.ChaiPlan((2, 2)),
            inference.Clustering(window=3),
            key=jax.random.key(0),
        )
    with pytest.raises(core.UnsupportedOp, match="pruned tokens have no linear"):
        inference.cascading_losses(
            speaker, tokens, heads=(1.0, 1.0), tokens_kept=(1.0, 1.0), window=3
        )
