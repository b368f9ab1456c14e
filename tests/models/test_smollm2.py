"""SmolLM2 as a package ships it, against numpy."""

import pathlib

import jax
import numpy as np
import pytest

from hpcjax import data, inference, models
from hpcjax.inference import load_language_model
from hpcjax.runs import directory
from tests.oracles import transformer

ROOT = directory.data_root(pathlib.Path(__file__).parents[2])
pytestmark = pytest.mark.slow


def forward(loaded, tokens):
    """Logits of one text in numpy, from the parameters as they were stored."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), loaded.params)
    config, options = loaded.config, loaded.config.options
    x = params["embed"]["table"][tokens]
    past = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(config.depth):
        own = jax.tree.map(lambda leaf, at=layer: leaf[at], params["blocks"])
        x = transformer.layer(x, own, config, options, past)
    x = transformer.norm(x, params["final_norm"], options.norm_eps)
    return x @ params["embed"]["table"].T


@pytest.mark.acceptance("lm-models", 3)
def test_smollm2_equals_numpy_and_writes_the_same():
    data.fetch("smollm2", ROOT)
    data.fetch("kjv", ROOT)
    loaded, tokenizer, *_ = load_language_model("smollm2", ROOT)
    (held_out,) = data.read_parts(ROOT, "kjv", "validation")
    tokens = tokenizer.encode("\n".join(held_out))[:256]
    logits = forward(loaded, tokens)
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -chances[np.arange(255), tokens[1:]]
    speaker = inference.LanguageModel(model=loaded.model, params=loaded.params)
    losses = inference.token_losses(speaker, tokens[None])
    assert abs(float(np.mean(losses)) - expected.mean()) < 1e-4
    np.testing.assert_allclose(losses[0], expected, atol=2e-3)
    prompt = tokens[:24]
    made = inference.generate(
        speaker,
        inference.pad_prompts([prompt]),
        inference.Continuation(
            max_new_tokens=32, sampler=inference.Sampler(temperature=0.0)
        ),
        key=jax.random.key(0),
    )
    # If each token is the likeliest behind those before it, so is the whole text.
    text = np.concatenate([prompt, made.tokens[0]])
    likeliest = np.argmax(forward(loaded, text), axis=-1)
    np.testing.assert_array_equal(likeliest[23:-1], text[24:])
    assert models.num_params(loaded.model) == 134_515_008
