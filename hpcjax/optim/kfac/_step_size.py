"""The bound of K-FAC's step length, and adaptive damping."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.optim import norms

ADAPT_EVERY = 5


def kl_clip(
    inner: Float[Array, ""], rate: Float[Array, ""], bound: float | None
) -> Float[Array, ""]:
    """Returns ν = min(1, √(κ / |η² s|)), by which updates are scaled.

    To second order a step ηΔ changes the model's distribution by a KL divergence of
    about η² Δᵀ F Δ / 2, and with Δ = F⁻¹ g the quadratic form is η² s. ν bounds η² s by
    κ. It is 1 for s = 0 and without a bound, and NaN if s is NaN.

    Args:
      inner: s, the inner product of preconditioned and raw gradients over all layers.
      rate: η, the learning rate.
      bound: κ, or None for no bound.

    Examples:
      >>> float(kl_clip(jnp.float32(-4.0), jnp.float32(1.0), 1.0))
      0.5
    """
    if bound is None:
        return jnp.ones_like(inner)
    # The square root first: η² s may overflow float32 where η √s does not.
    length = jnp.abs(rate) * jnp.sqrt(jnp.abs(inner))
    nu = bound**0.5 / jnp.where(length == 0, 1, length)
    return jnp.where(length == 0, 1, jnp.minimum(1, nu)).astype(inner.dtype)


def inner_product(
    preconditioned: Mapping[Any, jax.Array], raw: Mapping[Any, jax.Array]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns s and a power of two p with Σ ⟨preconditioned, raw⟩ = p² s.

    Dividing both by p, which is about the largest raw gradient, is exact and keeps the
    products of gradients of 1e20 within float32.
    """
    unit = jnp.stack([norms.power_of_two(matrix) for matrix in raw.values()]).max()
    parts = [jnp.vdot(preconditioned[name] / unit, raw[name] / unit) for name in raw]
    return jnp.stack(parts).sum(), unit


def adapt_damping(
    damping: Float[Array, ""], gained: Float[Array, ""], predicted: Float[Array, ""]
) -> Float[Array, ""]:
    """Returns the next damping by the Levenberg–Marquardt rule.

    With the reduction ratio ρ = gained / predicted and ω = (19/20)⁵, γ becomes γω if
    ρ > 3/4, where the quadratic model predicted the loss well, and γ/ω if ρ < 1/4 or ρ
    is not finite. It is kept within [1e-8, 1e3].

    Args:
      damping: γ.
      gained: change of the loss by the step, negative if it fell.
      predicted: the change that the quadratic model predicts.

    References:
      Martens and Grosse, ICML 2015, §6.5.

    Examples:
      >>> damping, change = jnp.float32(1.0), jnp.float32(-1.0)
      >>> round(float(adapt_damping(damping, change, change)), 4)
      0.7738
    """
    omega = (19 / 20) ** ADAPT_EVERY
    ratio = gained / predicted
    bad = ~jnp.isfinite(ratio) | (ratio < 0.25)
    factor = jnp.where(bad, 1 / omega, jnp.where(ratio > 0.75, omega, 1.0))
    return jnp.clip(damping * factor, 1e-8, 1e3).astype(damping.dtype)
