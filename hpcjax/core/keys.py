"""Random keys derived by name, step and example: who else draws changes no draw."""

import zlib
from typing import Any, overload

import jax
import jax.numpy as jnp
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
