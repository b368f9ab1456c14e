"""Perplexity and multiple choice, against sums by hand over a known model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import inference, models
from hpcjax.core import ConfigError

# −log p(next | token), a model that knows nothing but the last token.
TABLE = np.random.default_rng(1).random((7, 7))
CONTEXT = [1, 2, 3]
ENDINGS = [[4], [5, 6, 2, 0], [0, 3]]


def losses(rows):
    return TABLE[rows[:, :-1], rows[:, 1:]]


def sums(context, endings):
    found = []
    for ending in endings:
        last, total = context[-1], 0.0
        for token in ending:
            total, last = total + TABLE[last, token], token
        found.append(total)
    return np.array(found)


def test_the_likeliest_ending_answers():
    each = sums(CONTEXT, ENDINGS)
    mean = each / [1, 4, 2]
    assert np.argmin(each) != np.argmin(mean), "else one rule would do for both"
    for true in range(3):
        found = inference.answer_choices(losses, [(CONTEXT, ENDINGS, true)], time=8)
        assert found == (true == np.argmin(each), true == np.argmin(mean), 1)


def test_of_a_long_context_the_end_is_left():
    rng = np.random.default_rng(1)
    questions = [
        (rng.integers(0, 7, 20).tolist(), ENDINGS, number % 3) for number in range(9)
    ]
    found = inference.answer_choices(losses, questions, time=5)
    right = [
        np.argmin(sums(context, ENDINGS)) == true for context, _, true in questions
    ]
    assert found.accuracy == np.mean(right)
    assert found.count == 9


@pytest.mark.parametrize(
    "question",
    [
        ([], ENDINGS, 0),
        (CONTEXT, [], 0),
        (CONTEXT, [[1], []], 0),
        (CONTEXT, [[1] * 8], 0),
        (CONTEXT, ENDINGS, 3),
        (CONTEXT, ENDINGS, -1),
    ],
)
def test_what_is_no_question_is_refused(question):
    with pytest.raises(ConfigError, match="question"):
        inference.answer_choices(losses, [question], time=8)
    with pytest.raises(ConfigError, match="no questions"):
        inference.answer_choices(losses, [], time=8)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_perplexity_of_windows(batch):
    tokens = np.random.default_rng(2).integers(0, 7, 17)
    found = inference.perplexity(losses, tokens, window=5, batch=batch)
    means = [
        np.mean([TABLE[tokens[at + k], tokens[at + k + 1]] for k in range(4)])
        for at in (0, 5, 10)
    ]
    assert found.loss == pytest.approx(np.mean(means), rel=1e-12)
    assert found.perplexity == pytest.approx(np.exp(np.mean(means)), rel=1e-12)
    assert (found.windows, found.left) == (3, 2)
    for wrong in (1, 18):
        with pytest.raises(ConfigError, match=f"window={wrong}"):
            inference.perplexity(losses, tokens, window=wrong)


@pytest.mark.parametrize("chunk", [None, 3])
def test_losses_of_a_model_are_those_of_its_logits(chunk):
    config = models.CausalLmConfig(width=8, heads=2, options=models.LLAMA)
    plain = config.make((6,), 11)
    own = dataclasses.replace(config, loss_chunk=chunk).make((6,), 11)
    params, _ = plain.init(jax.random.key(0))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 6)))
    logits = np.asarray(plain.apply(params, {}, tokens, train=False)[0], np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    bound = functools.partial(
        inference.token_losses, inference.LanguageModel(params=params, model=own)
    )
    np.testing.assert_allclose(bound(tokens), expected, atol=1e-5)


def test_a_model_without_numbers_answers_nothing():
    def lost(rows):
        return np.full((len(rows), 7), np.nan)

    questions = [(CONTEXT, ENDINGS, 0)]  # the first is where the NaN is
    found = inference.answer_choices(lost, questions, time=8)
    assert np.isnan([found.accuracy, found.normalized]).all()
    assert found.count == 1
