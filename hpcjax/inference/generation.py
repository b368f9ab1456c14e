"""Continuing texts, one token after another, in one compiled loop."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hpcjax import models
from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.model import Model
from hpcjax.core.structs import pytree, static
from hpcjax.inference.config import Continuation
from hpcjax.inference.sampling import next_token


@pytree
class LanguageModel:
    """A causal language model with its parameters.

    Attributes:
      params: as the model's `init` gives them.
      model: the network.
    """

    params: Any
    model: Model = static()

    def decode(self, x: models.Decoding) -> tuple[jax.Array, models.Cache]:
        """Returns logits and the new cache."""
        return self.model.apply(self.params, {}, x, train=False)[0]


class Prompts(NamedTuple):
    """Texts to continue.

    Attributes:
      tokens: `[batch, time]`, filled up on the right with anything.
      lengths: how many tokens of each count, at least 1.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " rows"]


class Generated(NamedTuple):
    """What follows the prompts.

    Attributes:
      tokens: `[batch, max_new_tokens]`; behind `lengths` padding of 0.
      lengths: how many of them count, up to and with the end token.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]


def pad_prompts(
    prompts: Sequence[Sequence[int] | np.ndarray], *, least: int = 16
) -> Prompts:
    """Returns prompts filled up on the right to a power of two.

    Few different times mean few compilations.

    Args:
      prompts: tokens of each.
      least: the smallest time.

    Raises:
      ConfigError: no prompt, or an empty one.

    Examples:
      >>> prompts = pad_prompts([[5, 6, 7], [8]], least=2)
      >>> prompts.tokens.tolist(), prompts.lengths.tolist()
      ([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1])
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"a prompt needs at least one token: got lengths {lengths}")
    time = max(least, 1 << (max(lengths) - 1).bit_length())
    tokens = np.zeros((len(lengths), time), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Prompts(jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32))


def generate(
    language_model: LanguageModel,
    prompts: Prompts,
    options: Continuation | None = None,
    *,
    key: jax.Array,
) -> Generated:
    """Continues each prompt until its end token or for `max_new_tokens`.

    The prompts are read in one pass, which leaves their keys and values in a cache;
    then one token is read and one drawn at a time. Compiled once for prompts of a
    shape.

    Args:
      language_model: the model with its parameters.
      prompts: see `pad_prompts`.
      options: how many tokens, and how they are drawn; None for the defaults.
      key: of the draws.

    Raises:
      ConfigError: no causal language model, a prompt that is empty or longer than
        its row, tokens that the model does not know, or more of them than it has
        positions for.
    """
    options = options or Continuation()
    prompts = checked_prompts(language_model, prompts, options)
    return _generate(language_model, prompts, key, options=options)


def checked_prompts(
    language_model: LanguageModel,
    prompts: Prompts,
    options: Continuation,
    *,
    ahead: int = 0,
) -> Prompts:
    """Returns the prompts filled up with token 0, cut to the model's positions.

    Raises:
      ConfigError: what cannot be continued by `max_new_tokens` + `ahead` tokens.
    """
    decoder = models.decoder_of(language_model.model)
    # Said to be wanted here, for those who forbid transfers that are not.
    tokens, lengths = jax.device_get((prompts.tokens, prompts.lengths))
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        raise ConfigError(
            "prompts must be [batch, time] and lengths [batch]: got "
            f"{tokens.shape} and {lengths.shape}"
        )
    if lengths.min(initial=1) < 1 or lengths.max(initial=0) > tokens.shape[1]:
        raise ConfigError(
            f"lengths must be in 1 … {tokens.shape[1]}: got {lengths.tolist()}"
        )
    tokens = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    last = decoder.vocabulary - 1
    if tokens.min(initial=0) < 0 or tokens.max(initial=0) > last:
        raise ConfigError(
            f"tokens must be in 0 … {last}: got {tokens.min()} … {tokens.max()}"
        )
    good = options.end is None or 0 <= options.end <= last
    checks.require(good, f"end must be in 0 … {last}", end=options.end)
    longest, steps = int(lengths.max(initial=0)), options.max_new_tokens
    if decoder.context is not None and longest + steps + ahead > decoder.context:
        drafts = f" and {ahead} drafts" if ahead else ""
        raise ConfigError(
            f"the model has {decoder.context} positions: got a prompt of {longest} and "
            f"max_new_tokens={steps}{drafts}"
        )
    return Prompts(*jax.device_put((tokens[:, : decoder.context], lengths)))


