"""A Transformer that reads an image pixel by pixel and tells its class."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import models
from hpcjax.core import Model, Policy
from hpcjax.models import CausalLmConfig
from hpcjax.models.scan import scan_blocks, stack
from hpcjax.models.transformer import Block, Norm, Sizes

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
PIXELS, CLASSES = 64, 10


class _Pixels(nnx.Module):
    """The network of `pixels`."""

    def __init__(self, config: CausalLmConfig, mix: Mix | None):
        policy = Policy()
        sizes = Sizes(config, config.options, policy, causal=False)
        self.embed = models.Dense(1, config.width, policy=policy)
        self.position = models.param(
            (PIXELS, config.width), nnx.initializers.normal(1.0), policy.param
        )
        self.blocks = stack(Block(sizes), config.depth)
        self.norm = Norm(config.width, config.options, policy)
        self.head = models.Dense(config.width, CLASSES, policy=policy)
        self.mix = mix

    def __call__(
        self, x: jax.Array, *, train: bool, key: jax.Array | None
    ) -> jax.Array:
        del train, key
        y = self.embed(x.reshape(len(x), PIXELS, 1)) + self.position[...]
        positions = jnp.broadcast_to(jnp.arange(PIXELS), y.shape[:2])
        y = scan_blocks(
            self.blocks, y, lambda block, y: block(y, positions, mix=self.mix)
        )
        return self.head(jnp.mean(self.norm(y), axis=1))


def pixels(config: CausalLmConfig, mix: Mix | None) -> Model:
    """Returns the network, of images [batch, 8, 8, 1] in ten classes.

    Args:
      config: width, heads and depth of the blocks, which are not causal.
      mix: attention in the place of the dense one, such as `layers.sparse_attention`.
    """
    return models.from_nnx(lambda: _Pixels(config, mix))
