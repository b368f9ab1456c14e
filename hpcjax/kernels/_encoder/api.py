"""What an encoder layer does between its contractions, with gradients.

Each operation is one pass forward, and one backward, over the arrays that it reads: a
kernel on a GPU, the plain definition elsewhere. Dropout masks are drawn from a seed:
"recomputed" masks are drawn again for the gradient, "stored" ones kept as bytes; all
are the same masks.

References:
  Ivanov et al., Data Movement Is All You Need, MLSys 2021, §5; the kernels' names there
  are in the docstrings.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from hpcjax.core import checks
from hpcjax.core.config import Within
from hpcjax.core.errors import ConfigError
from hpcjax.kernels._dispatch import INTERPRETED, choose
from hpcjax.kernels._encoder import launch, reference
from hpcjax.kernels._encoder.dropout import check_seed, keep_mask
from hpcjax.kernels._encoder.reference import Kept
from hpcjax.kernels._triton.launch import run

_MASKS = ("recomputed", "stored")
_ACTIVATIONS = ("relu", "gelu_erf", "gelu_tanh")


class _Options(NamedTuple):
    """What is known before tracing: of all operations, and each one's own."""

    rate: float
    masks: str
    implementation: str
    order: tuple[int, ...] | None
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
    seed: UInt32[Array, "..."] | None = None,
    *,
    rate: float = 0.0,
    scale: float = 1.0,
    visible: Bool[Array, "..."] | None = None,
    masks: str = "recomputed",
    order: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Float[Array, "*batch keys"]:
    """Computes dropout(softmax(scale · scores)) over the keys (SM; backward BS).

    A query that sees no key has zeros, and no gradient.

    Args:
      scores: of any floating dtype; computed in float32.
      seed: of the mask, see `keep_mask`; needed if anything is dropped.
      rate: probability that a weight is dropped, in [0, 1).
      scale: factor of the scores.
      visible: which keys a query sees, broadcast to the shape of `scores`; None if all.
      masks: whether the gradient draws the mask again, or it is stored.
      order: the axes of the arrays in memory, by their numbers here, where the last is
        what is reduced; None for their own. The mask is that of the array here.
      implementation: `"reference"` for plain JAX; `"triton"` for kernels for a GPU that
        read each array once, forward and backward; `"interpreted"` for the same by
        numpy, slowly; `"auto"` for the kernels on a GPU, for rows of up to 8,192.

    Raises:
      ConfigError: a rate outside [0, 1), no seed, a scale that is not positive,
        `visible` of another shape, integers, or an unknown option.
      UnsupportedOp: the kernel is named and cannot run here, or not with the arguments.

    Examples:
      >>> softmax_dropout(jnp.zeros((1, 2))).tolist()
      [[0.5, 0.5]]
    """
    options = _Options(rate, masks, implementation, _tuple(order), scale=scale)
    options = _check("softmax_dropout", options, scores, seed)
    if visible is not None:
        own, whole = visible.shape, scores.shape
        rule = f"visible must be broadcast to scores of {list(whole)}"
        pairs = zip(own[::-1], whole[::-1], strict=False)
        good = len(own) <= len(whole) and all(a in (1, b) for a, b in pairs)
        checks.require(good, rule, shape=list(own))
        scores = jnp.where(visible, scores, -jnp.inf)
    return _laid_out(_softmax, options, (scores,), (), seed)


