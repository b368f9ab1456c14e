"""Continuing texts, one token after another, in one compiled loop."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hpcjax import models
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.model import Model
from hpcjax.inference.config import Sampler
from hpcjax.inference.sampling import next_token


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
) -> tuple[Int[Array, "batch time"], Int[Array, " batch"]]:
    """Returns prompts filled up on the right to a power of two, and their lengths.

    Few different times mean few compilations.

    Args:
      prompts: tokens of each.
      least: the smallest time.

    Raises:
      ConfigError: no prompt, or an empty one.

    Examples:
      >>> tokens, lengths = pad_prompts([[5, 6, 7], [8]], least=2)
      >>> tokens.tolist(), lengths.tolist()
      ([[5, 6, 7, 0], [8, 0, 0, 0]], [3, 1])
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"a prompt needs at least one token: got lengths {lengths}")
    time = max(least, 1 << (max(lengths) - 1).bit_length())
    tokens = np.zeros((len(lengths), time), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32)


def generate(
    model: Model,
    params: Any,
    prompts: Int[Array, "batch time"],
    lengths: Int[Array, " rows"],
    *,
    max_new_tokens: int,
    key: jax.Array,
    sampler: Sampler | None = None,
    end: int | None = None,
    unrolled: bool = False,
) -> Generated:
    """Continues each prompt until its end token or for `max_new_tokens`.

    The prompts are read in one pass, which leaves their keys and values in a cache;
    then one token is read and one drawn at a time. Compiled once for prompts of a
    shape.

    Args:
      model: a causal language model.
      params: its parameters.
      prompts: tokens, filled up on the right with any; see `pad_prompts`.
      lengths: how many tokens of each prompt count, at least 1.
      max_new_tokens: at most, at least 1.
      key: of the draws.
      sampler: how tokens are drawn; None draws from the model's probabilities.
      end: the token that ends a text; None for no such.
      unrolled: compiles each layer by itself, see `models.empty_cache`.

    Raises:
      ConfigError: no causal language model, a prompt that is empty or longer than
        `prompts`, or more tokens than the model has positions for.
    """
    check_prompts(model, prompts, lengths, max_new_tokens)
    return _generate(
        params,
        prompts,
        lengths,
        key,
        model=model,
        steps=max_new_tokens,
        sampler=sampler or Sampler(),
        end=end,
        unrolled=unrolled,
    )


def check_prompts(
    model: Model, prompts: jax.Array, lengths: jax.Array, max_new_tokens: int
) -> None:
    """Raises ConfigError for what `generate` cannot continue."""
    context = models.decoder_of(model).context
    if prompts.ndim != 2 or lengths.shape != prompts.shape[:1]:
        raise ConfigError(
            "prompts must be [batch, time] and lengths [batch]: got "
            f"{prompts.shape} and {lengths.shape}"
        )
    if max_new_tokens < 1:
        raise ConfigError(
            f"max_new_tokens must be at least 1: got max_new_tokens={max_new_tokens}"
        )
    found = np.asarray(lengths)
    if found.min(initial=1) < 1 or found.max(initial=0) > prompts.shape[1]:
        raise ConfigError(
            f"lengths must be in 1 … {prompts.shape[1]}: got {found.tolist()}"
        )
    if context is not None and prompts.shape[1] + max_new_tokens > context:
        raise ConfigError(
            f"the model has {context} positions: got prompts of {prompts.shape[1]} and "
            f"max_new_tokens={max_new_tokens}"
        )


def prefill(
    model: Model,
    params: Any,
    cache: models.Cache,
    tokens: Int[Array, "batch time"],
    lengths: Int[Array, " batch"],
) -> tuple[Array, models.Cache]:
    """Reads prompts of different lengths into an empty cache.

    Returns:
      Logits of what follows the last token of each, `[batch, vocabulary]`, and the
      cache, whose lengths are those of the prompts.
    """
    x = models.Decoding(tokens=tokens, cache=cache, at=lengths[:, None] - 1)
    (logits, cache), _ = model.apply(params, {}, x, train=False)
    return logits[:, 0], take_back(cache, lengths)


def take_back(cache: models.Cache, lengths: Int[Array, " batch"]) -> models.Cache:
    """Returns the cache of the first `lengths` tokens; copies nothing."""
    return models.Cache(runs=cache.runs, length=lengths, shared=cache.shared)


@functools.partial(
    jax.jit, static_argnames=("model", "steps", "sampler", "end", "unrolled")
)
def _generate(
    params: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    *,
    model: Model,
    steps: int,
    sampler: Sampler,
    end: int | None,
    unrolled: bool,
) -> Generated:
    batch, time = prompts.shape
    cache = models.empty_cache(model, batch, time + steps, unrolled=unrolled)
    logits, cache = prefill(model, params, cache, prompts, lengths)
    drawn = next_token(logits, sampler, derive(key, "token", 0))
    tokens = jnp.zeros((batch, steps), prompts.dtype)

    def ended(token: jax.Array) -> jax.Array:
        return jnp.zeros(batch, bool) if end is None else token == end

    def more(carry: tuple) -> jax.Array:
        step, *_, done = carry
        return (step < steps) & ~jnp.all(done)

    def advance(carry: tuple) -> tuple:
        step, token, cache, tokens, counts, done = carry
        x = models.Decoding(tokens=token[:, None], cache=cache)
        (logits, cache), _ = model.apply(params, {}, x, train=False)
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
