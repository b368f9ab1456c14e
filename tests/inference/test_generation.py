"""Generation against a loop that runs the whole sequence for every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, inference
from tests.models.helpers import instance

GREEDY = inference.Sampler(temperature=0.0)


def speaker(found):
    return inference.LanguageModel(model=found.model, params=found.params)


@functools.partial(jax.jit, static_argnames="model")
def forward(params, tokens, *, model):
    return model.apply(params, {}, tokens, train=False)[0]


def plain(found, prompt, steps):
    """The most likely continuation, without a cache.

    Every pass is over a row of one length: what comes behind a token changes nothing.
    """
    context = found.model.decoder.context
    row = np.zeros((1, context or 32), np.int32)
    row[0, : len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + steps):
        logits = forward(found.params, row, model=found.model)
        word = np.argmax(logits[0, place - 1])
        if place == row.shape[1]:
            return [*row[0, len(prompt) :].tolist(), int(word)]
        row[0, place] = word
    return row[0, len(prompt) : len(prompt) + steps].tolist()


@pytest.mark.quick("llama-True")
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("family", ["llama", "opt_350m"])
def test_greedy_generation_of_a_ragged_batch(family, unrolled):
    found = instance(family)
    given = [[1, 2, 3], [4], [5, 6]]
    steps = 3
    expected = [plain(found, prompt, steps) for prompt in given]
    prompts = inference.pad_prompts(given, least=1)
    made = inference.generate(
        speaker(found),
        prompts._replace(tokens=prompts.tokens[:, :3]),
        inference.Continuation(max_new_tokens=steps, sampler=GREEDY, unrolled=unrolled),
        key=jax.random.key(0),
    )
    assert made.tokens.tolist() == expected
    assert made.lengths.tolist() == [steps] * 3


def test_the_end_token_ends_a_text_and_is_counted():
    found = instance("llama")
    prompt = [1, 2, 3]
    whole = plain(found, prompt, 6)
    expected = whole[: whole.index(whole[2]) + 1]
    # Of several, the first that comes ends it; another one never comes.
    other = next(token for token in range(11) if token not in whole)
    made = inference.generate(
        speaker(found),
        inference.pad_prompts([prompt, [4]]),
        inference.Continuation(max_new_tokens=6, sampler=GREEDY, end=(other, whole[2])),
        key=jax.random.key(0),
    )
    count = int(made.lengths[0])
    assert made.tokens[0, :count].tolist() == expected
    assert not np.any(made.tokens[0, count:])


@pytest.mark.slow
def test_draws_follow_the_models_probabilities():
    found = instance("llama")
    batch = 4000
    made = inference.generate(
        speaker(found),
        inference.pad_prompts([[1, 2, 3]] * batch),
        inference.Continuation(max_new_tokens=2),
        key=jax.random.key(1),
    )
    x = jnp.array([[1, 2, 3]])
    logits, _ = found.model.apply(found.params, {}, x, train=False)
    first = jax.nn.softmax(logits[0, -1])
    x = jnp.array([[1, 2, 3, word] for word in range(11)])
    logits, _ = found.model.apply(found.params, {}, x, train=False)
    joint = np.asarray(first[:, None] * jax.nn.softmax(logits[:, -1]))
    counts = np.zeros((11, 11))
    np.add.at(counts, tuple(np.asarray(made.tokens).T), 1)
    expected = batch * joint
    rare = expected < 5
    chi2 = np.sum((counts - expected)[~rare] ** 2 / expected[~rare])
    cells = np.sum(~rare)
    assert cells > 60
    assert chi2 < cells + 4 * np.sqrt(2 * cells)


def test_one_compilation_for_prompts_of_a_bucket(compilations):
    found = instance("llama")
    for number, prompt in enumerate(([1, 2, 3], [1, 2, 3, 4, 5], [7])):
        inference.generate(
            speaker(found),
            inference.pad_prompts([prompt], least=8),
            inference.Continuation(max_new_tokens=4),
            key=jax.random.key(number),
        )
        if number == 0:
            compilations.clear()
    assert not compilations


def test_what_fills_a_prompt_up_does_not_count():
    """Nor does it take positions: the model has 6, the row 8."""
    found = instance("gpt2")
    rows = np.array([[1, 2, 3, 4, 99, -1, -1, 7], [5, -7, 0, 0, 0, 0, 0, 0]])
    made = inference.generate(
        speaker(found),
        inference.Prompts(jnp.asarray(rows), jnp.array([4, 1])),
        inference.Continuation(max_new_tokens=2, sampler=GREEDY),
        key=jax.random.key(0),
    )
    assert made.tokens[0].tolist() == plain(found, [1, 2, 3, 4], 2)
    assert made.tokens[1].tolist() == plain(found, [5], 2)


@pytest.mark.parametrize(
    ("prompts", "lengths", "options", "message"),
    [
        ([[1, 2]], [3], {}, r"lengths must be in 1 … 2: got \[3\]"),
        ([[1, 2]], [0], {}, r"lengths must be in 1 … 2: got \[0\]"),
        ([[1, 2]], [1, 1], {}, r"got \(1, 2\) and \(2,\)"),
        ([[1, 2]], [1], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1, 2]], [2], {"max_new_tokens": 5}, "6 positions: got a prompt of 2 and "),
        ([[1, 11]], [2], {}, "tokens must be in 0 … 10: got 1 … 11"),
        ([[-1, 2]], [2], {}, "tokens must be in 0 … 10: got -1 … 2"),
        ([[1, 2]], [2], {"end": (3, 11)}, r"end must be in 0 … 10: got end=\(3, 11\)"),
    ],
)
def test_what_cannot_be_continued_is_refused(prompts, lengths, options, message):
    found = instance("gpt2")
    with pytest.raises(core.ConfigError, match=message):
        inference.generate(
            speaker(found),
            inference.Prompts(jnp.array(prompts), jnp.array(lengths)),
            inference.Continuation(**({"max_new_tokens": 1} | options)),
            key=jax.random.key(0),
        )


def test_prompts_need_tokens_and_the_model_must_be_a_language_model():
    with pytest.raises(core.ConfigError, match=r"got lengths \[1, 0\]"):
        inference.pad_prompts([[1], []])
    with pytest.raises(core.ConfigError, match=r"got lengths \[\]"):
        inference.pad_prompts([])
    found = instance("mlp")
    with pytest.raises(core.ConfigError, match="no causal language model"):
        inference.generate(
            speaker(found), inference.pad_prompts([[1]]), key=jax.random.key(0)
        )
