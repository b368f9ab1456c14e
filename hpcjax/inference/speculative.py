"""Speculative decoding: a small model drafts tokens, a large one reads them at once.

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
    checked_prompts,
    prefill,
    take_back,
)
from hpcjax.inference.sampling import next_token, probabilities

Rule = Literal["rejection", "greedy", "matching"]
RULES: tuple[Rule, ...] = ("rejection", "greedy", "matching")


class Speculated(NamedTuple):
    """What follows the prompts, and how it came about.

    Attributes:
      tokens: `[batch, max_new_tokens]`; behind `lengths` padding of 0.
      lengths: how many of them count, up to and with the end token.
      iterations: of each sequence, until it was done.
      counts: how many iterations, of all sequences, accepted 0, 1, … γ drafts; also
        those that an end token or `max_new_tokens` cut.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]
    iterations: Int[Array, " batch"]
    counts: Int[Array, " ahead_and_1"]


class _Carry(NamedTuple):
    """What an iteration hands on; `known` counts a sequence's tokens so far."""

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
    """Continues prompts as `generate` does, by a draft model's help.

    In an iteration the draft adds γ tokens one by one, the target reads them in one
    pass, and so many are kept that what is emitted is distributed as the target's own
    tokens; see `accept`. Of what was rejected the caches forget by a smaller length.
    The draft begins an iteration with the last two tokens, since the last one of a
    draft that was accepted whole is not in its cache.

    Args:
      target: the model whose texts are wanted.
      draft: a cheaper one with the same vocabulary.
      prompts: see `pad_prompts`.
      options: how many tokens, and how both models' are drawn; None for the defaults.
      ahead: γ, at least 1.
      key: of the draws.
      rule: "rejection", `accept`; "greedy", `accept_greedy`, the only one at
        temperature 0; "matching", `accept_matching`. None: the first that fits.
      forced: for measurements only: which drafts count as accepted, instead of the
        rule; everything else is done as ever. Behind its iterations all are rejected.

    Raises:
      ConfigError: vocabularies that differ, a rule that does not go with the sampler, a
        `forced` of another shape, and what `generate` refuses.
    """
    options = options or Continuation()
    rule = _rule(rule, options.sampler)
    sizes = [models.decoder_of(one.model).vocabulary for one in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "target and draft must have one vocabulary: got "
            f"{sizes[0]} and {sizes[1]} tokens"
        )
    if ahead < 1:
        raise ConfigError(f"ahead must be at least 1: got ahead={ahead}")
    for one in (target, draft):
        prompts = checked_prompts(one, prompts, options, ahead=ahead)
    if forced is not None:
        batch, shape = len(prompts.tokens), forced.shape
        good = len(shape) == 3 and shape[::2] == (batch, ahead) and shape[1] > 0
        must = f"forced must be [{batch}, iterations, {ahead}], at least one iteration"
        checks.require(good and forced.dtype == bool, must, shape=shape)
    return _speculate(
        target, draft, prompts, key, forced, ahead=ahead, options=options, rule=rule
    )


def _rule(rule: Rule | None, sampler: Sampler) -> Rule:
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
        drawing, judging = (derive(key, name, carry.step) for name in ("draw", "judge"))
        drafted, q, draft_cache = _draft(
            draft, carry, ahead=ahead, sampler=sampler, key=drawing
        )
        p, target_cache = _read(target, carry, drafted)
        accepted = _judge(p, q, drafted, sampler, rule, judging)
        if forced is not None:
            accepted = _forced(forced, carry.step, accepted)
        told = _emitted(accepted, drafted)
        tokens, known, ended = _grown(
            carry, told, accepted.count + 1, lengths + steps, end
        )
        running = ~carry.done
        return _Carry(
            carry.step + 1,
            tokens,
            known,
            take_back(target_cache, known - 1),
            take_back(draft_cache, known),
            carry.done | ended,
            carry.iterations + running,
            carry.counts.at[accepted.count].add(running.astype(jnp.int32)),
        )

    carry = jax.lax.while_loop(
        more, iterate, _begun(target, draft, prompts, ahead, options)
    )
    made = carry.known - lengths
    tokens = _behind(carry.tokens, lengths, made, steps)
    return Speculated(tokens, made, carry.iterations, carry.counts)


