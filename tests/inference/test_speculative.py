"""Speculative decoding against decoding without a draft, and against probabilities."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import core, cost, inference, models
from tests.inference.test_generation import GREEDY, plain, speaker
from tests.models.helpers import Instance, instance, noisy

PROMPTS = ([1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 3])


@functools.cache
def other(depth=1, seed=5, vocabulary=11):
    """A draft: fewer layers, other parameters, the same vocabulary."""
    config = models.CausalLmConfig(depth=depth, width=8, heads=2, options=models.LLAMA)
    model = config.make((6,), vocabulary)
    params, _ = model.init(jax.random.key(seed))
    return Instance(model, noisy(params, seed=seed), {}, None, None)


@functools.cache
def lively(mixed=0.0):
    """A target whose likeliest texts do not repeat themselves, or near it a draft.

    Of a draft with `mixed` = 0.1 each number of tokens is accepted at times.
    """
    config = models.CausalLmConfig(width=16, heads=2, options=models.LLAMA)
    model = config.make((64,), 11)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    first, second = np.random.default_rng(0), np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(
            (1 - mixed) * first.normal(size=leaf.shape)
            + mixed * second.normal(size=leaf.shape),
            jnp.float32,
        ),
        shapes,
    )
    return Instance(model, params, {}, None, None)


def run(target, draft, prompts, ahead, steps, *, key=0, sampler=GREEDY, **more):
    options = {name: more.pop(name) for name in ("end", "unrolled") if name in more}
    return inference.speculate(
        speaker(target),
        speaker(draft),
        inference.pad_prompts(prompts, least=8),
        inference.Continuation(max_new_tokens=steps, sampler=sampler, **options),
        ahead=ahead,
        key=jax.random.key(key),
        **more,
    )


@pytest.mark.quick("2-False")
@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 4, 8])
def test_greedy_gives_the_targets_own_tokens(ahead, unrolled):
    target = lively()
    steps = 12
    made = run(target, lively(0.1), PROMPTS, ahead, steps, unrolled=unrolled)
    expected = [plain(target, prompt, steps) for prompt in PROMPTS]
    assert made.tokens.tolist() == expected
    assert made.lengths.tolist() == [steps] * len(PROMPTS)
    emitted = cost.tokens_of_counts(np.asarray(made.counts))
    assert 1 < emitted < ahead + 1
    assert made.counts.sum() == made.iterations.sum()


@pytest.mark.quick("3")
@pytest.mark.parametrize("place", [0, 3, 6])
def test_an_end_inside_a_block_ends_the_text_there(place):
    target = lively()
    whole = plain(target, PROMPTS[0], 12)
    end = whole[place]
    expected = whole[: whole.index(end) + 1]
    other = next(token for token in range(11) if token not in whole)
    # The target drafts for itself: every block is accepted whole, and cut.
    made = run(target, target, PROMPTS, 4, 12, end=(other, end))
    count = int(made.lengths[0])
    assert made.tokens[0, :count].tolist() == expected
    assert not np.any(made.tokens[0, count:])
    for row, prompt in enumerate(PROMPTS[1:], 1):
        own = plain(target, prompt, 12)
        stops = [at for at, token in enumerate(own) if token in (other, end)]
        own = own[: stops[0] + 1] if stops else own
        assert made.tokens[row, : made.lengths[row]].tolist() == own


@pytest.mark.slow
@pytest.mark.acceptance("specdec", 4)
@pytest.mark.parametrize("ahead", [1, 2, 3, 5])
def test_a_target_that_drafts_for_itself_accepts_everything(ahead):
    target = lively()
    steps = 13
    made = run(target, target, PROMPTS, ahead, steps)
    assert made.counts[:-1].tolist() == [0] * ahead
    assert made.iterations.tolist() == [math.ceil(steps / (ahead + 1))] * 4
    sampled = run(
        target, target, [[1, 2, 3]] * 64, ahead, 64, sampler=inference.Sampler()
    )
    # p and q differ by rounding, since their passes have different shapes.
    counts = np.asarray(sampled.counts)
    tokens = np.sum(counts * np.arange(1, ahead + 2))
    assert counts[:-1].sum() <= tokens / 1000


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "matching"])
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("top_k", [None, 4])
def test_sampled_texts_are_distributed_as_the_targets(rule, ahead, top_k):
    target, draft = instance("llama"), other()
    sampler = inference.Sampler(temperature=0.8, top_k=top_k)
    batch = 6000
    made = run(target, draft, [[1, 2, 3]] * batch, ahead, 3, sampler=sampler, rule=rule)

    def chances(rows):
        logits, _ = target.model.apply(target.params, {}, jnp.array(rows), train=False)
        return np.asarray(inference.probabilities(logits[:, -1], sampler))

    first = chances([[1, 2, 3]])[0]
    second = chances([[1, 2, 3, word] for word in range(11)])
    third = chances(
        [[1, 2, 3, one, two] for one in range(11) for two in range(11)]
    ).reshape(11, 11, 11)
    joint = first[:, None, None] * second[:, :, None] * third
    # Iterations must end within the three tokens, or only one rule were looked at.
    assert made.counts[0] > batch / 10
    assert made.counts[1:].sum() > batch / 10
    for axes, columns in (((2,), (0, 1)), ((0,), (1, 2))):
        expected = batch * joint.sum(axes)
        counts = np.zeros((11, 11))
        np.add.at(counts, tuple(np.asarray(made.tokens)[:, columns].T), 1)
        assert not counts[expected == 0].any()
        common = expected >= 5
        rest = counts[~common].sum() - expected[~common].sum()
        chi2 = np.sum((counts - expected)[common] ** 2 / expected[common])
        chi2 += rest**2 / max(expected[~common].sum(), 1)
        cells = common.sum()
        assert cells > 10
        assert chi2 < cells + 4 * math.sqrt(2 * cells)


@pytest.mark.slow
@pytest.mark.acceptance("specdec", 6)
def test_tokens_of_an_iteration_are_those_of_the_counts():
    target, draft = instance("llama"), other()
    made = run(target, draft, [[1, 2, 3]] * 32, 3, 25, sampler=inference.Sampler())
    counts = np.asarray(made.counts)
    # The last iteration of a text may be cut: what it would have emitted counts.
    iterations = int(np.sum(made.iterations))
    whole = float(np.sum(counts * np.arange(1, 5)) / iterations)
    assert cost.tokens_of_counts(counts) == pytest.approx(whole, rel=1e-12)
    emitted = int(np.sum(made.lengths)) / iterations
    assert 0 <= whole - emitted <= 3 * 32 / iterations


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_replay_counts_what_speculation_accepts(ahead):
    """One text after the other; the last iteration of each may be cut."""
    target, draft, steps = lively(), lively(0.1), 30
    seen = np.zeros(ahead + 1)
    for prompt in PROMPTS:
        made = run(target, draft, [prompt], ahead, steps)
        text = np.concatenate([prompt, made.tokens[0]])[None]
        found = inference.replay(
            speaker(draft), jnp.asarray(text), start=len(prompt), ahead=ahead
        )
        assert found.sum() == made.iterations[0]
        assert np.abs(found - np.asarray(made.counts)).sum() <= 2
        seen += found
    assert seen.all()
    for wrong in ({"start": 0}, {"start": text.shape[1]}, {"ahead": 0}):
        with pytest.raises(core.ConfigError):
            inference.replay(
                speaker(draft), jnp.asarray(text), **({"start": 1, "ahead": 1} | wrong)
            )


@pytest.mark.slow
def test_forced_acceptance_follows_its_table():
    target, draft = instance("llama"), other()
    table = np.random.default_rng(0).random((4, 20, 3)) < 0.7
    made = run(target, draft, PROMPTS, 3, 30, forced=jnp.asarray(table))
    leading = np.cumprod(table, axis=2).sum(2)
    for row in range(4):
        told = np.cumsum(leading[row] + 1)
        assert made.iterations[row] == np.searchsorted(told, 30) + 1
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(
            made.tokens, run(target, draft, PROMPTS, 3, 30).tokens
        )


def primitives(jaxpr):
    """Names of all primitives, also those of programs inside others."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves(list(equation.params.values())):
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                yield from primitives(inside)


