"""Masks of dropout from a seed and the place of an element, drawn again at any time."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from hpcjax.core import checks
from hpcjax.core.config import Within

# Odd, and with bits spread evenly: 2³² over the golden ratio (Knuth, volume 3, §6.4).
_SPREAD = 0x9E3779B9


def keep_mask(
    seed: UInt32[Array, "..."],
    shape: Sequence[int],
    rate: float,
    order: Sequence[int] | None = None,
) -> Bool[Array, "..."]:
    """Returns which elements dropout keeps, each with probability 1 − rate.

    An element is kept if a hash of the seed and of its index in the flattened array is
    at least rate · 2³². The same element is kept in every layout, on every device, and
    whenever the mask is drawn again.

    Args:
      seed: of the mask, or of each element of the first axis, `[shape[0]]`, whose
        elements are then numbered from 0.
      shape: of the array whose elements are numbered, fewer than 2³² of one seed.
      rate: probability that an element is dropped, in [0, 1).
      order: the axes of that array in the order in which the result has them; None for
        their own.

    Raises:
      ConfigError: a rate outside [0, 1), too many elements, seeds of another shape, or
        no order of the axes.

    Examples:
      >>> kept = keep_mask(jnp.uint32(1), (2, 3), 0.5)
      >>> turned = keep_mask(jnp.uint32(1), (2, 3), 0.5, order=(1, 0))
      >>> bool((kept == turned.T).all())
      True
    """
    Within("[0, 1)")("rate", rate)
    check_seed(seed, shape)
    order = tuple(range(len(shape))) if order is None else tuple(order)
    rule = "order must have each axis once"
    checks.require(sorted(order) == list(range(len(shape))), rule, order=order)
    laid_out = tuple(shape[axis] for axis in order)
    index = jnp.zeros(laid_out, jnp.uint32)
    for place, axis in enumerate(order):
        if axis == 0 and seed.ndim:
            continue
        step = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        along = jax.lax.broadcasted_iota(jnp.uint32, laid_out, place)
        index = index + along * step
    own = _mix(seed.astype(jnp.uint32))
    if seed.ndim:
        own = own.reshape([-1 if axis == 0 else 1 for axis in order])
    # Mixed before the seed is added: masks would be one sequence at different places.
    hashed = _mix(_mix(index * jnp.uint32(_SPREAD)) + own)
    return hashed >= jnp.uint32(limit_of(rate))


def limit_of(rate: float) -> int:
    """Returns the hash from which an element is kept, at least 1 if any is dropped."""
    # A rate just below 1 has no threshold of its own in 32 bits.
    return min(max(round(rate * 2**32), int(rate > 0)), 2**32 - 1)


def check_seed(seed: Any, shape: Sequence[int]) -> None:
    """Raises ConfigError for seeds that a mask of a shape cannot have."""
    several = bool(np.ndim(seed))
    if several:
        good = len(shape) > 1 and seed.shape == (shape[0],)
        rule = "seeds must be one, or one for each element of the first of several axes"
        checks.require(good, rule, seeds=list(seed.shape), shape=list(shape))
    rule = "a mask has fewer than 2**32 elements of a seed"
    checks.require(math.prod(shape[several:]) < 2**32, rule, shape=list(shape))


def _mix(x: jax.Array) -> jax.Array:
    """Returns a permutation of 32-bit words, the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))
