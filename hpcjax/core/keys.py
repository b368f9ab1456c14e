"""Random keys derived by name and step, so that a changed tree changes no draw."""

import zlib

import jax
from jaxtyping import Array, Int


def derive(
    key: jax.Array, name: str, step: int | Int[Array, ""] | None = None
) -> jax.Array:
    """Returns the key for `name`, and for one step of it when `step` is given.

    The name enters through its CRC-32, which is the same in every process and version.

    Args:
      key: a typed key, `jax.random.key(seed)`.
      name: what the key is for, such as `"dropout"` or a parameter's path.
      step: optional counter, non-negative, may be traced.

    Examples:
      >>> key = jax.random.key(0)
      >>> bool(derive(key, "init") == derive(key, "dropout"))
      False
    """
    named = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return named if step is None else jax.random.fold_in(named, step)
