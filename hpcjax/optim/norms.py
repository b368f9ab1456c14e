"""Norms and scalings that neither overflow nor vanish in float32."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def power_of_two(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns 2^e ≤ max|x| < 2^(e+1), within the range whose inverse is finite.

    Dividing by it is exact, and brings the entries into (−2, 2).

    Examples:
      >>> float(power_of_two(jnp.array([3.0, -5.0])))
      4.0
    """
    largest = jnp.max(jnp.abs(x), initial=0.0)
    # The exponent's bits alone are the power of two; those of infinity are the mask.
    mask = np.asarray(jnp.inf, x.dtype).view(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(largest, mask.dtype)
    power = jax.lax.bitcast_convert_type(bits & mask, x.dtype)
    limit = 2.0 ** (jnp.finfo(x.dtype).maxexp - 4)
    return jnp.clip(power, 1 / limit, limit)


def norm(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns the Euclidean norm of all entries, for any scale of them.

    Examples:
      >>> round(float(norm(jnp.array([3e20, 4e20], jnp.float32))) / 5e20, 4)
      1.0
    """
    scale = power_of_two(x)
    return scale * jnp.sqrt(jnp.sum(jnp.square(x / scale)))


def tree_norm(tree: Any) -> Float[Array, ""]:
    """Returns the Euclidean norm over all leaves, float32 or better.

    Examples:
      >>> float(tree_norm({"a": jnp.array([3.0]), "b": jnp.array(4.0)}))
      5.0
    """
    parts = [norm(leaf) for leaf in jax.tree.leaves(tree)]
    return norm(jnp.stack(parts)) if parts else jnp.zeros(())


def rescale(
    x: Float[Array, "*s"], old: Float[Array, ""], new: Float[Array, ""]
) -> Float[Array, "*s"]:
    """Returns x, whose norm is `old`, with the norm `new`; zero where `old` is.

    Examples:
      >>> rescale(jnp.array([3.0, 4.0]), jnp.array(5.0), jnp.array(10.0)).tolist()
      [6.0, 8.0]
    """
    # Divided first: old and new may each be outside the range of their quotient.
    unit = x / jnp.where(old > 0, old, 1)
    return jnp.where(old > 0, unit * new, 0).astype(x.dtype)


def by_layer(
    function: Callable[..., Array], stacked: tuple[str, ...], path: str
) -> Callable[..., Array]:
    """Returns `function`, applied to each layer where the path is that of a stack.

    Args:
      function: of arrays that belong to one parameter.
      stacked: regexes of parameters whose first axis is a stack of layers.
      path: of the parameter.

    Examples:
      >>> by_layer(norm, ("^blocks/",), "blocks/scale")(jnp.eye(2)).tolist()
      [1.0, 1.0]
    """
    is_stack = any(re.search(rule, path) for rule in stacked)
    return jax.vmap(function) if is_stack else function


def cosine(x: Float[Array, "*s"], y: Float[Array, "*s"]) -> Float[Array, ""]:
    """Returns ⟨x, y⟩/(‖x‖‖y‖), zero if either is zero.

    Examples:
      >>> round(float(cosine(jnp.array([1e-30, 0.0]), jnp.array([1.0, 1.0]))), 6)
      0.707107
    """
    x, y = x / power_of_two(x), y / power_of_two(y)
    both = jnp.sqrt(jnp.sum(x * x)) * jnp.sqrt(jnp.sum(y * y))
    return jnp.where(both > 0, jnp.sum(x * y) / jnp.where(both > 0, both, 1), 0)
