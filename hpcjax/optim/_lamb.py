"""LAMB: Adam's step, scaled to the norm of the parameter that it updates."""

import functools

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from hpcjax.core import checks, trees
from hpcjax.core.config import check_fields
from hpcjax.core.patterns import check_stacked, matches_any
from hpcjax.optim import norms
from hpcjax.optim.first_order import clip_global_norm
from hpcjax.optim.full_precision import in_full_precision
from hpcjax.optim.lamb_config import LambConfig
from hpcjax.optim.optimizer_config import DECAY_ALL, DecayRules
from hpcjax.optim.weight_decay import add_weight_decay, decay_mask


def _scale_to_param(update: Array, param: Array, axes: tuple[str, ...] = ()) -> Array:
    """Returns `update` with the norm of `param`, unchanged if that is zero."""
    length = norms.norm(param, axes)
    scaled = norms.rescale(update, norms.norm(update, axes), length)
    return jnp.where(length == 0, update, scaled)


def scale_by_trust_ratio(
    trust_rules: DecayRules = DECAY_ALL,
    stacked: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Scales the update u of every parameter θ by ‖θ‖/‖u‖, by 1 where a norm is zero.

    Norms are those of each parameter, and neither overflow nor underflow. Expects
    averaged updates; of parameters that are spread over devices with `cut`, see
    `update_shards`.

    Args:
      trust_rules: `(regex over paths, whether to scale)`, the first match wins; other
        updates are left as they are.
      stacked: regexes of parameters whose first axis is a stack of layers; each layer
        has a ratio of its own.

    Returns:
      A transform without state.

    Raises:
      ConfigError: a rule or an entry of `stacked` is no regex; at init, one matches no
        parameter, or a parameter no rule.
      ValueError: at update, if `params` is not given.

    References:
      You et al., Large Batch Optimization for Deep Learning, arXiv 1904.00962, 2020,
      §3, with φ(z) = z.

    Examples:
      >>> tx = scale_by_trust_ratio()
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([0.0, 2.0]), tx.init(params), params)
      >>> updates.tolist()
      [0.0, 5.0]
    """
    check_fields(LambConfig, trust_rules=trust_rules, stacked=stacked)

    def init(params):
        decay_mask(trust_rules, params)
        check_stacked(stacked, trees.paths(params))
        return optax.EmptyState()

    def update(updates, state, params=None, cut=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError("params must be given to update: ratios need their norms")
        scaled = trees.flatten(decay_mask(trust_rules, params))
        owners, cut = trees.flatten(params), cut or {}
        of_layer = getattr(cut, "of_layer", cut)

        def scale(path, leaf):
            if not scaled[path]:
                return leaf
            axes = of_layer if matches_any(stacked, path) else cut
            own = functools.partial(_scale_to_param, axes=axes.get(path, ()))
            return norms.by_layer(own, stacked, path)(leaf, owners[path])

        leaves = trees.flatten(updates)
        new = {path: scale(path, leaf) for path, leaf in leaves.items()}
        return trees.unflatten(updates, new), state

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    weight_decay: ArrayLike = 1e-2,
    decay_rules: DecayRules = DECAY_ALL,
    trust_rules: DecayRules = DECAY_ALL,
    clip_norm: ArrayLike | None = None,
    stacked: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """LAMB: layer-wise adaptive moments for large batches.

    u = m̂/(√v̂ + ε) + λθ;  θ ← θ − η (‖θ‖/‖u‖) u, with bias-corrected moments m̂ and v̂
    of the clipped gradient and norms per parameter. Expects averaged gradients and
    computes in float32 or better. With `clip_norm=1.0` it is NVLAMB, which first
    divides all gradients by their global norm where that is above 1.

    Without rules, `clip_norm` and `stacked` it gives what `optax.lamb` gives. That has
    none of the three, which BERT's recipes and scanned stacks need, and its norms
    overflow or vanish where squares of the entries do; so it is not used here, except
    for its moments.

    Args:
      learning_rate: η, a number, a schedule or a traced scalar.
      b1: decay of m.
      b2: decay of v.
      eps: ε.
      weight_decay: λ; the decay is part of what the ratio scales.
      decay_rules: which parameters decay, see `add_weight_decay`.
      trust_rules: which parameters have a trust ratio, see `scale_by_trust_ratio`;
        BERT's recipes leave out biases and norms here and in `decay_rules`.
      clip_norm: largest global norm of the raw gradient.
      stacked: parameters that are stacks of layers, see `scale_by_trust_ratio`.

    Raises:
      ConfigError: a value out of its range.

    References:
      You et al., Large Batch Optimization for Deep Learning, arXiv 1904.00962, 2020,
      Algorithm 2.

    Examples:
      >>> tx = lamb(0.1, weight_decay=0.0)
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, state = tx.update(jnp.array([2.0, -2.0]), tx.init(params), params)
      >>> [round(float(u), 3) for u in updates]
      [-0.354, 0.354]
    """
    checks.require_float32(lr=learning_rate)
    check_fields(LambConfig, b1=b1, b2=b2, eps=eps)
    # The order is Algorithm 2's: the decay λθ is added before the trust ratio, so that
    # ‖u‖ contains it, and η multiplies last.
    return in_full_precision(
        optax.chain(
            clip_global_norm(clip_norm),
            optax.scale_by_adam(b1, b2, eps),
            add_weight_decay(weight_decay, decay_rules),
            scale_by_trust_ratio(trust_rules, stacked),
            optax.scale_by_learning_rate(learning_rate),
        )
    )
