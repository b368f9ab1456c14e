"""Definitions in plain JAX of the fused operations and of their backward operations.

Sums, statistics and functions are float32 at least; results have the dtype of the
input. `kept` is a mask, None if all is kept; `rate` is the probability with which an
element is dropped.
"""

from typing import Any

import jax
import jax.numpy as jnp

Kept = jax.Array | None


def widen(x: jax.Array) -> jax.Array:
    """Returns x in float32, or wider if it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def drop(x: jax.Array, kept: Kept, rate: float) -> jax.Array:
    """Returns x / (1 − rate) where it is kept, else zero; its own transpose."""
    return x if kept is None else jnp.where(kept, x / (1 - rate), 0)


def softmax_dropout(
    scores: jax.Array, kept: Kept, rate: float, scale: float
) -> tuple[jax.Array, jax.Array]:
    """SM: the dropped weights, and the weights softmax(scale · scores), last axis."""
    scaled = widen(scores) * scale
    largest = scaled.max(axis=-1, keepdims=True)
    # Where every score is −∞, no weight is given: exp(−∞ − 0) = 0.
    shifted = jnp.exp(scaled - jnp.where(jnp.isneginf(largest), 0, largest))
    total = shifted.sum(axis=-1, keepdims=True)
    weights = shifted / jnp.where(total == 0, 1, total)
    return drop(weights, kept, rate).astype(scores.dtype), weights.astype(scores.dtype)


def softmax_dropout_backward(
    grad: jax.Array, weights: jax.Array, kept: Kept, rate: float, scale: float
) -> jax.Array:
    """BS: the gradient of the scores, scale · w (g − Σ w g) of the undropped g."""
    own, wide = drop(widen(grad), kept, rate), widen(weights)
    inner = (wide * own).sum(axis=-1, keepdims=True)
    return (scale * wide * (own - inner)).astype(grad.dtype)


def normalise(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns x with mean 0 and variance 1 along the last axis, and 1/√(var + eps).

    The variance is the mean of squared differences, in a second pass: E[x²] − E[x]² has
    no digit left where the mean is 10⁴ times the deviation.
    """
    centred = widen(x) - widen(x).mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(variance + eps)
    return centred * inverse, inverse


def dropout_residual_norm(
    x: jax.Array,
    bias: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    kept: Kept,
    rate: float,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """BDRLN: LayerNorm(dropout(x + bias) + residual), and what its gradient needs.

    Returns:
      The output; the normalised sum, of the same dtype; 1/std, `[..., 1]`.
    """
    total = drop(widen(x) + widen(bias), kept, rate) + widen(residual)
    normed, inverse = normalise(total, eps)
    y = normed * widen(scale) + widen(shift)
    return y.astype(x.dtype), normed.astype(x.dtype), inverse


def norm_parameters_backward(
    grad: jax.Array, normed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """BSB: the gradients of scale and shift, Σ g n and Σ g over all but the last."""
    axes = tuple(range(grad.ndim - 1))
    wide = widen(grad)
    return (wide * widen(normed)).sum(axes), wide.sum(axes)


def norm_dropout_backward(
    grad: jax.Array,
    normed: jax.Array,
    inverse: jax.Array,
    scale: jax.Array,
    kept: Kept,
    rate: float,
) -> tuple[jax.Array, jax.Array]:
    """BLNRD: the gradients of the residual and of x.

    With h = g · scale and means over the last axis, that of the sum is
    (h − mean(h) − n mean(h n)) / std.
    """
    own, wide = widen(grad) * widen(scale), widen(normed)
    mean = own.mean(axis=-1, keepdims=True)
    along = (own * wide).mean(axis=-1, keepdims=True)
    total = (own - mean - wide * along) * inverse
    return total.astype(grad.dtype), drop(total, kept, rate).astype(grad.dtype)


def _activate(x: jax.Array, activation: str) -> jax.Array:
    if activation == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def bias_activation_dropout(
    x: jax.Array,
    bias: jax.Array,
    kept: Kept,
    rate: float,
    activation: str,
) -> jax.Array:
    """BAD: dropout(f(x + bias))."""
    active = _activate(widen(x) + widen(bias), activation)
    return drop(active, kept, rate).astype(x.dtype)


def bias_activation_dropout_backward(
    grad: jax.Array,
    x: jax.Array,
    bias: jax.Array,
    kept: Kept,
    rate: float,
    activation: str,
) -> tuple[jax.Array, jax.Array]:
    """BDRLB: the gradients of x, and of the bias, its sum over all but the last."""
    before = widen(x) + widen(bias)
    if activation == "relu":
        slope = (before > 0).astype(before.dtype)
    elif activation == "gelu_tanh":
        ones = jnp.ones_like(before)
        slope = jax.jvp(jax.nn.gelu, (before,), (ones,))[1]
    else:
        density = jnp.exp(-(before**2) / 2) / jnp.sqrt(2 * jnp.pi).astype(before.dtype)
        slope = jax.scipy.stats.norm.cdf(before) + before * density
    total = drop(widen(grad), kept, rate) * slope
    return total.astype(grad.dtype), total.sum(tuple(range(grad.ndim - 1)))


def attention_biases(stacked: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    """AIB: queries, keys and values of their stack `[3, ...]`, biases added."""
    biased: Any = widen(stacked) + widen(bias)
    return tuple(part.astype(stacked.dtype) for part in biased)
