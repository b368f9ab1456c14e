"""What an encoder layer does between its contractions, with gradients.

Each operation is one pass forward, and one or two backward, over the arrays that it
reads. Dropout masks are drawn from a seed: "recomputed" masks are drawn again for the
gradient, "stored" ones kept as bytes; both are the same masks.

References:
  Ivanov et al., Data Movement Is All You Need, MLSys 2021, §5; the kernels' names there
  are in the docstrings.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from hpcjax.core import checks
from hpcjax.core.config import Within
from hpcjax.core.errors import ConfigError
from hpcjax.kernels._encoder import reference
from hpcjax.kernels._encoder.dropout import keep_mask
from hpcjax.kernels._encoder.reference import Kept

_MASKS = ("recomputed", "stored")
_ACTIVATIONS = ("relu", "gelu_erf")


class _Options(NamedTuple):
    """What is known before tracing: of dropout, and the operation's own."""

    rate: float
    masks: str
    scale: float = 1.0
    eps: float = 0.0
    activation: str = "relu"


def attention_biases(
    stacked: Float[Array, "3 *batch dim"], bias: Float[Array, "3 ..."]
) -> tuple[Float[Array, "*batch dim"], ...]:
    """Adds the biases of queries, keys and values in one pass (AIB; backward BAIB).

    Args:
      stacked: queries, keys and values of one product.
      bias: likewise, of a shape that can be broadcast to that of `stacked`.

    Examples:
      >>> stacked, bias = jnp.zeros((3, 2, 4)), jnp.ones((3, 1, 4))
      >>> query, key, value = attention_biases(stacked, bias)
      >>> query.shape, float(value.sum())
      ((2, 4), 8.0)
    """
    return reference.attention_biases(stacked, bias)


def softmax_dropout(
    scores: Float[Array, "*batch keys"],
    seed: UInt32[Array, ""] | None = None,
    *,
    rate: float = 0.0,
    scale: float = 1.0,
    visible: Bool[Array, "..."] | None = None,
    masks: str = "recomputed",
) -> Float[Array, "*batch keys"]:
    """Computes dropout(softmax(scale · scores)) over the keys (SM; backward BS).

    A query that sees no key has zeros, and no gradient.

    Args:
      scores: of any floating dtype; computed in float32.
      seed: of the mask; needed if anything is dropped.
      rate: probability that a weight is dropped, in [0, 1).
      scale: factor of the scores.
      visible: which keys a query sees, broadcast to the shape of `scores`; None if all.
      masks: whether the gradient draws the mask again, or it is stored.

    Raises:
      ConfigError: a rate outside [0, 1), no seed, a scale that is not positive,
        `visible` of another shape, or an unknown option.

    Examples:
      >>> softmax_dropout(jnp.zeros((1, 2))).tolist()
      [[0.5, 0.5]]
    """
    options = _check(_Options(rate, masks, scale=scale), seed)
    if visible is not None:
        own, whole = visible.shape, scores.shape
        rule = f"visible must be broadcast to scores of {list(whole)}"
        pairs = zip(own[::-1], whole[::-1], strict=False)
        good = len(own) <= len(whole) and all(a in (1, b) for a, b in pairs)
        checks.require(good, rule, shape=list(own))
        scores = jnp.where(visible, scores, -jnp.inf)
    return _softmax(options, scores, _seed(seed))


def dropout_residual_norm(
    x: Float[Array, "*batch dim"],
    bias: Float[Array, " dim"],
    residual: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"],
    shift: Float[Array, " dim"],
    seed: UInt32[Array, ""] | None = None,
    *,
    rate: float = 0.0,
    eps: float = 1e-5,
    masks: str = "recomputed",
) -> Float[Array, "*batch dim"]:
    """Computes LayerNorm(dropout(x + bias) + residual) (BDRLN; backward BSB, BLNRD).

    Args:
      x: any floating dtype, which the result has too; statistics are float32.
      bias: of the product that x comes from.
      residual: what passes beside it.
      scale: of the norm.
      shift: likewise.
      seed: of the mask; needed if anything is dropped.
      rate: probability that an element is dropped, in [0, 1).
      eps: added to the variance.
      masks: see `softmax_dropout`.

    Raises:
      ConfigError: as `softmax_dropout`.

    Examples:
      >>> x, zero, one = jnp.array([[-1.0, 1.0]]), jnp.zeros(2), jnp.ones(2)
      >>> dropout_residual_norm(x, zero, x, one, zero, eps=0.0).tolist()
      [[-1.0, 1.0]]
    """
    options = _check(_Options(rate, masks, eps=eps), seed)
    return _residual_norm(options, x, bias, residual, scale, shift, _seed(seed))


