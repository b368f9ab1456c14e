"""Learning rates that are kept in an optimizer's state, so that they can be logged."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from hpcjax.core import checks


def with_schedule(
    factory: Callable[..., optax.GradientTransformation],
    learning_rate: float | optax.Schedule,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Returns `factory(learning_rate, **options)` with the rate in its state.

    Only the learning rate is injected: the other options stay Python values, which
    the factory may check and branch on.

    Args:
      factory: a function of `learning_rate` and `options`.
      learning_rate: a number or a schedule.
      **options: passed on unchanged.

    Returns:
      A transform whose state has `hyperparams["learning_rate"]`, float32.

    Raises:
      ConfigError: a number that is negative or not finite in float32.

    Examples:
      >>> tx = with_schedule(optax.sgd, lambda step: 0.5)
      >>> float(tx.init({"w": jnp.ones(2)}).hyperparams["learning_rate"])
      0.5
    """
    checks.require(callable(factory), "factory must be a function", factory=factory)
    checks.require_float32(learning_rate=learning_rate)

    def build(learning_rate):
        return factory(learning_rate, **options)

    # By default optax takes the parameters' dtype, and bfloat16 has 8 bits for a rate.
    injected = optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)
    return injected(learning_rate=learning_rate)
