"""Rotary positions with or without LLaMA 3's scaling of the wavelengths."""

import math

import jax
import jax.numpy as jnp

from hpcjax import layers
from hpcjax.models.config import RopeScaling


def rotate(
    x: jax.Array, positions: jax.Array, *, theta: float, scaling: RopeScaling | None
) -> jax.Array:
    """Rotates `[batch, time, heads, head_dim]` as `layers.rope` does.

    Args:
      x: queries or keys.
      positions: `[batch, time]`.
      theta: base of the wavelengths.
      scaling: what multiplies the frequencies; None: nothing.
    """
    if scaling is None:
        return layers.rope(x, positions, theta=theta)
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    turns = scaling.context * frequency / (2 * math.pi)
    kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    frequency = frequency * ((1 - kept) / scaling.factor + kept)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
