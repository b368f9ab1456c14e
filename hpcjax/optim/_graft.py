"""Grafting: the direction of one optimizer's step with the length of another's."""

from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array

from hpcjax.core import trees
from hpcjax.core.method import take_extra_args
from hpcjax.core.patterns import check_patterns
from hpcjax.optim import norms
from hpcjax.optim.full_precision import in_full_precision


class GraftState(NamedTuple):
    """States of the two optimizers.

    Attributes:
      direction: state of the optimizer that gives the direction.
      magnitude: state of the optimizer that gives the length.
    """

    direction: Any
    magnitude: Any


def _rescale(step: Array, size: Array) -> Array:
    """Returns `step` with the norm of `size`."""
    return norms.rescale(step, norms.norm(step), norms.norm(size))


def graft(
    direction: optax.GradientTransformation,
    magnitude: optax.GradientTransformation,
    layerwise: bool = True,
    stacked: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Steps along `direction` as far as `magnitude` would have gone.

    Both optimizers see the same gradients. With their steps m and s the result is
    Δ = (‖s‖/‖m‖) m, and Δ = 0 where m = 0. Norms are those of each parameter, or over
    all parameters, in float32 or better.

    Args:
      direction: gives the direction, such as `scale_by_jorge()`.
      magnitude: gives the length, such as `scale_by_momentum(0.9)`.
      layerwise: norms per parameter rather than over all parameters.
      stacked: regexes of parameters whose first axis is a stack of layers; each layer
        has a norm of its own.

    Returns:
      A transform whose state is a `GraftState`.

    Raises:
      ConfigError: an entry of `stacked` is no regex.

    References:
      Agarwal et al., Disentangling Adaptive Gradient Methods from Learning Rates,
      arXiv 2002.11803, 2020.

    Examples:
      >>> import jax.numpy as jnp
      >>> tx = graft(optax.scale_by_sign(), optax.identity())
      >>> gradient = jnp.array([0.0, 1.0, 4.0, 1.0, 3.0, 3.0])
      >>> updates, _ = tx.update(gradient, tx.init(gradient))
      >>> [round(float(u), 3) for u in updates]
      [0.0, 2.683, 2.683, 2.683, 2.683, 2.683]
    """
    check_patterns("stacked", stacked)
    first = take_extra_args(direction=direction)
    second = take_extra_args(magnitude=magnitude)

    def init(params):
        return GraftState(first.init(params), second.init(params))

    def update(updates, state, params=None, **extra_args):
        steps, one = first.update(updates, state.direction, params, **extra_args)
        sizes, two = second.update(updates, state.magnitude, params, **extra_args)
        if layerwise:
            lengths = trees.flatten(sizes)
            grafted = trees.unflatten(
                steps,
                {
                    path: norms.by_layer(_rescale, stacked, path)(step, lengths[path])
                    for path, step in trees.flatten(steps).items()
                },
            )
        else:
            old, new = norms.tree_norm(steps), norms.tree_norm(sizes)
            grafted = jax.tree.map(lambda m: norms.rescale(m, old, new), steps)
        return grafted, GraftState(one, two)

    return in_full_precision(optax.GradientTransformationExtraArgs(init, update))
