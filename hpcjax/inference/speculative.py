"""Speculative decoding: a small model drafts tokens, a large one verifies them.

References:
  Leviathan, Kalman and Matias, ICML 2023; Yan, Agarwal and Venkataraman, Decoding
  Speculative Decoding, NAACL 2025.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from hpcjax import models
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.keys import derive
from hpcjax.inference import acceptance
from hpcjax.inference.acceptance import Accepted
from hpcjax.inference.config import Continuation, Sampler
from hpcjax.inference.generation import (
    LanguageModel,
    Prompts,
    cache_for,
    find_ends,
    prefill,
    prepare_prompts,
    truncate_cache,
)
from hpcjax.inference.sampling import next_token, probabilities

Rule = Literal["rejection", "greedy", "matching"]
RULES: tuple[Rule, ...] = ("rejection", "greedy", "matching")


class Speculated(NamedTuple):
    """Continuations of prompts, with statistics of acceptance.

    Attributes:
      tokens: the new tokens, `[batch, max_new_tokens]`, padded with 0.
      lengths: number of new tokens without the padding, the end token included.
      iterations: of each sequence until its end.
      counts: how many iterations of all sequences accepted 0, 1, … γ draft tokens,
        before an end token or `max_new_tokens` cut them.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]
    iterations: Int[Array, " batch"]
    counts: Int[Array, " ahead_and_1"]


class _Carry(NamedTuple):
    """The state between iterations.

    Attributes:
      step: number of the iteration.
      tokens: prompts and new tokens, `[batch, size]`.
      known: number of tokens of each sequence so far.
      target: the target's cache, of all known tokens but the last.
      draft: the draft's cache.
      done: which sequences have ended.
      iterations: see `Speculated`.
      counts: see `Speculated`.
    """

    step: jax.Array
    tokens: jax.Array
    known: jax.Array
    target: models.Cache
    draft: models.Cache
    done: jax.Array
    iterations: jax.Array
    counts: jax.Array


def speculate(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Prompts,
    options: Continuation | None = None,
    *,
    ahead: int,
    key: jax.Array,
    rule: Rule | None = None,
    forced: Bool[Array, "batch iterations ahead"] | None = None,
) -> Speculated:
    """Continues prompts as `generate` does, with the help of a draft model.

    In an iteration, the draft model adds γ tokens one by one, and the target model
    reads them in one pass. The acceptance rule keeps some of them and adds a token, so
    that the result is distributed as the target's own tokens, see `accept`. Rejected
    tokens are removed from the caches by a smaller length.

    Args:
      target: the model whose continuations are wanted.
      draft: a cheaper model with the same vocabulary.
      prompts: see `pad_prompts`.
      options: how many tokens, and how both models draw them; None for the defaults.
      ahead: γ, at least 1.
      key: of the draws.
      rule: "rejection" for `accept`, "matching" for `accept_matching`, "greedy" for
        `accept_greedy`, which is the only one at temperature 0. None takes "greedy" or
        "rejection", depending on the temperature.
      forced: for measurements only: whether each draft token counts as accepted,
        instead of the rule's answer. All other work is done as usual. In iterations
        behind the array's, all are rejected.

    Raises:
      ConfigError: different vocabularies, a rule that does not fit the temperature, a
        `forced` of another shape, and whatever `generate` raises.
    """
    options = options or Continuation()
    rule = _choose_rule(rule, options.sampler)
    sizes = [models.decoder_of(one.model).vocabulary for one in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "target and draft must have one vocabulary: got "
            f"{sizes[0]} and {sizes[1]} tokens"
        )
    if ahead < 1:
        raise ConfigError(f"ahead must be at least 1: got ahead={ahead}")
    for one in (target, draft):
        prompts = prepare_prompts(one, prompts, options, ahead=ahead)
    if forced is not None:
        batch, shape = len(prompts.tokens), forced.shape
        good = len(shape) == 3 and shape[::2] == (batch, ahead) and shape[1] > 0
        must = f"forced must be [{batch}, iterations, {ahead}], at least one iteration"
        checks.require(good and forced.dtype == bool, must, shape=shape)
    return _speculate(
        target, draft, prompts, key, forced, ahead=ahead, options=options, rule=rule
    )


def _choose_rule(rule: Rule | None, sampler: Sampler) -> Rule:
    chosen = rule or ("greedy" if sampler.greedy else "rejection")
    if chosen not in RULES:
        raise ConfigError(f"unknown rule: got {rule!r}{nearest(chosen, RULES)}")
    if (chosen == "greedy") != sampler.greedy:
        raise ConfigError(
            "the rule 'greedy' goes with temperature 0, and only it: got "
            f"rule={chosen!r}, temperature={sampler.temperature}"
        )
    return chosen


