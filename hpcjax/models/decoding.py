"""What a language model is given besides tokens: what it remembers of those before.

A model maps tokens to logits, and a `Decoding` to logits and the new `Cache`. How its
layers attend to what they remember is a function in the `Decoding`: `attend_cached`
here, others elsewhere, such as those for clustered and for pruned heads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from hpcjax import layers
from hpcjax.core.errors import ConfigError
from hpcjax.core.model import Decoder, Model
from hpcjax.core.structs import pytree, static


class Heads(NamedTuple):
    """What a layer has of a call's tokens.

    Attributes:
      query: `[batch, time, heads, head_dim]`, rotated if the model rotates.
      key: the same with kv_heads.
      value: as `key`, never rotated.
      positions: of the tokens, `[batch, time]`.
      hidden: the residual stream in front of the block, `[batch, time, width]`.
    """

    query: Float[Array, "batch time heads head_dim"]
    key: Float[Array, "batch time kv_heads head_dim"]
    value: Float[Array, "batch time kv_heads head_dim"]
    positions: Int[Array, "batch time"]
    hidden: Float[Array, "batch time width"]


# (memory, shared, heads) -> (mixed, memory, shared), called once in each layer:
# `memory` is the layer's own, `shared` is handed on from layer to layer; `mixed` has
# the shape of query.
Attend = Callable[[Any, Any, Heads], tuple[jax.Array, Any, Any]]


@pytree
class Cache:
    """What a model remembers of the tokens it was given.

    Attributes:
      runs: memory of neighbouring layers of one shape, layers along axis 0, in order.
      length: tokens so far of each sequence. What lies behind is garbage that will be
        overwritten, so that a smaller length takes tokens back.
    """

    runs: tuple[Any, ...]
    length: Int[Array, " batch"]


@pytree
class KeysValues:
    """Keys and values of a run of layers.

    Attributes:
      keys: `[layers, batch, size, kv_heads, head_dim]`; without `layers` inside one.
      values: the same, and as many heads unless fewer keys are kept.
    """

    keys: Float[Array, "*layers batch size kv_heads head_dim"]
    values: Float[Array, "*layers batch size value_heads head_dim"]


def attend_cached(
    memory: KeysValues, shared: Any, heads: Heads
) -> tuple[jax.Array, KeysValues, Any]:
    """Writes keys and values at their positions and attends to all up to each query."""
    memory = write_heads(memory, heads)
    past = jnp.arange(memory.keys.shape[1]) <= heads.positions[..., None]
    return attend_where(past, memory, heads.query), memory, shared


def write_heads(memory: KeysValues, heads: Heads) -> KeysValues:
    """Returns one layer's memory with the keys and values of a call's tokens."""
    return KeysValues(
        keys=write_at(memory.keys, heads.key, heads.positions),
        values=write_at(memory.values, heads.value, heads.positions),
    )


def attend_where(
    seen: Bool[Array, "batch time size"],
    memory: KeysValues,
    query: Float[Array, "batch time heads head_dim"],
) -> Float[Array, "batch time heads head_dim"]:
    """Attends to what is remembered of the tokens that each query sees."""
    return layers.attention(
        query,
        memory.keys.astype(query.dtype),
        memory.values.astype(query.dtype),
        causal=False,
        mask=seen,
    )


def write_at(
    rows: Shaped[Array, "batch size *shape"],
    new: Shaped[Array, "batch time *shape"],
    positions: Int[Array, "batch time"],
) -> Shaped[Array, "batch size *shape"]:
    """Returns `rows` with `new` at each sequence's positions, those beyond left out."""
    batch = jnp.arange(len(rows))[:, None]
    return rows.at[batch, positions].set(new.astype(rows.dtype), mode="drop")


@pytree
class Decoding:
    """Tokens that follow those in a cache.

    Attributes:
      tokens: of each sequence, at the positions from its length on; those for which
        the cache has no room are forgotten, and what follows them is wrong.
      cache: what came before.
      at: which of the tokens logits are wanted for; None means all.
      shared: what the first layer is handed, if layers hand on anything.
      attend: how layers use their memory.
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
    """Returns the cache of no tokens.

    Args:
      model: a causal language model.
      batch: sequences.
      size: tokens there is room for, of each.
      dtype: of keys and values; None means the model's.
      unrolled: a run for each layer instead of one for all: longer to compile.

    Raises:
      ConfigError: no language model, one whose experts have a capacity, sizes below 1,
        or more tokens than the model has positions for.

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
    """Returns the sizes of a causal language model; a ConfigError for another."""
    if model.decoder is None:
        raise ConfigError("the model is no causal language model: it cannot decode")
    return model.decoder
