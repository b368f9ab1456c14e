"""Speculative decoding of a real model: SmolLM2 and a child with some of its layers.

The child is not trained: without a few of the middle layers it still drafts well enough
for some tokens to be accepted and some not.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from hpcjax import compress, data, inference
from hpcjax.data import catalog
from hpcjax.models import pretrained
from hpcjax.runs import directory
from tests.inference.test_generation import GREEDY, forward

pytestmark = pytest.mark.slow

ROOT = directory.data_root(pathlib.Path(__file__).parents[2])
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "And God said, Let there be",
    "Water boils at",
    "Once upon a time there was a little girl who",
    "import numpy as np\n\ndef",
    "In the beginning was the Word, and the Word was with God, and",
    "The three primary colours are",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The kernel has to be configured before it is",
    "for i in range(10):",
    "A recipe of bread needs flour,",
    "My favourite book is",
    "E = m",
    "Blessed are the poor in spirit: for",
)
# Logits that are closer may change places when they are computed in another shape.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def pair():
    path = catalog.find(ROOT, "smollm2", catalog.SMOLLM2)
    if path is None:
        pytest.skip("smollm2 is not here: hpcjax data fetch smollm2")
    target = pretrained.load(path)
    blocks = compress.prune_layers(target.params["blocks"], compress.keep_ends(30, 26))
    child = child_model(target, 26)
    speaker = inference.LanguageModel(model=target.model, params=target.params)
    small = {**target.params, "blocks": blocks}
    coder = data.gguf_tokenizer(target.metadata)
    prompts = [coder.encode(text) for text in TEXTS]
    return speaker, inference.LanguageModel(model=child, params=small), prompts


def child_model(target, depth):
    config = dataclasses.replace(target.config, depth=depth)
    return config.make((target.context,), target.vocabulary)


def said(made, row=0):
    return np.asarray(made.tokens)[row, : made.lengths[row]].tolist()


def plain(target, prompts, steps, end=()):
    options = inference.Continuation(max_new_tokens=steps, sampler=GREEDY, end=end)
    padded = inference.pad_prompts(prompts)
    return inference.generate(target, padded, options, key=jax.random.key(0))


def speculated(pair, prompts, steps, ahead, end=()):
    options = inference.Continuation(max_new_tokens=steps, sampler=GREEDY, end=end)
    padded = inference.pad_prompts(prompts)
    return inference.speculate(
        pair[0], pair[1], padded, options, ahead=ahead, key=jax.random.key(0)
    )


def excused(target, prompt, expected, found):
    """0 for equal texts, 1 if they part where two words are as likely."""
    if expected == found:
        return 0
    both = zip(expected, found, strict=False)
    place = next((n for n, (a, b) in enumerate(both) if a != b), None)
    assert place is not None, "one text ends before the other"
    before = jnp.asarray([[*prompt, *expected[:place]]])
    logits = forward(target.params, before, model=target.model)[0, -1]
    first, second = np.sort(logits)[-2:][::-1]
    assert first - second < CLOSE, f"token {place}: {expected} and {found}"
    return 1


def compare(pair, prompts, steps, aheads, end=()):
    """Batches of one and of all; how often all drafts and not all were accepted."""
    target, parted, tokens = pair[0], 0, 0
    alone = [said(plain(target, [prompt], steps, end)) for prompt in prompts]
    for ahead in aheads:
        counts = np.zeros(ahead + 1, int)
        for start in range(0, len(prompts), 4):
            rows = range(start, min(start + 4, len(prompts)))
            made = speculated(pair, [prompts[row] for row in rows], steps, ahead, end)
            single = speculated(pair, [prompts[start]], steps, ahead, end)
            counts += np.asarray(made.counts) + np.asarray(single.counts)
            parted += excused(target, prompts[start], alone[start], said(single))
            for place, row in enumerate(rows):
                parted += excused(target, prompts[row], alone[row], said(made, place))
                tokens += len(alone[row])
        assert counts[0] > 0
        assert counts[-1] > 0
    assert parted <= tokens / 500
    return alone


@pytest.mark.acceptance("specdec", 3)
def test_greedy_gives_smollm2s_own_tokens(pair):
    with jax.default_matmul_precision("highest"):
        compare(pair, pair[2][:4], 24, (1, 4))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.acceptance("specdec", 3)
def test_greedy_gives_smollm2s_own_tokens_at_length(pair):
    """Batch 1 for one prompt of four, ragged batches of 4 for all."""
    with jax.default_matmul_precision("highest"):
        alone = compare(pair, pair[2], 64, (1, 2, 4, 8))
        # A token that ends texts in the middle of a block.
        for row in (0, 5, 10):
            end = alone[row][9]
            compare(pair, pair[2][row : row + 4], 64, (4,), (end,))


BATCH, BATCHES, AHEAD = 256, 16, 2


@functools.partial(jax.jit, static_argnames="model")
def chances(params, rows, *, model):
    """Probabilities of what follows each row."""
    logits, _ = model.apply(params, {}, rows, train=False)
    return jax.nn.softmax(logits[:, -1].astype(jnp.float32))


def fit(counts, expected):
    """The p-value of counts; words expected less than ten times are one cell."""
    assert not counts[expected == 0].any()
    common = expected >= 10
    cells = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    assert len(cells) > 1
    return scipy.stats.chisquare(cells, wanted * cells.sum() / wanted.sum()).pvalue


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.acceptance("specdec", 5)
def test_samples_of_smollm2_have_its_probabilities(pair):
    target, draft, prompts = pair
    prompt = prompts[5]
    first = chances(target.params, jnp.asarray([prompt]), model=target.model)[0]
    other = chances(draft.params, jnp.asarray([prompt]), model=draft.model)[0]
    assert 0.2 < float(inference.acceptance_rate(first, other)) < 0.9
    options = inference.Continuation(max_new_tokens=2)
    padded = inference.pad_prompts([prompt] * BATCH, least=1)
    drawn = [
        np.asarray(
            inference.speculate(
                target, draft, padded, options, ahead=AHEAD, key=jax.random.key(number)
            ).tokens
        )
        for number in range(BATCHES)
    ]
    tokens = np.concatenate(drawn)
    size = first.shape[0]
    total = np.bincount(tokens[:, 0], minlength=size)
    assert np.sum(len(tokens) * first >= 10) > 20
    values = [fit(total, len(tokens) * np.asarray(first, np.float64))]
    for word in np.argsort(-total)[:5].tolist():
        rows = jnp.asarray([[*prompt, word]])
        second = np.asarray(chances(target.params, rows, model=target.model)[0])
        own = tokens[tokens[:, 0] == word, 1]
        counts = np.bincount(own, minlength=size)
        values.append(fit(counts, len(own) * second.astype(np.float64)))
    assert min(values) * 6 > 1e-3, values