@functools.partial(jax.jit, static_argnames=("ahead", "options", "rule"))
def _speculate(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Prompts,
    key: jax.Array,
    forced: jax.Array | None,
    *,
    ahead: int,
    options: Continuation,
    rule: Rule,
) -> Speculated:
    lengths, sampler, end = prompts.lengths, options.sampler, options.end
    steps = options.max_new_tokens

    def more(carry: _Carry) -> jax.Array:
        return ~jnp.all(carry.done)

    def iterate(carry: _Carry) -> _Carry:
        # Acceptance must be independent of the draft's draws, hence two keys.
        drawing, judging = (derive(key, name, carry.step) for name in ("draw", "judge"))
        drafted, q, draft_cache = _draft(
            draft, carry, ahead=ahead, sampler=sampler, key=drawing
        )
        logits, target_cache = _verify(target, carry, drafted)
        accepted = _judge(logits, q, drafted, sampler, rule, judging)
        if forced is not None:
            accepted = _force_counts(forced, carry.step, accepted)
        emitted = _join_token(accepted, drafted)
        tokens, known, ended = _append_tokens(
            carry, emitted, accepted.count + 1, lengths + steps, end
        )
        running = ~carry.done
        # The target has not read the last known token, which it drew itself. The
        # draft's next iteration reads the last two again, see `_draft`.
        return _Carry(
            carry.step + 1,
            tokens,
            known,
            truncate_cache(target_cache, known - 1),
            truncate_cache(draft_cache, known),
            carry.done | ended,
            carry.iterations + running,
            carry.counts.at[accepted.count].add(running.astype(jnp.int32)),
        )

    carry = jax.lax.while_loop(
        more, iterate, _start(target, draft, prompts, ahead, options)
    )
    new_lengths = carry.known - lengths
    tokens = _cut_continuations(carry.tokens, lengths, new_lengths, steps)
    return Speculated(tokens, new_lengths, carry.iterations, carry.counts)


def _start(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Prompts,
    ahead: int,
    options: Continuation,
) -> _Carry:
    """Returns the first iteration's state: both models have read the prompts."""
    batch, time = prompts.tokens.shape
    # An iteration may read γ tokens beyond the last one that is kept.
    size = time + options.max_new_tokens + ahead

    def read(one: LanguageModel) -> models.Cache:
        cache = cache_for(one, batch, size, options)
        return prefill(one, cache, prompts)[1]

    return _Carry(
        jnp.int32(0),
        jnp.pad(prompts.tokens, ((0, 0), (0, size - time))),
        prompts.lengths,
        read(target),
        read(draft),
        jnp.zeros(batch, bool),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(ahead + 1, jnp.int32),
    )


def _draft(
    draft: LanguageModel, carry: _Carry, *, ahead: int, sampler: Sampler, key: jax.Array
) -> tuple[jax.Array, jax.Array | None, models.Cache]:
    """Drafts γ tokens.

    Returns:
      The tokens `[batch, γ]`, the probabilities `[batch, γ, vocabulary]` from which
      they were drawn (None if greedy), and the cache.
    """
    # The first step reads the last two known tokens, n - 2 and n - 1. The last draft
    # token of an iteration is drawn but not read: if it was accepted, it is token n - 2
    # now, and not in the cache. Otherwise reading it again changes nothing. A text of
    # one token has no other: then tokens 0 and 1 are read, and the logits are those at
    # token 0. The cache is truncated to n tokens in either case.
    start = jnp.maximum(carry.known - 2, 0)
    two = jnp.take_along_axis(carry.tokens, start[:, None] + jnp.arange(2), axis=1)
    x = models.Decoding(
        tokens=two,
        cache=truncate_cache(carry.draft, start),
        at=(carry.known - 1 - start)[:, None],
    )

    def read(x: models.Decoding) -> tuple[jax.Array, models.Cache]:
        logits, cache = draft.decode(x)
        return logits[:, -1], cache

    def draw(logits: jax.Array, number: jax.Array) -> tuple[jax.Array, Any]:
        own = derive(key, "token", number)
        if sampler.greedy:
            return next_token(logits, sampler, own), None
        q = probabilities(logits, sampler)
        return jax.random.categorical(own, jnp.log(q)).astype(two.dtype), q

    logits, cache = read(x)
    first, q_first = draw(logits, jnp.int32(0))

    def one(carried: tuple, number: jax.Array) -> tuple[tuple, tuple]:
        token, cache = carried
        logits, cache = read(models.Decoding(tokens=token[:, None], cache=cache))
        drawn = draw(logits, number)
        return (drawn[0], cache), drawn

    numbers = jnp.arange(1, ahead)
    (_, cache), (others, q_others) = jax.lax.scan(
        one, (first, truncate_cache(cache, carry.known)), numbers
    )
    tokens = jnp.concatenate([first[None], others]).T
    if q_first is None:
        return tokens, None, cache
    return tokens, jnp.moveaxis(jnp.concatenate([q_first[None], q_others]), 0, 1), cache


