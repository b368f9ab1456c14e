"""Weight decay of the parameters that are chosen by regex rules."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from hpcjax.core import trees
from hpcjax.core.config import check_fields
from hpcjax.optim.optimizer_config import DECAY_ALL, DecayRules, OptimizerConfig


def decay_mask(decay_rules: DecayRules, params: Any) -> Any:
    """Returns a tree of booleans that says which parameters decay.

    Args:
      decay_rules: `(regex over paths, decays)`, the first match wins.
      params: tree of parameters or shapes.

    Raises:
      ConfigError: a rule is not a regex or matches no parameter, or a parameter matches
        no rule.

    Examples:
      >>> decay_mask((("bias", False), (".*", True)), {"bias": 0.0, "kernel": 0.0})
      {'bias': False, 'kernel': True}
    """
    if not jax.tree.leaves(params):
        return params
    return trees.choose_tree(decay_rules, params)


def add_weight_decay(
    weight_decay: ArrayLike,
    decay_rules: DecayRules = DECAY_ALL,
) -> optax.GradientTransformationExtraArgs:
    """Adds λθ to the update of every parameter that the rules choose.

    Before the momentum this is the L2 term of PyTorch's SGD; after it, decoupled decay.
    By default every parameter decays, biases too, as in PyTorch's SGD, so that a recipe
    tuned there means the same here.

    Args:
      weight_decay: λ.
      decay_rules: `(regex over paths, decays)`, the first match wins.

    Returns:
      A transform without state.

    Raises:
      ConfigError: λ is negative or not finite, or a rule is no regex; at init, a rule
        matches no parameter or a parameter no rule.
      ValueError: at update, if λ is not zero and `params` is not given.

    Examples:
      >>> tx = add_weight_decay(0.5)
      >>> params = {"w": jnp.array(2.0)}
      >>> updates, _ = tx.update({"w": jnp.array(1.0)}, tx.init(params), params)
      >>> float(updates["w"])
      2.0
    """
    check_fields(OptimizerConfig, weight_decay=weight_decay, decay_rules=decay_rules)
    # A traced coefficient cannot be compared here; it is then always added.
    off = isinstance(weight_decay, int | float) and weight_decay == 0

    def init(params):
        decay_mask(decay_rules, params)
        return optax.EmptyState()

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if off:
            return updates, state
        if params is None:
            raise ValueError("params must be given to update: weight_decay needs them")

        def decay(decays, u, p):
            return u + jnp.asarray(weight_decay, u.dtype) * p if decays else u

        mask = decay_mask(decay_rules, params)
        return jax.tree.map(decay, mask, updates, params), state

    return optax.GradientTransformationExtraArgs(init, update)
