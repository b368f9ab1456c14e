"""From logits to probabilities and tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.errors import ConfigError
from hpcjax.inference.config import Sampler


def probabilities(
    logits: Float[Array, "*batch vocabulary"], sampler: Sampler
) -> Float[Array, "*batch vocabulary"]:
    """Returns what `sampler` draws from, in float32.

    softmax(logits / temperature), of which the `top_k` largest are left and then the
    fewest that have `top_p` together, normalised again. Of equal ones the first count
    as larger.

    Raises:
      ConfigError: a temperature of zero, which draws nothing.

    Examples:
      >>> probabilities(jnp.array([0.0, 1.0, 1.0]), Sampler(top_k=2)).tolist()
      [0.0, 0.5, 0.5]
    """
    if sampler.greedy:
        raise ConfigError("a temperature of 0 draws nothing: take the largest logit")
    # The largest taken off first: divided by a small temperature the logits themselves
    # would overflow.
    logits = logits.astype(jnp.float32)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - largest) / sampler.temperature
    size = logits.shape[-1]
    if (sampler.top_k or size) >= size and sampler.top_p == 1:
        return jax.nn.softmax(logits)
    order = jnp.argsort(-logits, axis=-1, stable=True)
    sorted_logits = jnp.take_along_axis(logits, order, axis=-1)
    kept = jnp.arange(size) < (sampler.top_k or size)
    found = jax.nn.softmax(jnp.where(kept, sorted_logits, -jnp.inf))
    # A token is left if those before it have less than top_p; the first always is.
    before = jnp.cumsum(found, axis=-1) - found
    left = jnp.where(before < sampler.top_p, found, 0)
    left = left / jnp.sum(left, axis=-1, keepdims=True)
    place = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(left, place, axis=-1)


def next_token(
    logits: Float[Array, "*batch vocabulary"], sampler: Sampler, key: jax.Array
) -> Int[Array, "*batch"]:
    """Draws a token, or takes the most likely one.

    Examples:
      >>> next_token(jnp.array([0.0, 3.0]), Sampler(temperature=0.0), jax.random.key(0))
      Array(1, dtype=int32)
    """
    if sampler.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.random.categorical(key, jnp.log(probabilities(logits, sampler)))
    return drawn.astype(jnp.int32)
