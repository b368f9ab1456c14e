"""Speculative sampling: the target's distribution, to within chance, and mutants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from hpcjax import cost, inference

WORDS, AHEAD, PAIRS = 8, 3, 20
# Fixed seeds: these tests come out the same under one version of JAX.
LEVEL = 1e-3 / (2 * PAIRS)


@functools.cache
def tables(number):
    """Two Markov chains: of the target, and of the draft."""
    rng = np.random.default_rng(number)
    target, draft = rng.dirichlet(np.ones(WORDS), (2, WORDS))
    if number < 4:
        draft = target
    elif number < 6:
        target[:, :4], draft[:, 4:] = 0, 0
    elif number < 8:
        target[:, :2] = 0
    return tuple(
        jnp.asarray(each / each.sum(1, keepdims=True), jnp.float32)
        for each in (target, draft)
    )


def drafted(table, first, key, greedy):
    """Tokens that follow `first`, and the rows that they were drawn from."""
    tokens, rows, last = [], [], first
    for place in jax.random.split(key, AHEAD):
        row = table[last]
        drawn = jax.random.categorical(place, jnp.log(row))
        last = jnp.argmax(row, -1) if greedy else drawn
        tokens.append(last)
        rows.append(row)
    return jnp.stack(tokens, 1), jnp.stack(rows, 1)


@functools.partial(jax.jit, static_argnames=("rule", "trials", "greedy", "one_key"))
def stream(target, draft, key, *, rule, trials, greedy=False, one_key=False):
    """The first two tokens behind token 0, and how many the first iteration took."""

    def one(key):
        return trial(target, draft, key, rule, greedy, one_key)

    return jax.vmap(one)(jax.random.split(key, trials))


def trial(target, draft, key, rule, greedy, one_key):
    """One stream, with keys of its own."""
    last = jnp.zeros(1, jnp.int32)
    emitted = []
    for number in range(2):
        own = jax.random.fold_in(key, number)
        drawing, deciding = (own, own) if one_key else jax.random.split(own)
        tokens, q = drafted(draft, last, drawing, greedy)
        p = target[jnp.concatenate([last[:, None], tokens], 1)]
        found = rule(p, q, tokens, deciding)
        first = jnp.where(found.count > 0, tokens[:, 0], found.token)
        # What follows the first token, if this iteration has it.
        second = jnp.where(found.count > 1, tokens[:, 1], found.token)
        emitted.append((first, second, found.count))
        last = first
    (first, second, count), (after, _, _) = emitted
    return first[0], jnp.where(count > 0, second, after)[0], count[0]


def chance(observed, expected):
    """The p-value of counts; 0 where something impossible has happened."""
    if observed[expected == 0].any():
        return 0.0
    few = expected < 5
    merged = [
        np.append(values[~few], values[few].sum()) for values in (observed, expected)
    ]
    keep = merged[1] > 0
    seen, wanted = (values[keep] for values in merged)
    if len(seen) < 2:
        return 1.0
    return stats.chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue


def chances(number, rule, trials, **options):
    """p-values of the first token and of the first two, and the mean taken."""
    target, draft = tables(number)
    key = jax.random.key(1000 + number)
    first, second, count = map(
        np.asarray, stream(target, draft, key, rule=rule, trials=trials, **options)
    )
    row, table = np.asarray(target[0], float), np.asarray(target, float)
    alone = chance(np.bincount(first, minlength=WORDS), trials * row)
    both = np.bincount(WORDS * first + second, minlength=WORDS**2)
    return alone, chance(both, trials * (row[:, None] * table).ravel()), count


@pytest.mark.slow
@pytest.mark.acceptance("specdec", 1)
@pytest.mark.parametrize("number", range(PAIRS))
def test_what_is_emitted_is_distributed_as_the_target(number):
    trials = 200_000
    alone, both, count = chances(number, inference.accept, trials)
    assert min(alone, both) > LEVEL
    target, draft = (np.asarray(each, float) for each in tables(number))
    least = np.minimum(target, draft)
    mean = sum(np.linalg.matrix_power(least, j)[0].sum() for j in range(1, AHEAD + 1))
    error = max(4 * count.std() / np.sqrt(trials), 1e-5)
    assert abs(count.mean() - mean) <= error


@pytest.mark.slow
def test_matching_samples_are_the_targets_too():
    def rule(p, q, tokens, key):
        return inference.accept_matching(p, tokens, key)

    alone, both, count = chances(12, rule, 100_000)
    assert min(alone, both) > LEVEL
    target, draft = (np.asarray(each, float) for each in tables(12))
    met = (target * draft).sum(1)[0]
    assert abs((count > 0).mean() - met) < 4 * np.sqrt(met / 100_000)


def by_hand(p, q, tokens, key, *, residual="above", keys="own"):
    """`accept` written plainly, with room for what is often done wrong."""
    uniform_key, residual_key, bonus_key = jax.random.split(key, 3)
    if keys == "shared":
        bonus_key = residual_key
    elif keys == "reused":
        residual_key = uniform_key
    uniform = jax.random.uniform(uniform_key, tokens.shape)
    asked = jnp.take_along_axis(p[:, :-1], tokens[..., None], 2)[..., 0]
    given = jnp.take_along_axis(q, tokens[..., None], 2)[..., 0]
    taken = uniform * given < asked
    count = jnp.argmin(jnp.pad(taken, ((0, 0), (0, 1))), axis=1)
    place = jnp.minimum(count, AHEAD - 1)[:, None, None]
    at_p, at_q = (jnp.take_along_axis(v, place, 1)[:, 0] for v in (p, q))
    left = {
        "above": jnp.maximum(at_p - at_q, 0),
        "distance": jnp.abs(at_p - at_q),
        "target": at_p,
    }[residual]
    left = jnp.where(left.sum(1, keepdims=True) < 1e-9, at_p, left)
    other = jax.random.categorical(residual_key, jnp.log(left))
    bonus = jax.random.categorical(bonus_key, jnp.log(p[:, -1]))
    return inference.acceptance.Accepted(
        count, jnp.where(count == AHEAD, bonus, other).astype(tokens.dtype)
    )


MUTANTS = {
    "greedy draft": (by_hand, {"greedy": True}),
    "one key": (by_hand, {"one_key": True}),
    "distance": (functools.partial(by_hand, residual="distance"), {}),
    "target": (functools.partial(by_hand, residual="target"), {}),
    "key of the uniforms": (functools.partial(by_hand, keys="reused"), {}),
}


@pytest.mark.slow
@pytest.mark.acceptance("specdec", 2)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name):
    rule, options = MUTANTS[name]
    broken = 0
    with jax.debug_key_reuse(False):
        for number in range(PAIRS):
            broken += chances(number, rule, 100_000, **options)[1] < LEVEL
            if broken == 10:
                return
    pytest.fail(f"only {broken} of {PAIRS} pairs tell")


@pytest.mark.slow
@pytest.mark.acceptance("specdec", 2)
def test_residual_and_bonus_may_share_a_key():
    rule = functools.partial(by_hand, keys="shared")
    with jax.debug_key_reuse(False):
        for number in range(6, PAIRS, 2):
            assert min(chances(number, rule, 100_000)[:2]) > LEVEL


def test_equal_chains_accept_everything_up_to_rounding():
    p = jnp.full((4, 3, 5), 0.2)
    tokens = jnp.zeros((4, 2), jnp.int32)
    found = inference.accept(p, p[:, :-1], tokens, jax.random.key(0))
    assert found.count.tolist() == [2] * 4
    # A residual that is only rounding counts as none.
    close = p.at[:, :, 0].add(-1e-11)
    found = inference.accept(close, p[:, :-1], tokens, jax.random.key(0))
    assert ((found.token >= 0) & (found.token < 5)).all()


def test_without_a_residual_the_token_is_the_targets():
    """The draft's token has no probability in either model."""
    p = jnp.array([[[0.0, 1.0], [1.0, 0.0]]])
    for seed in range(5):
        made = inference.accept(p, p[:, :1], jnp.array([[0]]), jax.random.key(seed))
        assert (made.count.item(), made.token.item()) == (0, 1)


