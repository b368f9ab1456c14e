"""Complete optimizers around a preconditioner: grafting, decay and learning rate."""

from typing import Any, Literal

import optax
from jax.typing import ArrayLike

from hpcjax.core import checks
from hpcjax.core.config import check_fields
from hpcjax.optim._graft import graft as graft_transform
from hpcjax.optim.first_order import clip_global_norm, scale_by_momentum
from hpcjax.optim.full_precision import in_full_precision
from hpcjax.optim.jorge_config import JorgeOptions
from hpcjax.optim.optimizer_config import DECAY_ALL, DecayRules, GraftedConfig
from hpcjax.optim.shampoo_config import ShampooOptions
from hpcjax.optim.weight_decay import add_weight_decay


def _complete(
    direction: optax.GradientTransformation,
    stacked: tuple[str, ...],
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: ArrayLike,
    graft: str,
    graft_momentum: ArrayLike,
    graft_nesterov: bool,
    decay_rules: DecayRules,
    clip_norm: ArrayLike | None,
) -> optax.GradientTransformationExtraArgs:
    """Chains clipping, the direction, grafted or not, decoupled decay, and the rate."""
    checks.require_float32(lr=learning_rate)
    check_fields(GraftedConfig, graft=graft, graft_momentum=graft_momentum)
    if graft == "sgd":
        magnitude = scale_by_momentum(graft_momentum, graft_nesterov)
        direction = graft_transform(direction, magnitude, stacked=stacked)
    # The decay comes after grafting: it is decoupled, not part of the grafted norm.
    return in_full_precision(
        optax.chain(
            clip_global_norm(clip_norm),
            direction,
            add_weight_decay(weight_decay, decay_rules),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def jorge(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: ArrayLike = 0.0,
    graft: Literal["sgd", "none"] = "sgd",
    graft_momentum: ArrayLike = 0.9,
    graft_nesterov: bool = False,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Jorge with SGD grafting and decoupled weight decay.

    With m from `scale_by_jorge` and b SGD's momentum buffer of the same gradients:
    θ ← θ − η((‖b‖/‖m‖)m + λθ), norms per parameter. Expects averaged gradients and
    computes in float32 or better.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      weight_decay: λ, decoupled.
      graft: `"sgd"`, or `"none"`, which keeps the raw length and is for ablations.
      graft_momentum: decay of SGD's momentum buffer.
      graft_nesterov: whether that SGD's momentum is Nesterov's.
      decay_rules: which parameters decay, see `add_weight_decay`.
      clip_norm: largest global norm of the raw gradient.
      **options: the fields of `JorgeOptions`.

    Raises:
      ConfigError: a value out of its range.
      TypeError: at init, for complex or integer parameters.

    References:
      Singh, Sating, Bhatele, Jorge, arXiv 2310.12298.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = jorge(0.5, update_every=1)
      >>> params = jnp.eye(2)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates.round(3).tolist()
      [[-0.5, -0.0], [-0.0, -0.5]]
    """
    chosen = JorgeOptions.of(options, jorge)
    return _complete(
        chosen.make(),
        chosen.stacked,
        learning_rate,
        weight_decay,
        graft,
        graft_momentum,
        graft_nesterov,
        decay_rules,
        clip_norm,
    )


def shampoo(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: ArrayLike = 0.0,
    graft: Literal["sgd", "none"] = "sgd",
    graft_momentum: ArrayLike = 0.9,
    graft_nesterov: bool = False,
    decay_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Shampoo with SGD grafting and decoupled weight decay.

    The same as `jorge`, with m from `scale_by_shampoo`.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      weight_decay: λ, decoupled.
      graft: `"sgd"`, or `"none"`, which keeps the raw length.
      graft_momentum: decay of SGD's momentum buffer.
      graft_nesterov: whether that SGD's momentum is Nesterov's.
      decay_rules: which parameters decay, see `add_weight_decay`.
      clip_norm: largest global norm of the raw gradient.
      **options: the fields of `ShampooOptions`.

    Raises:
      ConfigError: a value out of its range.
      TypeError: at init, for complex or integer parameters.

    References:
      Gupta, Koren, Singer, Shampoo, arXiv 1802.09568, Algorithm 1.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = shampoo(0.5)
      >>> params = jnp.eye(2)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> updates.round(3).tolist()
      [[-0.5, -0.0], [-0.0, -0.5]]
    """
    chosen = ShampooOptions.of(options, shampoo)
    return _complete(
        chosen.make(),
        chosen.stacked,
        learning_rate,
        weight_decay,
        graft,
        graft_momentum,
        graft_nesterov,
        decay_rules,
        clip_norm,
    )
