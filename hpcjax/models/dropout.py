"""Dropout of transformer blocks, by masks of a key, an example and a place."""

import jax
import jax.numpy as jnp

from hpcjax import kernels
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import BatchKey, Key, derive, each_row
from hpcjax.models.transformer_config import TransformerOptions


def training_key(
    options: TransformerOptions, key: Key | None, rows: int, *, train: bool
) -> BatchKey | None:
    """Returns the key of what a pass drops, None if it drops nothing.

    Args:
      options: with the rates.
      key: that of the pass.
      rows: examples of the pass.
      train: whether it trains.

    Raises:
      ConfigError: a training pass with dropout and without a key.
    """
    if not (train and (options.dropout or options.attention_dropout)):
        return None
    if key is None:
        raise ConfigError(
            f"a training pass with dropout={options.dropout}, attention_dropout="
            f"{options.attention_dropout} needs a key: got none"
        )
    if not isinstance(key, BatchKey):
        return BatchKey(key=key, rows=jnp.arange(rows, dtype=jnp.int32))
    return key


def seeds(key: Key | None, place: str, rows: int) -> jax.Array | None:
    """Returns the seed of each example's mask, of a block's key; None of None."""
    if key is None:
        return None
    return jax.vmap(jax.random.bits)(each_row(derive(key, place), rows))


def drop(x: jax.Array, rate: float, key: Key | None, place: str) -> jax.Array:
    """Returns x / (1 − rate) where it is kept, else zero; x itself without a key.

    Args:
      x: `[rows, ...]`.
      rate: probability that an element is dropped.
      key: of the block.
      place: in the block.
    """
    seed = seeds(key, place, len(x)) if rate else None
    if seed is None:
        return x
    kept = kernels.keep_mask(seed, x.shape, rate)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
