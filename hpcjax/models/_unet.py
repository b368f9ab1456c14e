"""The U-Net, which maps an image to logits for each of its pixels."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.collectives.halo import Space
from hpcjax.core import errors
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models._resnet import GROUP_SIZE
from hpcjax.models.cut_pixels import CutPixels
from hpcjax.models.modules import (
    FLOAT32,
    Conv,
    Dense,
    GroupNorm,
    axes_of_space,
    require_cuttable,
)
from hpcjax.models.unet_config import UNetConfig


class _Double(nnx.Module):
    """Two 3×3 convolutions, each with a group norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int, policy: Policy):
        groups = outputs // math.gcd(outputs, GROUP_SIZE)
        conv = functools.partial(Conv, kernel_size=3, policy=policy)
        norm = functools.partial(GroupNorm, outputs, groups=groups, policy=policy)
        self.conv1, self.norm1 = conv(inputs, outputs), norm()
        self.conv2, self.norm2 = conv(outputs, outputs), norm()

    def __call__(self, x: jax.Array, *, train: bool, space: Space) -> jax.Array:
        cut = {"train": train, "space": space}
        x = jax.nn.relu(self.norm1(self.conv1(x, space=space), **cut))
        return jax.nn.relu(self.norm2(self.conv2(x, space=space), **cut))


class _Up(nnx.Module):
    """Doubles height and width, halves the channels, joins the skip connection."""

    def __init__(self, inputs: int, policy: Policy):
        self.conv = Conv(inputs, inputs // 2, kernel_size=3, policy=policy)
        self.double = _Double(inputs, inputs // 2, policy)

    def __call__(
        self, x: jax.Array, skip: jax.Array, *, train: bool, space: Space
    ) -> jax.Array:
        wide = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        joined = jnp.concatenate([skip, self.conv(wide, space=space)], axis=-1)
        return self.double(joined, train=train, space=space)


class _UNet(nnx.Module):
    """The network of `unet`."""

    def __init__(
        self,
        channels: int,
        outputs: int,
        depth: int,
        width: int,
        space: Space,
        policy: Policy,
    ):
        self.depth, self.space = depth, space
        widths = [width * 2**level for level in range(depth + 1)]
        for level, (inputs, wide) in enumerate(
            zip([channels, *widths], widths, strict=False)
        ):
            setattr(self, f"down_{level}", _Double(inputs, wide, policy))
        for level in range(depth):
            setattr(self, f"up_{level}", _Up(widths[level + 1], policy))
        self.head = Dense(width, outputs, policy=policy, output=policy.output)

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> Any:
        del key
        skips, cut = [], {"train": train, "space": self.space}
        for level in range(self.depth):
            skips.append(getattr(self, f"down_{level}")(x, **cut))
            # Not `jnp.max`, whose gradient divides by the number of pixels that equal
            # the maximum: XLA may recompute the pixels in the backward pass with
            # another rounding, so that none does.
            window = (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)
            require_cuttable(f"pool_{level}", skips[-1], self.space, *window)
            x = layers.pool(skips[-1], (2, 2), space=self.space)
        x = getattr(self, f"down_{self.depth}")(x, **cut)
        for level in reversed(range(self.depth)):
            x = getattr(self, f"up_{level}")(x, skips[level], **cut)
        axes = axes_of_space(self.space)
        return CutPixels(values=self.head(x), axes=axes) if axes else self.head(x)


def unet(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 3,
    width: int = 16,
    space: Space = (),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a U-Net on images `[batch, height, width, channels]`.

    The contracting path has `depth` levels of two 3×3 convolutions and 2×2 max-pooling,
    with `width`, 2·`width`, … channels. Each level of the expanding path has
    nearest-neighbour upsampling by 2, a convolution that halves the channels, and two
    convolutions of the result concatenated with the features of the same level of the
    contracting path. Every convolution except those after upsampling is followed by a
    group norm with 16 channels in a group and a ReLU; there is no state. The last layer
    `head` is dense over the channels of each pixel.

    Args:
      inputs: (height, width, channels) of one image; 2^depth divides both sides.
      outputs: number of classes of a pixel.
      depth: how often the image is halved.
      width: channels of the first level.
      space: mesh axes over which height and width are cut, see `layers.conv`; `apply`
        takes and gives this device's block then, as `CutPixels`.
      policy: dtypes of parameters, products and logits; norms are float32 at least.

    Returns:
      A model whose `apply` gives logits `[batch, height, width, outputs]`.

    Raises:
      ConfigError: a depth or width below 1, or inputs that are not an image's shape or
        cannot be halved so often; when it is traced, blocks that cannot.

    References:
      Ronneberger, Fischer, Brox: U-Net, 2015, with padded convolutions, group norms,
      and doubling by a convolution instead of its transpose.

    Examples:
      >>> model = unet((8, 8, 1), 2, depth=1, width=4)
      >>> params, state = model.init(jax.random.key(0))
      >>> x = jnp.zeros((3, 8, 8, 1))
      >>> model.apply(params, state, x, train=False)[0].shape
      (3, 8, 8, 2)
    """
    if len(inputs) != 3 or min(*inputs, outputs) < 1:
        raise errors.ConfigError(
            "inputs must be (height, width, channels) and outputs the number of "
            f"classes, at least 1: got inputs={inputs}, outputs={outputs}"
        )
    check_fields(UNetConfig, depth=depth, width=width)
    if any(side % 2**depth for side in inputs[:2]):
        raise errors.ConfigError(
            f"2**depth must divide height and width: got depth={depth}, inputs={inputs}"
        )
    return from_nnx(lambda: _UNet(inputs[-1], outputs, depth, width, space, policy))
