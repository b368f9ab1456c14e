"""VGG networks with batch normalization, for small images."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax.core import errors
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.modules import FLOAT32, BatchNorm, Conv, Dense
from hpcjax.models.vgg_config import VggConfig

# Convolutions of each stage; stage i has width times 1, 2, 4, 8, 8 channels.
STAGES = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
_GROWTH = (1, 2, 4, 8, 8)


class _Vgg(nnx.Module):
    """The network of `vgg`."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        depth: int,
        width: int,
        sync_axis: str | None,
        policy: Policy,
    ):
        stages = zip(STAGES[depth], _GROWTH, strict=True)
        channels = [width * growth for count, growth in stages for _ in range(count)]
        self.convolutions = len(channels)
        self.ends = tuple(itertools.accumulate(STAGES[depth]))
        for index, (fan_in, fan_out) in enumerate(
            itertools.pairwise([inputs, *channels])
        ):
            conv = Conv(fan_in, fan_out, kernel_size=3, use_bias=True, policy=policy)
            setattr(self, f"conv_{index}", conv)
            norm = BatchNorm(fan_out, policy=policy, sync_axis=sync_axis)
            setattr(self, f"norm_{index}", norm)
        self.head = Dense(channels[-1], outputs, policy=policy, output=policy.output)

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        del key
        for index in range(self.convolutions):
            x = getattr(self, f"conv_{index}")(x)
            x = jax.nn.relu(getattr(self, f"norm_{index}")(x, train=train))
            if index + 1 in self.ends:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(jnp.mean(x.astype(jnp.float32), axis=(1, 2)))


def vgg(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 16,
    width: int = 64,
    sync_axis: str | None = None,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a VGG network on images `[batch, height, width, channels]`.

    Five stages of 3×3 convolutions with bias, each followed by a batch norm and a ReLU.
    2×2 max-pooling halves the image after each stage, and one linear layer maps the
    mean over the remaining pixels to logits. This is the form that is trained on
    CIFAR-10.

    Args:
      inputs: (height, width, channels) of one image, sides of 32 at least.
      outputs: number of classes.
      depth: 11 or 16, the number of layers with weights in the original networks, which
        have three dense layers in place of this one.
      width: channels of the first stage; the others have 2, 4, 8 and 8 times as many.
      sync_axis: mesh axis over which batch statistics are averaged; None takes those of
        one device's examples.
      policy: dtypes of parameters, products and logits; norms are float32 at least.

    Raises:
      ConfigError: an unknown depth, a width below 1, or images that are too small.

    References:
      Simonyan, Zisserman: Very Deep Convolutional Networks, 2015, table 1.

    Examples:
      >>> from hpcjax.core import trees
      >>> model = vgg((32, 32, 3), 10)
      >>> trees.num_params(jax.eval_shape(model.init, jax.random.key(0))[0])
      14728266
    """
    check_fields(VggConfig, depth=depth, width=width)
    if len(inputs) != 3 or min(inputs[:2]) < 32:
        raise errors.ConfigError(
            f"inputs must be (height, width, channels) with sides of at least 32: "
            f"got inputs={inputs}"
        )
    return from_nnx(lambda: _Vgg(inputs[-1], outputs, depth, width, sync_axis, policy))
