"""The parts of an iteration, each timed alone: draft step, verification, the rest.

A part is repeated inside one compiled loop, as the iterations are, so that neither a
call from Python nor a copy of the cache is counted. The loop has to be long: XLA takes
a short one apart, and on a CPU products outside loops are faster than inside.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hpcjax import inference, models, runs
from hpcjax.core import derive


@functools.partial(
    jax.jit, static_argnames=("tokens", "known", "size", "count", "sampler", "unrolled")
)
def steps(
    speaker: inference.LanguageModel,
    key: jax.Array,
    *,
    tokens: int,
    known: int,
    size: int,
    count: int,
    sampler: inference.Sampler,
    unrolled: bool = False,
) -> jax.Array:
    """Reads `tokens` tokens behind `known` ones, `count` times over, one sequence.

    Each pass reads what the one before said. Of a single token one is drawn, as a draft
    does; of several the most likely ones are taken, which is all that greedy acceptance
    needs.

    Args:
      speaker: the model.
      key: of the draws.
      tokens: read at once.
      known: those in the cache.
      size: of the cache.
      count: passes.
      sampler: how a token is drawn.
      unrolled: see `models.empty_cache`.
    """
    cache = models.empty_cache(speaker.model, 1, size, unrolled=unrolled)
    length = jnp.full(1, known, jnp.int32)

    def one(carry: tuple, number: jax.Array) -> tuple[tuple, None]:
        said, cache = carry
        x = models.Decoding(tokens=said, cache=inference.truncate_cache(cache, length))
        logits, cache = speaker.decode(x)
        if tokens == 1:
            own = derive(key, "token", number)
            said = inference.next_token(logits, sampler, own)
        else:
            said = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (said, cache), None

    first = jnp.zeros((1, tokens), jnp.int32)
    (said, _), _ = jax.lax.scan(one, (first, cache), jnp.arange(count))
    return said


@functools.partial(
    jax.jit, static_argnames=("ahead", "vocabulary", "count", "temperature")
)
def judgements(
    key: jax.Array, *, ahead: int, vocabulary: int, count: int, temperature: float
) -> jax.Array:
    """Accepts a draft of random logits, `count` times over, one sequence."""
    shape = (1, ahead + 1, vocabulary)
    logits = jax.random.normal(derive(key, "logits"), shape)
    sampler = inference.Sampler(temperature=temperature)

    def one(drafted: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        moved = logits + 1e-3 * drafted[:, :1, None]
        if sampler.greedy:
            made = inference.accept_greedy(moved, drafted)
        else:
            p = inference.probabilities(moved, sampler)
            own = derive(key, "judge", number)
            made = inference.accept(p, p[:, :-1], drafted, own)
        return (drafted + made.token[:, None]) % vocabulary, None

    first = jnp.zeros((1, ahead), jnp.int32)
    return jax.lax.scan(one, first, jnp.arange(count))[0]


@jax.jit
def read(speaker: inference.LanguageModel, prompts: inference.Prompts) -> jax.Array:
    """Reads prompts into a cache of their length, and returns the logits behind."""
    cache = models.empty_cache(speaker.model, *prompts.tokens.shape)
    return inference.prefill(speaker, cache, prompts)[0]


def medians(measured: "runs.Dataset", inner: Mapping[str, int]) -> dict[str, float]:
    """Returns the median seconds of each candidate, of one of its `inner` passes."""
    seconds = measured["seconds"].median("repetition")
    return {
        name: float(seconds.sel(candidate=name)) / inner.get(name, 1)
        for name in measured["candidate"].values.tolist()
    }
