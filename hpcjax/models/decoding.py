"""Incremental decoding: the key-value cache of a language model and its use.

A causal language model maps tokens to logits, and a `Decoding`, which is tokens that
follow those in a `Cache`, to logits and the new cache. How layers attend to the cache
is a function in the `Decoding`. `attend_cached` is the plain one; those for clustered
and for pruned heads are in `inference`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax import kernels
from hpcjax.core.errors import ConfigError, UnsupportedOp
from hpcjax.core.model import Decoder, Model
from hpcjax.core.structs import pytree, static


class Heads(NamedTuple):
    """Queries, keys and values of the new tokens in one layer.

    Attributes:
      query: `[batch, time, heads, head_dim]`, after the rotary embedding if there is
        one.
      key: `[batch, time, kv_heads, head_dim]`, likewise.
      value: of the shape of `key`.
      positions: of the tokens in their sequence, `[batch, time]`.
      hidden: the block's input, `[batch, time, width]`.
      slopes: what each head's scores lose with each place between query and key, see
        `layers.alibi_slopes`; None for nothing.
    """

    query: Float[Array, "batch time heads head_dim"]
    key: Float[Array, "batch time kv_heads head_dim"]
    value: Float[Array, "batch time kv_heads head_dim"]
    positions: Int[Array, "batch time"]
    hidden: Float[Array, "batch time width"]
    slopes: Float[Array, " heads"] | None = None

    def require_no_slopes(self, method: str) -> None:
        """Raises UnsupportedOp for slopes, which `method` knows nothing of."""
        if self.slopes is not None:
            raise UnsupportedOp(
                f"{method} have no linear biases: got a model with position='alibi'; "
                "take plain decoding"
            )


# (memory, shared, heads) -> (mixed, memory, shared), called once in each layer.
# `memory` is the layer's part of the cache: of arrays in it the layer's slice, and
# `KeysValues` whole, with the layer's number. `shared` is passed on from layer to
# layer, and `mixed`, the output of attention, has the shape of the query.
Attend = Callable[[Any, Any, Heads], tuple[jax.Array, Any, Any]]


@pytree
class Cache:
    """The key-value cache of a batch of sequences.

    Attributes:
      runs: memory of the layers, in order. A run holds consecutive layers whose memory
        has the same shape, stacked along axis 0.
      length: number of tokens in the cache for each sequence, int32 `[batch]`. Entries
        beyond it are garbage that will be overwritten, so reducing the length removes
        tokens.
    """

    runs: tuple[Any, ...]
    # `Any`, as below: a tree of a cache's form may hold shapes, to compile for.
    length: Any


@pytree
class KeysValues:
    """Keys and values of a run of layers, which a step writes where they are.

    To pass each layer its slice would copy all of them in every step.

    Attributes:
      keys: `[layers, batch, size, kv_heads, head_dim]`, floating.
      values: the same, except that clustered heads keep fewer keys than values.
      layer: inside of a layer, its number in the run, an int32 scalar; else None.
    """

    keys: Any
    values: Any
    layer: Any = None


def attend_cached(
    memory: KeysValues, shared: Any, heads: Heads
) -> tuple[jax.Array, KeysValues, Any]:
    """Writes keys and values to the cache, then attends causally to all in it."""
    memory = write_heads(memory, heads)
    mixed = kernels.cached_attention(
        heads.query,
        memory.keys,
        memory.values,
        heads.positions,
        layer=memory.layer,
        slopes=heads.slopes,
    )
    return mixed, memory, shared


def write_heads(memory: KeysValues, heads: Heads) -> KeysValues:
    """Returns the memory with a layer's keys and values of the new tokens written."""

    def write(rows: jax.Array, new: jax.Array) -> jax.Array:
        batch = jnp.arange(len(new))[:, None]
        # Tokens for which there is no room are not written.
        at = rows.at[memory.layer, batch, heads.positions]
        return at.set(new.astype(rows.dtype), mode="drop")

    return dataclasses.replace(
        memory,
        keys=write(memory.keys, heads.key),
        values=write(memory.values, heads.value),
    )


@pytree
class Decoding:
    """New tokens that follow those in a cache.

    Attributes:
      tokens: of each sequence, at positions from its `length` on. Tokens for which the
        cache has no room are not stored, so that logits after them are wrong.
      cache: the tokens before.
      at: indices of the new tokens whose logits are wanted; None means all.
      shared: initial value of what layers pass on, see `Attend`.
      attend: how layers use the cache, see `Attend`.
    """

    tokens: Int[Array, "batch time"]
    cache: Cache
    at: Int[Array, "batch places"] | None = None
    shared: Any = None
    attend: Attend = static(default=attend_cached)


def empty_cache(
    model: Model,
    batch: int,
    size: int,
    *,
    dtype: str | None = None,
    unrolled: bool = False,
) -> Cache:
    """Returns an empty cache.

    Args:
      model: a causal language model.
      batch: number of sequences.
      size: number of tokens of each sequence that it has room for.
      dtype: of keys and values; None means the model's.
      unrolled: whether each layer is a run of its own, which takes longer to compile.

    Raises:
      ConfigError: not a causal language model, one whose experts have a capacity, sizes
        below 1, or more tokens than the model has positions.

    Examples:
      >>> from hpcjax import models
      >>> model = models.causal_lm((8,), 11, depth=2, width=4, heads=2)
      >>> empty_cache(model, 3, 8).runs[0].keys.shape
      (2, 3, 8, 2, 2)
    """
    decoder = decoder_of(model)
    if decoder.crowded:
        raise ConfigError(
            "with capacity_factor what follows a text depends on its neighbours in the "
            "batch and on padding: decode with capacity_factor=None, which takes the "
            "same parameters"
        )
    if min(batch, size) < 1:
        raise ConfigError(
            f"batch and size must be at least 1: got batch={batch}, size={size}"
        )
    if decoder.context is not None and size > decoder.context:
        raise ConfigError(
            f"the model has {decoder.context} positions: got size={size} tokens"
        )
    shape = (batch, size, decoder.kv_heads, decoder.head_dim)

    def zeros(depth: int) -> jax.Array:
        return jnp.zeros((depth, *shape), dtype or decoder.dtype)

    depths = (1,) * decoder.depth if unrolled else (decoder.depth,)
    runs = tuple(KeysValues(keys=zeros(n), values=zeros(n)) for n in depths)
    return Cache(runs=runs, length=jnp.zeros(batch, jnp.int32))


def decoder_of(model: Model) -> Decoder:
    """Returns the sizes of a causal language model.

    Raises:
      ConfigError: the model is not one.
    """
    if model.decoder is None:
        raise ConfigError("the model is no causal language model: it cannot decode")
    return model.decoder
