"""Random keys derived by name, step and example: who else draws changes no draw."""

import functools
import math
import zlib
from typing import Any, overload

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from hpcjax.core.structs import pytree


@pytree
class BatchKey:
    """The key of a batch, of which a device may have some of the rows.

    Attributes:
      key: a typed key, the same wherever rows of this batch are.
      rows: int32 [rows], the places in the whole batch of the rows that are here.
    """

    key: Any
    rows: Any


Key = jax.Array | BatchKey
Step = int | Int[Array, ""] | None


@overload
def derive(key: BatchKey, name: str, step: Step = None) -> BatchKey: ...
@overload
def derive(key: jax.Array, name: str, step: Step = None) -> jax.Array: ...
def derive(key: Key, name: str, step: Step = None) -> Key:
    """Returns the key for `name`, and for one step of it when `step` is given.

    The name enters through its CRC-32, which is the same in every process and version.

    Args:
      key: a typed key, `jax.random.key(seed)`, or that of a batch.
      name: what the key is for, such as `"dropout"` or a parameter's path.
      step: optional counter, non-negative, may be traced.

    Examples:
      >>> key = jax.random.key(0)
      >>> bool(derive(key, "init") == derive(key, "dropout"))
      False
    """
    if isinstance(key, BatchKey):
        return BatchKey(key=derive(key.key, name, step), rows=key.rows)
    named = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return named if step is None else jax.random.fold_in(named, step)


def each_row(key: Key, rows: int) -> jax.Array:
    """Returns a key for each row of a batch, [rows], by its place in the whole batch.

    What is drawn by it, with `jax.vmap`, is the same for an example however the batch
    is shared out over devices and passes.

    Args:
      key: that of the batch; of a plain key the rows are 0, 1, 2, ...
      rows: how many there are.

    Raises:
      ValueError: the key is of another number of rows.

    Examples:
      >>> keys = each_row(jax.random.key(0), 4)
      >>> jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (3,)))(keys).shape
      (4, 3)
    """
    if not isinstance(key, BatchKey):
        key = BatchKey(key=key, rows=jnp.arange(rows, dtype=jnp.int32))
    if len(key.rows) != rows:
        raise ValueError(f"the key is of {len(key.rows)} rows: got {rows} rows")
    return jax.vmap(jax.random.fold_in, (None, 0))(key.key, key.rows)


def whole_batch(key: Key) -> jax.Array:
    """Returns the key for what all rows share, such as a graph of which they are part.

    It is the same on all devices, and in all passes.

    Examples:
      >>> key = jax.random.key(0)
      >>> bool(whole_batch(BatchKey(key=key, rows=jnp.arange(2))) == key)
      True
    """
    return key.key if isinstance(key, BatchKey) else key


def from_row(key: jax.Array, start: Int[Array, ""], width: int) -> jax.Array:
    """Returns a key that draws later rows of what `key` draws, without the first ones.

    What is drawn of shape [n, width] is to the bit rows start, ..., start + n − 1 of
    what `key` draws of that width, if it is drawn at once, a number by its place, as by
    `jax.random.normal` or `uniform`. It serves for nothing else.

    Args:
      key: of JAX's own kind, threefry.
      start: the first row, from 0; may be traced.
      width: numbers of a row, below 2¹⁶.

    Raises:
      ValueError: another kind of key, wider rows, or draws in an order of their own.

    Examples:
      >>> key = jax.random.key(0)
      >>> late = jax.random.normal(from_row(key, 5, 3), (2, 3))
      >>> bool((late == jax.random.normal(key, (7, 3))[5:]).all())
      True
    """
    ordered = jax.config.jax_threefry_partitionable  # pyrefly: ignore[missing-attribute]
    good = jax.random.key_impl(key) == "threefry2x32" and ordered and width < 2**16
    if not good:
        raise ValueError(f"rows are drawn by key, threefry, below 65,536 wide: {width}")
    # start · width = (high · width) 2¹⁶ + low · width, whose terms fit in 32 bits each.
    high, low = jnp.asarray(start, jnp.uint32) >> 16, jnp.asarray(start, jnp.uint32)
    below = (low & 0xFFFF) * width
    above = high * width + (below >> 16)  # all bits of the product from bit 16 on
    first = jnp.stack([above >> 16, (above << 16) | (below & 0xFFFF)])
    data = jnp.concatenate([jax.random.key_data(key), first])
    return jax.random.wrap_key_data(data, impl=_from_number())


@functools.cache
def _from_number() -> Any:
    """Returns the kind of key that has the number from which on it draws."""

    def bits(data: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        if width > 32:
            raise ValueError(f"rows are drawn of at most 32 bits: got {width}")
        place = jnp.arange(math.prod(shape), dtype=np.uint32)
        low = place + data[3]
        high = data[2] + (low < place)
        words = [jnp.broadcast_to(word, low.shape) for word in data[:2]]
        drawn = jax.extend.random.threefry2x32_p.bind(*words, high, low)
        mixed = (drawn[0] ^ drawn[1]).reshape(shape)
        return mixed.astype(f"uint{width}")

    def refuse(*given: Any) -> Any:
        raise ValueError(f"a key of rows draws once, and makes no other: {len(given)}")

    return jax.extend.random.define_prng_impl(
        key_shape=(4,),
        seed=refuse,
        split=refuse,
        random_bits=bits,
        fold_in=refuse,
        name="threefry_from_number",
        tag="from",
    )