def cache_for(
    language_model: LanguageModel, batch: int, size: int, options: Continuation
) -> models.Cache:
    """Returns an empty cache of `size` tokens, of fewer where positions end before."""
    model = language_model.model
    context = models.decoder_of(model).context
    size = size if context is None else min(size, context)
    return models.empty_cache(model, batch, size, unrolled=options.unrolled)


def prefill(
    language_model: LanguageModel, cache: models.Cache, prompts: Prompts
) -> tuple[Array, models.Cache]:
    """Reads prompts of different lengths into an empty cache.

    Returns:
      Logits of what follows the last token of each, `[batch, vocabulary]`, and the
      cache, whose lengths are those of the prompts.
    """
    last = prompts.lengths[:, None] - 1
    logits, cache = language_model.decode(
        models.Decoding(tokens=prompts.tokens, cache=cache, at=last)
    )
    return logits[:, 0], take_back(cache, prompts.lengths)


def take_back(cache: models.Cache, lengths: Int[Array, " batch"]) -> models.Cache:
    """Returns the cache of the first `lengths` tokens; copies nothing."""
    return models.Cache(runs=cache.runs, length=lengths)


@functools.partial(jax.jit, static_argnames="options")
def _generate(
    language_model: LanguageModel,
    prompts: Prompts,
    key: jax.Array,
    *,
    options: Continuation,
) -> Generated:
    batch, time = prompts.tokens.shape
    cache = cache_for(language_model, batch, time + options.max_new_tokens, options)
    logits, cache = prefill(language_model, cache, prompts)
    return follow(language_model, cache, logits, options, key)


def follow(
    language_model: LanguageModel,
    cache: models.Cache,
    logits: Float[Array, "batch vocabulary"],
    options: Continuation,
    key: jax.Array,
    attend: models.Attend = models.attend_cached,
) -> Generated:
    """Draws tokens and reads them, one after another; to be traced.

    Args:
      language_model: the model with its parameters.
      cache: what came before, with room for what comes.
      logits: of the first token to be drawn.
      options: how many tokens, and how they are drawn.
      key: of the draws.
      attend: see `models.Decoding`.
    """
    batch, sampler, end = len(logits), options.sampler, options.end
    steps = options.max_new_tokens
    drawn = next_token(logits, sampler, derive(key, "token", 0))
    tokens = jnp.zeros((batch, steps), drawn.dtype)

    def ended(token: jax.Array) -> jax.Array:
        return jnp.zeros(batch, bool) if end is None else token == end

    def more(carry: tuple) -> jax.Array:
        step, *_, done = carry
        return (step < steps) & ~jnp.all(done)

    def advance(carry: tuple) -> tuple:
        step, token, cache, tokens, counts, done = carry
        x = models.Decoding(tokens=token[:, None], cache=cache, attend=attend)
        logits, cache = language_model.decode(x)
        token = next_token(logits[:, 0], sampler, derive(key, "token", step))
        tokens = tokens.at[:, step].set(jnp.where(done, 0, token))
        return step + 1, token, cache, tokens, counts + ~done, done | ended(token)

    carry = (
        jnp.int32(1),
        drawn,
        cache,
        tokens.at[:, 0].set(drawn),
        jnp.ones(batch, jnp.int32),
        ended(drawn),
    )
    *_, tokens, counts, _ = jax.lax.while_loop(more, advance, carry)
    return Generated(tokens, counts)