def bias_activation_dropout(
    x: Float[Array, "*batch dim"],
    bias: Float[Array, " dim"],
    seed: UInt32[Array, ""] | None = None,
    *,
    activation: str = "relu",
    rate: float = 0.0,
    masks: str = "recomputed",
) -> Float[Array, "*batch dim"]:
    """Computes dropout(f(x + bias)) (BAD, also BRD; backward BDRLB).

    Args:
      x: any floating dtype, which the result has too; computed in float32.
      bias: of the product that x comes from.
      seed: of the mask; needed if anything is dropped.
      activation: f, "relu", or "gelu_erf" as in BERT.
      rate: probability that an element is dropped, in [0, 1).
      masks: see `softmax_dropout`.

    Raises:
      ConfigError: as `softmax_dropout`, or an unknown activation.

    Examples:
      >>> bias_activation_dropout(jnp.array([[-2.0, 2.0]]), jnp.ones(2)).tolist()
      [[0.0, 3.0]]
    """
    checks.require_choice("activation", activation, _ACTIVATIONS)
    options = _check(_Options(rate, masks, activation=activation), seed)
    return _activation(options, x, bias, _seed(seed))


def _check(options: _Options, seed: Any) -> _Options:
    Within("[0, 1)")("rate", options.rate)
    checks.require_choice("masks", options.masks, _MASKS)
    checks.require_positive(scale=options.scale)
    checks.require_finite(0, eps=options.eps)
    if options.rate and seed is None:
        raise ConfigError(f"dropout needs a seed: got rate={options.rate}, seed=None")
    return options


def _seed(seed: jax.Array | None) -> jax.Array:
    return jnp.uint32(0) if seed is None else seed


def _draw(options: _Options, seed: Any, shape: tuple[int, ...]) -> Kept:
    return keep_mask(seed, shape, options.rate) if options.rate else None


def _save(options: _Options, seed: Any, kept: Kept) -> tuple[Any, Any]:
    """Returns what the gradient needs to have the mask: the seed, or also the mask."""
    return seed, kept if options.masks == "stored" else None


def _load(options: _Options, saved: tuple[Any, Any], shape: tuple[int, ...]) -> Kept:
    seed, kept = saved
    return _draw(options, seed, shape) if kept is None else kept


def _no_gradient(saved: tuple[Any, Any]) -> np.ndarray:
    """Returns the gradient of a seed."""
    return np.zeros(saved[0].shape, jax.dtypes.float0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(options: _Options, scores: jax.Array, seed: jax.Array) -> jax.Array:
    return _softmax_forward(options, scores, seed)[0]


def _softmax_forward(options: _Options, scores: jax.Array, seed: jax.Array) -> Any:
    kept = _draw(options, seed, scores.shape)
    y, weights = reference.softmax_dropout(scores, kept, options.rate, options.scale)
    return y, (weights, _save(options, seed, kept))


def _softmax_backward(options: _Options, saved: Any, grad: jax.Array) -> Any:
    weights, mask = saved
    kept = _load(options, mask, weights.shape)
    own = reference.softmax_dropout_backward(
        grad, weights, kept, options.rate, options.scale
    )
    return own, _no_gradient(mask)


_softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(options: _Options, *args: jax.Array) -> jax.Array:
    return _residual_norm_forward(options, *args)[0]


def _residual_norm_forward(options: _Options, *args: jax.Array) -> Any:
    *arrays, seed = args
    x, bias, residual, scale, shift = arrays
    kept = _draw(options, seed, x.shape)
    y, normed, inverse = reference.dropout_residual_norm(
        x, bias, residual, scale, shift, kept, options.rate, options.eps
    )
    # The dtypes of the parameters, whose gradients have them too.
    like = tuple(jnp.zeros((), leaf.dtype) for leaf in (bias, residual, scale, shift))
    return y, (normed, inverse, scale, like, _save(options, seed, kept))


def _residual_norm_backward(options: _Options, saved: Any, grad: jax.Array) -> Any:
    normed, inverse, scale, like, mask = saved
    kept = _load(options, mask, normed.shape)
    d_scale, d_shift = reference.norm_parameters_backward(grad, normed)
    d_residual, d_x = reference.norm_dropout_backward(
        grad, normed, inverse, scale, kept, options.rate
    )
    d_bias = reference.widen(d_x).sum(tuple(range(d_x.ndim - 1)))
    others = zip((d_bias, d_residual, d_scale, d_shift), like, strict=True)
    cast = (leaf.astype(own.dtype) for leaf, own in others)
    return d_x, *cast, _no_gradient(mask)


_residual_norm.defvjp(_residual_norm_forward, _residual_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activation(
    options: _Options, x: jax.Array, bias: jax.Array, seed: jax.Array
) -> jax.Array:
    return _activation_forward(options, x, bias, seed)[0]


def _activation_forward(
    options: _Options, x: jax.Array, bias: jax.Array, seed: jax.Array
) -> Any:
    kept = _draw(options, seed, x.shape)
    y = reference.bias_activation_dropout(
        x, bias, kept, options.rate, options.activation
    )
    return y, (x, bias, _save(options, seed, kept))


def _activation_backward(options: _Options, saved: Any, grad: jax.Array) -> Any:
    x, bias, mask = saved
    kept = _load(options, mask, x.shape)
    d_x, d_bias = reference.bias_activation_dropout_backward(
        grad, x, bias, kept, options.rate, options.activation
    )
    return d_x, d_bias.astype(bias.dtype), _no_gradient(mask)


_activation.defvjp(_activation_forward, _activation_backward)