def _verify(
    target: LanguageModel, carry: _Carry, drafted: jax.Array
) -> tuple[jax.Array, models.Cache]:
    """Reads a draft with the target.

    Returns:
      Logits `[batch, γ + 1, vocabulary]` at the draft's positions and the one behind
      them, and the cache.
    """
    last = _pick_place(carry.tokens, carry.known - 1)
    x = models.Decoding(
        tokens=jnp.concatenate([last[:, None], drafted], axis=1),
        cache=truncate_cache(carry.target, carry.known - 1),
    )
    return target.decode(x)


def _judge(
    logits: jax.Array,
    q: jax.Array | None,
    drafted: jax.Array,
    sampler: Sampler,
    rule: Rule,
    key: jax.Array,
) -> Accepted:
    if q is None:
        return acceptance.accept_greedy(logits, drafted)
    p = probabilities(logits, sampler)
    if rule == "matching":
        return acceptance.accept_matching(p, drafted, key)
    return acceptance.accept(p, q, drafted, key)


def _force_counts(forced: jax.Array, step: jax.Array, accepted: Accepted) -> Accepted:
    """Replaces the count by that of the table; the token stays."""
    inside = step < forced.shape[1]
    row = forced[:, jnp.minimum(step, forced.shape[1] - 1)] & inside
    count = jnp.sum(jnp.cumprod(row.astype(jnp.int32), axis=1), axis=1)
    return Accepted(count, accepted.token)


def _join_token(accepted: Accepted, drafted: jax.Array) -> jax.Array:
    """Returns the accepted draft tokens and the token behind them, `[batch, γ + 1]`."""
    emitted = jnp.pad(drafted, ((0, 0), (0, 1)))
    places = jnp.arange(emitted.shape[1])
    here = places == accepted.count[:, None]
    return jnp.where(here, accepted.token[:, None], emitted)


def _append_tokens(
    carry: _Carry,
    emitted: jax.Array,
    count: jax.Array,
    most: jax.Array,
    end: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends emitted tokens to the sequences that are not done.

    Args:
      carry: the state before.
      emitted: `[batch, γ + 1]`, of which the first `count` are appended.
      count: `[batch]`; fewer are appended behind an end token, or beyond `most`.
      most: largest number of tokens of each sequence.
      end: the tokens that end a sequence.

    Returns:
      The tokens, their number, and which sequences end here.
    """
    added = jnp.minimum(_count_until_end(emitted, count, end), most - carry.known)
    added = jnp.where(carry.done, 0, added)
    known = carry.known + added
    tokens = _write_tokens(carry.tokens, emitted, carry.known, added)
    last = find_ends(_pick_place(tokens, known - 1), end)
    return tokens, known, (known >= most) | (added > 0) & last


def _count_until_end(
    emitted: jax.Array, count: jax.Array, end: tuple[int, ...]
) -> Array:
    """Counts the first `count` tokens up to an end token, which is included."""
    ends = find_ends(emitted, end)
    first = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, count)
    return jnp.minimum(first, count)


def _write_tokens(
    tokens: jax.Array, emitted: jax.Array, known: jax.Array, added: jax.Array
) -> jax.Array:
    """Writes the first `added` tokens behind the `known` ones."""
    places = jnp.arange(emitted.shape[1])
    # The others get an index out of bounds, at which nothing is written.
    target = jnp.where(places < added[:, None], known[:, None] + places, 1 << 30)
    rows = jnp.arange(len(tokens))[:, None]
    return tokens.at[rows, target].set(emitted, mode="drop")


def _cut_continuations(
    tokens: jax.Array, start: jax.Array, count: jax.Array, steps: int
) -> jax.Array:
    """Returns `count` tokens from `start` on, padded with 0 to `[batch, steps]`."""
    places = jnp.arange(steps)
    rows = jnp.take_along_axis(tokens, start[:, None] + places, axis=1)
    return jnp.where(places < count[:, None], rows, 0)


def _pick_place(tokens: jax.Array, place: jax.Array) -> jax.Array:
    """Returns `tokens[b, place[b]]`."""
    return jnp.take_along_axis(tokens, place[:, None], axis=1)[:, 0]