def test_greedy_takes_what_the_target_would_say():
    p = jnp.array([[[0, 2, 1], [3, 3, 0], [0, 0, 5.0]]] * 3)
    tokens = jnp.array([[1, 0], [1, 1], [2, 0]])
    found = inference.accept_greedy(p, tokens)
    assert found.count.tolist() == [2, 1, 0]
    assert found.token.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ((2, 3, 5), (2, 3, 5), "ahead"),
        ((2, 4, 5), (2, 3, 6), "5 and 6 tokens"),
        ((2, 4, 5), (1, 3, 5), "ahead"),
    ],
)
def test_what_does_not_fit_is_refused(p, q, message):
    with pytest.raises(ValueError, match=message):
        inference.accept(
            jnp.ones(p), jnp.ones(q), jnp.zeros((2, 3), jnp.int32), jax.random.key(0)
        )


@pytest.mark.acceptance("specdec", 6)
@pytest.mark.parametrize("rate", [0.3, 0.7, 0.95])
def test_tokens_an_iteration(rate):
    """Of p and q that do not depend on the place, α apart."""
    q = jnp.array([1.0, 0.0]) * jnp.ones((100_000, 4, 2))
    p = jnp.array([rate, 1 - rate]) * jnp.ones((100_000, 5, 2))
    tokens = jnp.zeros((100_000, 4), jnp.int32)
    assert inference.acceptance_rate(p[0, 0], q[0, 0]) == pytest.approx(rate)
    count = np.asarray(inference.accept(p, q, tokens, jax.random.key(7)).count)
    mean = 1 + count.mean()
    assert 1 <= mean <= 5
    assert cost.tokens_per_iteration(rate, 4) == pytest.approx(mean, rel=0.01)
    histogram = np.bincount(count, minlength=5)
    assert cost.tokens_of_counts(histogram) == pytest.approx(mean, rel=1e-12)
