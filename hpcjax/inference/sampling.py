"""Sampling of the next token from logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.errors import ConfigError
from hpcjax.inference.config import Sampler


def probabilities(
    logits: Float[Array, "*batch vocabulary"], sampler: Sampler
) -> Float[Array, "*batch vocabulary"]:
    """Returns the distribution from which `sampler` draws, in float32.

    It is softmax(logits / temperature), restricted to the `top_k` largest logits, then
    to the fewest tokens whose probabilities add up to `top_p`, and normalised. Among
    equal logits, earlier tokens count as larger.

    Raises:
      ConfigError: a temperature of zero.

    Examples:
      >>> probabilities(jnp.array([0.0, 1.0, 1.0]), Sampler(top_k=2)).tolist()
      [0.0, 0.5, 0.5]
    """
    if sampler.greedy:
        raise ConfigError("a temperature of 0 draws nothing: take the largest logit")
    # The largest logit becomes 0 before the division: logits over a small temperature
    # could overflow to infinity, and inf - inf inside the softmax is NaN.
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - largest) / sampler.temperature
    size = logits.shape[-1]
    if (sampler.top_k or size) >= size and sampler.top_p == 1:
        return jax.nn.softmax(logits)
    order = jnp.argsort(-logits, axis=-1, stable=True)
    sorted_logits = jnp.take_along_axis(logits, order, axis=-1)
    in_top_k = jnp.arange(size) < (sampler.top_k or size)
    sorted_p = jax.nn.softmax(jnp.where(in_top_k, sorted_logits, -jnp.inf))
    # A token stays if the tokens before it have less than top_p; so the first one does,
    # and the one with which the sum reaches top_p.
    before = jnp.cumsum(sorted_p, axis=-1) - sorted_p
    in_top_p = jnp.where(before < sampler.top_p, sorted_p, 0)
    in_top_p = in_top_p / jnp.sum(in_top_p, axis=-1, keepdims=True)
    # Back to where they were, without a second sort.
    empty = jnp.zeros_like(in_top_p)
    return jnp.put_along_axis(empty, order, in_top_p, axis=-1, inplace=False)


def next_token(
    logits: Float[Array, "*batch vocabulary"], sampler: Sampler, key: jax.Array
) -> Int[Array, "*batch"]:
    """Draws a token; with a temperature of 0, returns the most likely one.

    Examples:
      >>> next_token(jnp.array([0.0, 3.0]), Sampler(temperature=0.0), jax.random.key(0))
      Array(1, dtype=int32)
    """
    if sampler.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.random.categorical(key, jnp.log(probabilities(logits, sampler)))
    return drawn.astype(jnp.int32)
