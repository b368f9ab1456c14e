"""Autoregressive decoding in one compiled loop."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

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
        """Reads the tokens of `x`; returns their logits and the new cache."""
        return self.model.apply(self.params, {}, x, train=False)[0]


class Prompts(NamedTuple):
    """Texts to continue.

    Attributes:
      tokens: `[batch, time]`, padded on the right with any tokens.
      lengths: number of tokens of each prompt without the padding, at least 1.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " rows"]


class Generated(NamedTuple):
    """Continuations of prompts.

    Attributes:
      tokens: the new tokens, `[batch, max_new_tokens]`, padded with 0.
      lengths: number of new tokens without the padding, the end token included.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]


def pad_prompts(
    prompts: Sequence[Sequence[int] | np.ndarray], *, least: int = 16
) -> Prompts:
    """Pads prompts on the right to a power of two.

    `generate` is compiled once for each length, so that few lengths save time.

    Args:
      prompts: tokens of each prompt.
      least: smallest padded length.

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
    # The next power of two: n - 1 has as many bits as 2^k - 1 for 2^(k-1) < n <= 2^k.
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
    """Continues each prompt until an end token or for `max_new_tokens`.

    The prompts are read in one pass, which stores their keys and values in a cache.
    Then one token at a time is drawn and read. The program is compiled once for each
    shape of prompts.

    Args:
      language_model: the model with its parameters.
      prompts: see `pad_prompts`.
      options: how many tokens to add and how to draw them; None for the defaults.
      key: of the draws.

    Raises:
      ConfigError: not a causal language model, a prompt that is empty or longer than
        its row, tokens outside of the vocabulary, or more tokens than the model has
        positions.
    """
    options = options or Continuation()
    prompts = prepare_prompts(language_model, prompts, options)
    return _generate(language_model, prompts, key, options=options)


def prepare_prompts(
    language_model: LanguageModel,
    prompts: Prompts,
    options: Continuation,
    *,
    ahead: int = 0,
) -> Prompts:
    """Checks prompts; returns them padded with 0 and cut to the model's positions.

    Args:
      language_model: the model that reads them.
      prompts: see `pad_prompts`.
      options: their continuation.
      ahead: tokens that are read beyond `max_new_tokens`, such as draft tokens.

    Raises:
      ConfigError: prompts that the model cannot continue by `max_new_tokens` + `ahead`
        tokens.
    """
    decoder = models.decoder_of(language_model.model)
    # An explicit transfer, which `jax.transfer_guard("disallow")` lets pass.
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
    good = all(0 <= token <= last for token in options.end)
    checks.require(good, f"end must be in 0 … {last}", end=options.end)
    longest, steps = int(lengths.max(initial=0)), options.max_new_tokens
    if decoder.context is not None and longest + steps + ahead > decoder.context:
        drafts = f" and {ahead} drafts" if ahead else ""
        raise ConfigError(
            f"the model has {decoder.context} positions: got a prompt of {longest} and "
            f"max_new_tokens={steps}{drafts}"
        )
    return Prompts(*jax.device_put((tokens[:, : decoder.context], lengths)))


def find_ends(tokens: Int[Array, "..."], end: tuple[int, ...]) -> Bool[Array, "..."]:
    """Returns which tokens end a text."""
    return jnp.isin(tokens, jnp.array(end, tokens.dtype))


def cache_for(
    language_model: LanguageModel, batch: int, size: int, options: Continuation
) -> models.Cache:
    """Returns an empty cache of `size` tokens, at most the model's positions."""
    model = language_model.model
    context = models.decoder_of(model).context
    size = size if context is None else min(size, context)
    return models.empty_cache(model, batch, size, unrolled=options.unrolled)


def prefill(
    language_model: LanguageModel, cache: models.Cache, prompts: Prompts
) -> tuple[Array, models.Cache]:
    """Reads prompts of different lengths into an empty cache.

    Returns:
      Logits of the token behind the last one of each prompt, `[batch, vocabulary]`, and
      the cache, whose lengths are those of the prompts.
    """
    last = prompts.lengths[:, None] - 1
    logits, cache = language_model.decode(
        models.Decoding(tokens=prompts.tokens, cache=cache, at=last)
    )
    # The padding was read, too. With the smaller length, it is masked and overwritten.
    return logits[:, 0], truncate_cache(cache, prompts.lengths)


def truncate_cache(cache: models.Cache, lengths: Int[Array, " batch"]) -> models.Cache:
    """Returns a cache of its first `lengths` tokens, without a copy.

    What lies behind the lengths stays in memory; it is masked, and later overwritten.
    """
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
    return continue_tokens(language_model, cache, logits, options, key)[0]


def continue_tokens(
    language_model: LanguageModel,
    cache: models.Cache,
    logits: Float[Array, "batch vocabulary"],
    options: Continuation,
    key: jax.Array,
    attend: models.Attend = models.attend_cached,
) -> tuple[Generated, models.Cache]:
    """Draws tokens and reads them, one at a time; to be called under `jit`.

    The new tokens' keys and values are written to the cache where it is: a caller whose
    cache is an argument of its program donates it, and returns the one returned here.

    Args:
      language_model: the model with its parameters.
      cache: of the tokens so far, with room for the new ones.
      logits: from which the first token is drawn.
      options: how many tokens to draw, and how.
      key: of the draws.
      attend: the attention of the layers, see `models.Decoding`.
    """
    batch, sampler = len(logits), options.sampler
    steps = options.max_new_tokens
    first = next_token(logits, sampler, derive(key, "token", 0))
    tokens = jnp.zeros((batch, steps), first.dtype)

    def ended(token: jax.Array) -> jax.Array:
        return find_ends(token, options.end)

    def more(carry: tuple) -> jax.Array:
        step, *_, done = carry
        return (step < steps) & ~jnp.all(done)

    def advance(carry: tuple) -> tuple:
        step, token, cache, tokens, counts, done = carry
        x = models.Decoding(tokens=token[:, None], cache=cache, attend=attend)
        logits, cache = language_model.decode(x)
        token = next_token(logits[:, 0], sampler, derive(key, "token", step))
        # Sequences that are done are still read, since shapes are static, but their
        # tokens are dropped.
        tokens = tokens.at[:, step].set(jnp.where(done, 0, token))
        return step + 1, token, cache, tokens, counts + ~done, done | ended(token)

    carry = (
        jnp.int32(1),
        first,
        cache,
        tokens.at[:, 0].set(first),
        jnp.ones(batch, jnp.int32),
        ended(first),
    )
    _, _, cache, tokens, counts, _ = jax.lax.while_loop(more, advance, carry)
    return Generated(tokens, counts), cache
