"""Continuations token by token, for who reads them as they come."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import models
from hpcjax.core.keys import derive
from hpcjax.inference.config import Continuation
from hpcjax.inference.generation import (
    LanguageModel,
    Prompts,
    cache_for,
    prefill,
    prepare_prompts,
)
from hpcjax.inference.sampling import next_token


def compile_stream(
    language_model: LanguageModel,
    prompts: Prompts,
    options: Continuation | None = None,
) -> Callable[[jax.Array], Iterator[np.ndarray]]:
    """Compiles a generation that gives each token when it is drawn.

    There are two programs, one that reads the prompts and one that reads a token, to
    which the cache is donated. `generate`, one program, draws the same tokens.

    Args:
      language_model: the model with its parameters.
      prompts: see `pad_prompts`.
      options: how many tokens to add and how to draw them; None for the defaults.

    Returns:
      A function from the key of the draws, `jax.random.key(...)`, to an iterator over
      tokens, int32 `[batch]`: 0 behind a sequence's end token. It ends when all
      sequences do.

    Raises:
      ConfigError: as `generate`.
    """
    options = options or Continuation()
    prompts = prepare_prompts(language_model, prompts, options)
    key = jax.eval_shape(lambda: jax.random.key(0))
    begin = _begin.lower(language_model, prompts, key, options=options).compile()
    token, cache = jax.eval_shape(
        functools.partial(_begin, options=options), language_model, prompts, key
    )
    step = jax.ShapeDtypeStruct((), jnp.int32)
    lowered = _advance.lower(language_model, cache, token, step, key, options=options)
    advance = lowered.compile()

    def write(key: jax.Array) -> Iterator[np.ndarray]:
        token, cache = begin(language_model, prompts, key)
        # An explicit transfer, which `jax.transfer_guard("disallow")` lets pass.
        place = jax.device_put(np.int32(1))
        done = np.zeros(len(prompts.tokens), bool)
        for step in range(1, options.max_new_tokens + 1):
            found = jax.device_get(token)
            yield np.where(done, 0, found)
            done |= np.isin(found, options.end)
            if done.all() or step == options.max_new_tokens:
                return
            token, cache, place = advance(language_model, cache, token, place, key)

    return write


@functools.partial(jax.jit, static_argnames="options")
def _begin(
    language_model: LanguageModel,
    prompts: Prompts,
    key: jax.Array,
    *,
    options: Continuation,
) -> tuple[jax.Array, models.Cache]:
    """Reads prompts; returns the first token of each continuation, and the cache."""
    batch, time = prompts.tokens.shape
    cache = cache_for(language_model, batch, time + options.max_new_tokens, options)
    logits, cache = prefill(language_model, cache, prompts)
    return next_token(logits, options.sampler, derive(key, "token", 0)), cache


@functools.partial(jax.jit, static_argnames="options", donate_argnums=1)
def _advance(
    language_model: LanguageModel,
    cache: models.Cache,
    token: jax.Array,
    step: jax.Array,
    key: jax.Array,
    *,
    options: Continuation,
) -> tuple[jax.Array, models.Cache, jax.Array]:
    """Reads a token of each sequence; returns the next one, cache, and step + 1."""
    x = models.Decoding(tokens=token[:, None], cache=cache)
    logits, cache = language_model.decode(x)
    drawn = next_token(logits[:, 0], options.sampler, derive(key, "token", step))
    return drawn, cache, step + 1