@pytest.mark.quick("greedy")
@pytest.mark.acceptance("specdec", 7)
@pytest.mark.parametrize("rule", ["rejection", "greedy"])
def test_one_program_without_work_on_the_host(compilations, rule):
    target, draft = instance("llama"), other()
    sampler = GREEDY if rule == "greedy" else inference.Sampler(top_p=0.9)
    options = inference.Continuation(max_new_tokens=6, sampler=sampler)

    def call(prompts, key):
        return inference.speculate(
            speaker(target), speaker(draft), prompts, options, ahead=2, key=key
        )

    prompts = [
        inference.pad_prompts([prompt], least=8) for prompt in ([1, 2, 3], [4], [5] * 7)
    ]
    keys = [jax.random.key(number) for number in range(3)]
    call(prompts[0], keys[0])
    compilations.clear()
    for given, key in zip(prompts[1:], keys[1:], strict=True):
        call(given, key)
    assert not compilations
    from hpcjax.inference import speculative

    arguments = speaker(target), speaker(draft), prompts[0], keys[0], None
    static = {"ahead": 2, "options": options, "rule": rule}
    with jax.transfer_guard("disallow"):
        made = call(prompts[0], keys[0])
    jaxpr = jax.make_jaxpr(functools.partial(speculative._speculate, **static))(
        *arguments
    )
    found = list(primitives(jaxpr.jaxpr))
    assert found.count("while") == 1
    assert not [name for name in found if "callback" in name]
    assert made.tokens.shape == (1, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft": lambda: other(vocabulary=7)}, "got 11 and 7 tokens"),
        ({"ahead": 0}, "ahead=0"),
        ({"rule": "greedy", "sampler": inference.Sampler()}, "temperature=1.0"),
        ({"rule": "rejection"}, "temperature=0.0"),
        ({"draft": lambda: instance("gpt2")}, "6 positions: got a prompt of 5 and .*2"),
        ({"forced": jnp.ones((4, 5, 3), bool)}, r"forced must be \[4, iterations, 2\]"),
        ({"forced": jnp.ones((4, 0, 2), bool)}, r"shape=\(4, 0, 2\)"),
    ],
)
def test_what_cannot_be_done_is_refused(change, message):
    draft = change.pop("draft", other)()
    ahead = change.pop("ahead", 2)
    with pytest.raises(core.ConfigError, match=message):
        run(instance("llama"), draft, PROMPTS, ahead, 4, **change)