def _begun(
    target: LanguageModel,
    draft: LanguageModel,
    prompts: Prompts,
    ahead: int,
    options: Continuation,
) -> _Carry:
    """Returns what the first iteration is given: both models have read the prompts."""
    batch, time = prompts.tokens.shape
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
    """Returns γ tokens `[batch, γ]`, what they were drawn from, and the cache."""
    # The last two tokens; of a text of one token that one, and one that is forgotten.
    start = jnp.maximum(carry.known - 2, 0)
    two = jnp.take_along_axis(carry.tokens, start[:, None] + jnp.arange(2), axis=1)
    x = models.Decoding(
        tokens=two,
        cache=take_back(carry.draft, start),
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
        one, (first, take_back(cache, carry.known)), numbers
    )
    tokens = jnp.concatenate([first[None], others]).T
    if q_first is None:
        return tokens, None, cache
    return tokens, jnp.moveaxis(jnp.concatenate([q_first[None], q_others]), 0, 1), cache


def _read(
    target: LanguageModel, carry: _Carry, drafted: jax.Array
) -> tuple[jax.Array, models.Cache]:
    """Returns the target's logits at the draft's places and behind, and the cache."""
    last = _at(carry.tokens, carry.known - 1)
    x = models.Decoding(
        tokens=jnp.concatenate([last[:, None], drafted], axis=1),
        cache=take_back(carry.target, carry.known - 1),
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


def _forced(forced: jax.Array, step: jax.Array, accepted: Accepted) -> Accepted:
    """Returns so many accepted as the table says, with the token that was drawn."""
    inside = step < forced.shape[1]
    row = forced[:, jnp.minimum(step, forced.shape[1] - 1)] & inside
    count = jnp.sum(jnp.cumprod(row.astype(jnp.int32), axis=1), axis=1)
    return Accepted(count, accepted.token)


def _emitted(accepted: Accepted, drafted: jax.Array) -> jax.Array:
    """Returns `[batch, γ + 1]`: the accepted drafts, and the token behind them."""
    told = jnp.pad(drafted, ((0, 0), (0, 1)))
    places = jnp.arange(told.shape[1])
    return jnp.where(places == accepted.count[:, None], accepted.token[:, None], told)


def _grown(
    carry: _Carry,
    told: jax.Array,
    count: jax.Array,
    most: jax.Array,
    end: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the texts with what they are told, their lengths, and whether they end.

    Args:
      carry: before; a text that is done gets nothing.
      told: `[batch, γ + 1]`, of which the first `count` count.
      count: cut where a text would be longer than `most` and behind its end.
      most: tokens of each text.
      end: the token that ends a text.
    """
    emitted = jnp.minimum(_until_end(told, count, end), most - carry.known)
    emitted = jnp.where(carry.done, 0, emitted)
    known = carry.known + emitted
    tokens = _written(carry.tokens, told, carry.known, emitted)
    ended = known >= most
    if end is not None:
        ended |= (emitted > 0) & (_at(tokens, known - 1) == end)
    return tokens, known, ended


def _until_end(told: jax.Array, count: jax.Array, end: int | None) -> jax.Array:
    """Returns how many of the first `count` tokens come up to and with the end."""
    if end is None:
        return count
    ends = told == end
    first = jnp.where(jnp.any(ends, axis=1), jnp.argmax(ends, axis=1) + 1, count)
    return jnp.minimum(first, count)


def _written(
    tokens: jax.Array, told: jax.Array, known: jax.Array, emitted: jax.Array
) -> jax.Array:
    """Writes the first `emitted` tokens behind the `known` ones."""
    places = jnp.arange(told.shape[1])
    # Those that do not count are sent beyond the end, where nothing is written.
    target = jnp.where(places < emitted[:, None], known[:, None] + places, 1 << 30)
    return models.write_at(tokens, told, target)


def _behind(
    tokens: jax.Array, start: jax.Array, count: jax.Array, steps: int
) -> jax.Array:
    """Returns `[batch, steps]`: the `count` tokens from `start` on, then zeros."""
    places = jnp.arange(steps)
    found = jnp.take_along_axis(tokens, start[:, None] + places, axis=1)
    return jnp.where(places < count[:, None], found, 0)


def _at(tokens: jax.Array, place: jax.Array) -> jax.Array:
    return jnp.take_along_axis(tokens, place[:, None], axis=1)[:, 0]
