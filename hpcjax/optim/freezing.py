"""Random freezing: zeroing the gradients of random blocks."""

import jax
import jax.numpy as jnp
import optax

from hpcjax.core import checks, keys, trees
from hpcjax.optim.layer_blocks import Blocks


def freeze_at_random(
    blocks: Blocks, seed: int
) -> optax.GradientTransformationExtraArgs:
    """Keeps each block's gradient with probability (k + 1) / 2k, zeroes it otherwise.

    That is the share of block gradients which the k roles of `PartialBackward` compute:
    role i has those of i blocks, Σᵢ i / k² = (k + 1) / 2k. The draws are independent
    for blocks and steps, and the same on all devices.

    Args:
      blocks: the parameters in k blocks.
      seed: of the draws.

    Returns:
      A transform without state, whose `update` also needs the keyword `step`.

    Raises:
      TypeError: when traced, if `step` is missing.
    """
    checks.require_has("what cut_layers returns", ("paths", "numbers"), blocks=blocks)
    number, k = blocks.numbers(), len(blocks.paths)

    def init(params):
        blocks.check(params)
        return optax.EmptyState()

    def update(updates, state, params=None, *, step=None, **extra_args):
        del params, extra_args
        if step is None:  # all steps would draw the same
            raise TypeError("freeze_at_random needs the step to draw for: step=")
        key = keys.derive(jax.random.key(seed), "freeze", step)
        kept = jax.random.bernoulli(key, (k + 1) / (2 * k), (k,))
        masked = {
            path: jnp.where(kept[number[path] - 1], leaf, 0)
            for path, leaf in trees.flatten(updates).items()
        }
        return trees.unflatten(updates, masked), state

    return optax.GradientTransformationExtraArgs(init, update)