def dropout_residual_norm(  # noqa: PLR0913 - arrays and options
    x: Float[Array, "*batch dim"],
    bias: Float[Array, " dim"],
    residual: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"],
    shift: Float[Array, " dim"],
    seed: UInt32[Array, "..."] | None = None,
    *,
    rate: float = 0.0,
    eps: float = 1e-5,
    masks: str = "recomputed",
    order: Sequence[int] | None = None,
    implementation: str = "auto",
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
      order: likewise, of `x` and `residual`.
      implementation: likewise.

    Raises:
      ConfigError: as `softmax_dropout`, or shapes that differ.
      UnsupportedOp: likewise.

    Examples:
      >>> x, zero, one = jnp.array([[-1.0, 1.0]]), jnp.zeros(2), jnp.ones(2)
      >>> dropout_residual_norm(x, zero, x, one, zero, eps=0.0).tolist()
      [[-1.0, 1.0]]
    """
    options = _Options(rate, masks, implementation, _tuple(order), eps=eps)
    others = {"bias": bias, "scale": scale, "shift": shift}
    given = _check("dropout_residual_norm", options, x, seed, residual, **others)
    return _laid_out(_residual_norm, given, (x, residual), (bias, scale, shift), seed)


def bias_activation_dropout(
    x: Float[Array, "*batch dim"],
    bias: Float[Array, " dim"],
    seed: UInt32[Array, "..."] | None = None,
    *,
    activation: str = "relu",
    rate: float = 0.0,
    masks: str = "recomputed",
    order: Sequence[int] | None = None,
    implementation: str = "auto",
) -> Float[Array, "*batch dim"]:
    """Computes dropout(f(x + bias)) (BAD, also BRD; backward BDRLB).

    Args:
      x: any floating dtype, which the result has too; computed in float32.
      bias: of the product that x comes from.
      seed: of the mask; needed if anything is dropped.
      activation: f, "relu", "gelu_erf" as in BERT, or "gelu_tanh" as in GPT-2.
      rate: probability that an element is dropped, in [0, 1).
      masks: see `softmax_dropout`.
      order: likewise, of `x`.
      implementation: likewise.

    Raises:
      ConfigError: as `softmax_dropout`, shapes that differ, or an unknown activation.
      UnsupportedOp: likewise.

    Examples:
      >>> bias_activation_dropout(jnp.array([[-2.0, 2.0]]), jnp.ones(2)).tolist()
      [[0.0, 3.0]]
    """
    checks.require_choice("activation", activation, _ACTIVATIONS)
    options = _Options(
        rate, masks, implementation, _tuple(order), activation=activation
    )
    options = _check("bias_activation_dropout", options, x, seed, bias=bias)
    return _laid_out(_activation, options, (x,), (bias,), seed)


def _tuple(order: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if order is None else tuple(order)


def _check(
    operation: str,
    options: _Options,
    x: Any,
    seed: Any,
    *wholes: Any,
    **rows: Any,
) -> _Options:
    """Returns the options with the implementation that runs."""
    Within("[0, 1)")("rate", options.rate)
    checks.require_choice("masks", options.masks, _MASKS)
    checks.require_positive(scale=options.scale)
    checks.require_finite(0, eps=options.eps)
    rule = f"{operation} works along the last of at least one axis"
    checks.require(x.ndim > 0, rule, shape=list(x.shape))
    order = tuple(range(x.ndim)) if options.order is None else options.order
    rule = "order must have each axis once"
    checks.require(sorted(order) == list(range(x.ndim)), rule, order=order)
    canonical = [x.shape[order.index(axis)] for axis in range(x.ndim)]
    for each in (x, *wholes, *rows.values()):
        good = jnp.issubdtype(each.dtype, jnp.floating)
        checks.require(good, f"{operation} takes floats", dtype=each.dtype.name)
    for each in wholes:
        rule = "what passes beside x must have its shape"
        checks.require(each.shape == x.shape, rule, x=x.shape, residual=each.shape)
    for name, row in rows.items():
        rule = f"{name} must have a number for each of x's last axis"
        checks.require(row.shape == (canonical[-1],), rule, x=x.shape, given=row.shape)
    if options.rate and seed is None:
        raise ConfigError(f"dropout needs a seed: got rate={options.rate}, seed=None")
    if seed is not None:
        check_seed(seed, canonical)
    problem = launch.find_problem(x, options.order)
    chosen = choose(operation, options.implementation, unsupported=problem)
    return options._replace(implementation=chosen)


def _laid_out(
    function: Any, options: _Options, wholes: Any, rows: Any, seed: Any
) -> jax.Array:
    """Calls an operation; the definition gets arrays in the canonical order."""
    order, seed = options.order, jnp.uint32(0) if seed is None else seed
    if order is None or options.implementation != "reference":
        return function(options, *wholes, *rows, seed)
    back = np.argsort(order).tolist()
    turned = (jnp.transpose(each, back) for each in wholes)
    y = function(options._replace(order=None), *turned, *rows, seed)
    return jnp.transpose(y, order)


def _run(
    kernel: str, options: _Options, like: Any, seed: Any, *inputs: Any, **own: Any
) -> tuple[jax.Array, ...]:
    """Returns the outputs of a kernel, whose inputs end with the mask, or the seeds."""
    seeds = seed.reshape(-1).astype(jnp.uint32)
    planned = launch.plan(
        kernel,
        like,
        options.order,
        seeds=len(seeds),
        rate=options.rate,
        stored=options.masks == "stored",
        **own,
    )
    interpreted = options.implementation == INTERPRETED
    return run(planned, *inputs, seeds, interpreted=interpreted)


def _is_plain(options: _Options) -> bool:
    return options.implementation == "reference"


def _stored(options: _Options, mask: jax.Array) -> Kept:
    """Returns the mask that a forward kernel has written, if it has."""
    return mask if options.masks == "stored" and options.rate else None


def _mask(saved: tuple[Any, Any]) -> jax.Array:
    """Returns what a backward kernel takes as the mask, of one byte if it draws it."""
    return jnp.zeros(1, jnp.uint8) if saved[1] is None else saved[1]


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
    if not _is_plain(options):
        y, weights, mask = _run(
            "softmax", options, scores, seed, scores, SCALE=options.scale
        )
        weights = weights if options.rate else y
        return y, (weights, (seed, _stored(options, mask)))
    kept = _draw(options, seed, scores.shape)
    y, weights = reference.softmax_dropout(scores, kept, options.rate, options.scale)
    return y, (weights, _save(options, seed, kept))


def _softmax_backward(options: _Options, saved: Any, grad: jax.Array) -> Any:
    weights, mask = saved
    if not _is_plain(options):
        given = (grad, weights, _mask(mask))
        (own,) = _run(
            "softmax_backward", options, grad, mask[0], *given, SCALE=options.scale
        )
        return own, _no_gradient(mask)
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
    x, residual, bias, scale, shift, seed = args
    arrays = (x, bias, residual, scale, shift)
    if _is_plain(options):
        kept = _draw(options, seed, x.shape)
        y, normed, inverse = reference.dropout_residual_norm(
            *arrays, kept, options.rate, options.eps
        )
    else:
        y, normed, inverse, kept = _run(
            "residual_norm", options, x, seed, *arrays, EPS=options.eps
        )
        kept = _stored(options, kept)
    # The dtypes of the parameters, whose gradients have them too.
    like = tuple(jnp.zeros((), leaf.dtype) for leaf in (residual, bias, scale, shift))
    return y, (normed, inverse, scale, like, _save(options, seed, kept))


def _residual_norm_backward(options: _Options, saved: Any, grad: jax.Array) -> Any:
    normed, inverse, scale, like, mask = saved
    if _is_plain(options):
        kept = _load(options, mask, normed.shape)
        d_scale, d_shift = reference.norm_parameters_backward(grad, normed)
        d_residual, d_x = reference.norm_dropout_backward(
            grad, normed, inverse, scale, kept, options.rate
        )
        d_bias = reference.widen(d_x).sum(tuple(range(d_x.ndim - 1)))
    else:
        given = (grad, normed, inverse, scale, _mask(mask))
        d_residual, d_x, *sums = _run(
            "residual_norm_backward", options, grad, mask[0], *given
        )
        d_scale, d_shift, d_bias = (each.sum(0) for each in sums)
    others = zip((d_residual, d_bias, d_scale, d_shift), like, strict=True)
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
    if not _is_plain(options):
        own = {"ACTIVATION": options.activation}
        y, mask = _run("activation", options, x, seed, x, bias, **own)
        return y, (x, bias, (seed, _stored(options, mask)))
    kept = _draw(options, seed, x.shape)
    y = reference.bias_activation_dropout(
        x, bias, kept, options.rate, options.activation
    )
    return y, (x, bias, _save(options, seed, kept))


def _activation_backward(options: _Options, saved: Any, grad: jax.Array) -> Any:
    x, bias, mask = saved
    if not _is_plain(options):
        given = (grad, x, bias, _mask(mask))
        own = {"ACTIVATION": options.activation}
        d_x, sums = _run("activation_backward", options, x, mask[0], *given, **own)
        return d_x, sums.sum(0).astype(bias.dtype), _no_gradient(mask)
    kept = _load(options, mask, x.shape)
    d_x, d_bias = reference.bias_activation_dropout_backward(
        grad, x, bias, kept, options.rate, options.activation
    )
    return d_x, d_bias.astype(bias.dtype), _no_gradient(mask)


_activation.defvjp(_activation_forward, _activation_backward)
