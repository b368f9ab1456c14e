"""Norms and scalings that neither overflow nor underflow in float32."""

import collections
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.core import trees
from hpcjax.core.varying import vary


def power_of_two(x: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns the power of two with 2^e ≤ max|x| < 2^(e+1), clipped.

    It is clipped to a range in which both it and its inverse are normal numbers.
    Division by a power of two is exact, and this one brings all entries into (−2, 2).

    Examples:
      >>> float(power_of_two(jnp.array([3.0, -5.0])))
      4.0
    """
    largest = jnp.max(jnp.abs(x), initial=0.0)
    # A float with zero mantissa bits is a power of two. Infinity has all exponent bits
    # set and no others, so it is the mask that clears sign and mantissa.
    mask = np.asarray(jnp.inf, x.dtype).view(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(largest, mask.dtype)
    power = jax.lax.bitcast_convert_type(bits & mask, x.dtype)
    limit = 2.0 ** (jnp.finfo(x.dtype).maxexp - 4)
    return jnp.clip(power, 1 / limit, limit)


def norm(x: Float[Array, "..."], axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """Returns the Euclidean norm of all entries, which may be of any magnitude.

    Args:
      x: the array, or this device's part of it.
      axes: mesh axes along which the array is cut.

    Examples:
      >>> round(float(norm(jnp.array([3e20, 4e20], jnp.float32))) / 5e20, 4)
      1.0
    """
    scale = power_of_two(x)
    own = scale * jnp.sqrt(jnp.sum(jnp.square(x / scale)))
    return _join(own, axes) if axes else own


def _join(own: Float[Array, ""], axes: tuple[str, ...]) -> Float[Array, ""]:
    """Returns the norm of an array of which each device has a part with its norm."""
    own = vary(own, axes)
    scale = jax.lax.pmax(power_of_two(own), axes)
    return scale * jnp.sqrt(jax.lax.psum(jnp.square(own / scale), axes))


def tree_norm(tree: Any, cut: Mapping[str, tuple[str, ...]] = {}) -> Float[Array, ""]:
    """Returns the Euclidean norm over all leaves, float32 or better.

    Args:
      tree: arrays, or this device's parts of them.
      cut: mesh axes along which leaves are cut, by path.

    Examples:
      >>> float(tree_norm({"a": jnp.array([3.0]), "b": jnp.array(4.0)}))
      5.0
    """
    parts = collections.defaultdict(list)
    for path, leaf in trees.flatten(tree).items():
        parts[cut.get(path, ())].append(norm(leaf))
    # The norm of norms: two collectives for all leaves that are cut alike.
    norms = [norm(jnp.stack(own), axes) for axes, own in parts.items()]
    return norm(jnp.stack(norms)) if norms else jnp.zeros(())


def rescale(
    x: Float[Array, "*s"], old: Float[Array, ""], new: Float[Array, ""]
) -> Float[Array, "*s"]:
    """Returns x·new/old, or zero if `old` is: x of norm `old` gets the norm `new`.

    Of a norm that is NaN it is NaN, not zero, which nobody would notice.

    Examples:
      >>> rescale(jnp.array([3.0, 4.0]), jnp.array(5.0), jnp.array(10.0)).tolist()
      [6.0, 8.0]
    """
    # x/old first, then times new: the quotient new/old may overflow or underflow.
    unit = x / jnp.where(old == 0, 1, old)
    return jnp.where(old == 0, 0, unit * new).astype(x.dtype)


def by_layer(
    function: Callable[..., Array], stacked: tuple[str, ...], path: str
) -> Callable[..., Array]:
    """Returns `function`, mapped over the first axis if the path is that of a stack.

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
    quotient = jnp.sum(x * y) / jnp.where(both == 0, 1, both)
    return jnp.where(both == 0, 0, quotient)
