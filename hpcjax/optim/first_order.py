"""SGD as PyTorch defines it, AdamW and row-wise Adagrad: the baselines."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from hpcjax.core import checks
from hpcjax.core.config import check_fields
from hpcjax.optim import norms
from hpcjax.optim.first_order_config import AdamWConfig, SgdConfig
from hpcjax.optim.full_precision import in_full_precision
from hpcjax.optim.optimizer_config import DECAY_ALL, DecayRules, OptimizerConfig
from hpcjax.optim.row_wise import scale_by_adagrad, scale_by_row_adagrad
from hpcjax.optim.weight_decay import add_weight_decay


def clip_global_norm(
    clip_norm: ArrayLike | None,
) -> optax.GradientTransformationExtraArgs:
    """Scales all gradients g by min(1, c/‖g‖), with the norm over all parameters.

    The norm neither overflows nor underflows. Expects averaged gradients; those of
    parameters that are spread over devices with `cut`, see `update_shards`.

    Args:
      clip_norm: c; None leaves gradients as they are.

    Raises:
      ConfigError: c is not finite and positive.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = clip_global_norm(1.0)
      >>> gradient = jnp.array([3e30, 4e30])
      >>> tx.update(gradient, tx.init(gradient))[0].round(3).tolist()
      [0.6000000238418579, 0.800000011920929]
    """
    check_fields(OptimizerConfig, clip_norm=clip_norm)

    def update(updates, state, params=None, cut=None, **extra_args):
        del params, extra_args
        if clip_norm is None:
            return updates, state
        total = norms.tree_norm(updates, cut or {})

        def clip(g):
            # g/‖g‖ first, then times c: the factor c/‖g‖ may underflow float32 for
            # gradients whose clipped values are representable.
            unit = g / jnp.where(total > 0, total, 1).astype(g.dtype)
            return jnp.where(total > clip_norm, unit * clip_norm, g)

        return jax.tree.map(clip, updates), state

    return in_full_precision(
        optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    )


class SmoothedNormState(NamedTuple):
    """State of `scale_by_smoothed_norm`.

    Attributes:
      count: int32, steps taken.
      norm: float32, the running mean of the gradient's norm.
    """

    count: jax.Array
    norm: jax.Array


def scale_by_smoothed_norm(
    momentum: ArrayLike = 0.9, eps: ArrayLike = 1e-6
) -> optax.GradientTransformationExtraArgs:
    """Gives gradients a running mean N of their global norm, g ← g N/(‖g‖ + ε).

    N₀ = ‖g₀‖ and N ← μN + (1 − μ)‖g‖. So steps on batches of several image sizes,
    whose gradients have norms of their own, have about one length. Expects averaged
    gradients; those of parameters that are spread over devices with `cut`, as
    `clip_global_norm`.

    Args:
      momentum: μ.
      eps: ε.

    Raises:
      ConfigError: μ is not in [0, 1), or ε is negative.

    References:
      `GradSmooth` of eladhoffer/utils.pytorch, regularization.py, as it is meant: in
      that file the mean's second term is lost, so that N = μᵗ‖g₀‖ and training stops.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_smoothed_norm(0.5)
      >>> state = tx.init(jnp.zeros(()))
      >>> for gradient in (1.0, 3.0):
      ...   update, state = tx.update(jnp.array(gradient), state)
      >>> round(float(update), 4)
      2.0
    """
    check_fields(SgdConfig, momentum=momentum)
    check_fields(AdamWConfig, eps=eps)

    def init(params):
        del params
        return SmoothedNormState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

    def update(updates, state, params=None, cut=None, **extra_args):
        del params, extra_args
        own = norms.tree_norm(updates, cut or {}).astype(jnp.float32)
        mean = momentum * state.norm + (1 - momentum) * own
        mean = jnp.where(state.count == 0, own, mean).astype(jnp.float32)

        length = jnp.where(own == 0, 1, own + eps)  # also where ε is none

        def scale(g):
            # In this order, as the quotient N/‖g‖ may overflow.
            return g / length.astype(g.dtype) * mean.astype(g.dtype)

        count: Any = optax.safe_increment(state.count)
        return jax.tree.map(scale, updates), SmoothedNormState(count, mean)

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))


def scale_by_momentum(
    momentum: ArrayLike = 0.9, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Returns the heavy-ball buffer b ← μb + g, or with Nesterov g + μb.

    The buffer is kept in float32 or better. Expects averaged gradients.

    Args:
      momentum: μ.
      nesterov: returns g + μb instead of b.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_momentum(0.5)
      >>> state = tx.init(jnp.zeros(()))
      >>> for _ in range(2):
      ...   update, state = tx.update(jnp.ones(()), state)
      >>> float(update)
      1.5
    """
    check_fields(SgdConfig, momentum=momentum)
    return in_full_precision(optax.trace(momentum, nesterov))


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: ArrayLike = 0.9,
    nesterov: bool = False,
    weight_decay: ArrayLike = 0.0,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stochastic gradient descent with momentum, as in PyTorch.

    g ← clip(g) + λθ;  b ← μb + g;  θ ← θ − ηb, with g + μb in place of b for Nesterov.
    Expects averaged gradients and computes in float32 or better.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      momentum: μ.
      nesterov: whether the update is g + μb.
      weight_decay: λ, the L2 coefficient.
      decay_rules: which parameters decay, see `add_weight_decay`.
      clip_norm: largest global norm of the raw gradient.

    Raises:
      ConfigError: a value out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = sgd(0.1)
      >>> params = jnp.array(1.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(params), params)
      >>> round(float(updates), 6)
      -0.2
    """
    checks.require_float32(lr=learning_rate)
    return in_full_precision(
        optax.chain(
            clip_global_norm(clip_norm),
            add_weight_decay(weight_decay, decay_rules),
            scale_by_momentum(momentum, nesterov),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 1e-2,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adam with decoupled weight decay.

    θ ← θ − η(m̂/(√v̂ + ε) + λθ), with bias-corrected moments m̂ and v̂ of the clip
    gradient. Expects averaged gradients and computes in float32 or better.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      b1: decay of m.
      b2: decay of v.
      eps: ε.
      weight_decay: λ.
      decay_rules: which parameters decay, see `add_weight_decay`.
      clip_norm: largest global norm of the raw gradient.

    Raises:
      ConfigError: a value out of its range.

    References:
      Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, Algorithm 2.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = adamw(0.1, weight_decay=0.0)
      >>> params = jnp.array(1.0)
      >>> updates, state = tx.update(jnp.array(2.0), tx.init(params), params)
      >>> round(float(updates), 3)
      -0.1
    """
    checks.require_float32(lr=learning_rate)
    check_fields(AdamWConfig, b1=b1, b2=b2, eps=eps)
    return in_full_precision(
        optax.chain(
            clip_global_norm(clip_norm),
            optax.scale_by_adam(b1, b2, eps),
            add_weight_decay(weight_decay, decay_rules),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def adagrad(
    learning_rate: optax.ScalarOrSchedule,
    eps: float = 1e-10,
    by_row: bool = False,
    weight_decay: ArrayLike = 0.0,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad, see `scale_by_adagrad`.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      eps: ε.
      by_row: whether a row has one number, see `scale_by_row_adagrad`.
      weight_decay: λ, decoupled and multiplied by η.
      decay_rules: which parameters decay, see `add_weight_decay`.
      clip_norm: largest global norm of the raw gradient.

    Raises:
      ConfigError: a value out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx, params = adagrad(0.1), jnp.ones(2)
      >>> updates, state = tx.update(jnp.array([5.0, 0.0]), tx.init(params), params)
      >>> updates.round(3).tolist()
      [-0.10000000149011612, -0.0]
    """
    checks.require_float32(lr=learning_rate)
    return in_full_precision(
        optax.chain(
            clip_global_norm(clip_norm),
            scale_by_row_adagrad(eps) if by_row else scale_by_adagrad(eps),
            add_weight_decay(weight_decay, decay_rules),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def row_adagrad(
    learning_rate: optax.ScalarOrSchedule,
    eps: float = 1e-8,
    weight_decay: ArrayLike = 0.0,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Adagrad with one number for each row, see `scale_by_row_adagrad`.

    Without decay and clipping, rows that have no gradient stay as they are.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      eps: ε.
      weight_decay: λ, decoupled and multiplied by η.
      decay_rules: which parameters decay, see `add_weight_decay`.
      clip_norm: largest global norm of the raw gradient.

    Raises:
      ConfigError: a value out of its range.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = row_adagrad(0.1)
      >>> params = jnp.ones((2, 3))
      >>> updates, state = tx.update(params.at[1].set(0), tx.init(params), params)
      >>> updates[:, 0].round(3).tolist()
      [-0.10000000149011612, -0.0]
    """
    return adagrad(learning_rate, eps, True, weight_decay, decay_rules, clip_norm)
