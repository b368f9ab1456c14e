"""A Transformer that reads an image pixel by pixel and tells its class."""

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import models
from hpcjax.core import Model, Policy
from hpcjax.models import CausalLmConfig
from hpcjax.models.block import Block, Norm, Sizes
from hpcjax.models.scan import scan_blocks, stack

PIXELS, CLASSES = 64, 10


class _Pixels(nnx.Module):
    """The network of `pixels`."""

    def __init__(self, config: CausalLmConfig):
        policy = Policy()
        sizes = Sizes(config, config.options, policy, causal=False)
        self.embed = models.Dense(1, config.width, policy=policy)
        self.position = models.param(
            (PIXELS, config.width), nnx.initializers.normal(1.0), policy.param
        )
        self.blocks = stack(Block(sizes), config.depth)
        self.norm = Norm(config.width, config.options, policy)
        self.head = models.Dense(config.width, CLASSES, policy=policy)

    def __call__(
        self, x: jax.Array, *, train: bool, key: jax.Array | None
    ) -> jax.Array:
        del train, key
        y = self.embed(x.reshape(len(x), PIXELS, 1)) + self.position[...]
        positions = jnp.broadcast_to(jnp.arange(PIXELS), y.shape[:2])
        y = scan_blocks(self.blocks, y, lambda block, y: block(y, positions))
        return self.head(jnp.mean(self.norm(y), axis=1))


def pixels(config: CausalLmConfig) -> Model:
    """Returns the network, of images [batch, 8, 8, 1] in ten classes.

    Args:
      config: width, heads, depth and options of the blocks, which are not causal.
    """
    return models.from_nnx(lambda: _Pixels(config))
