"""The 3-D U-Net, which maps a volume to logits for each of its points."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.collectives.halo import Space
from hpcjax.core import checks, errors
from hpcjax.core.config import check_fields
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.cut_pixels import CutPixels
from hpcjax.models.modules import (
    FLOAT32,
    BatchNorm,
    axes_of_space,
    param,
    require_cuttable,
)
from hpcjax.models.volume_config import VolumeUNetConfig
from hpcjax.models.volumes import HE_FAN_IN, VolumeConv

# Channels of the two convolutions of each level down, and of the last.
_DOWN = (32, 64), (64, 128), (128, 256), (256, 512)


class _Double(nnx.Module):
    """Two 3³ convolutions, each with a batch norm and a ReLU."""

    def __init__(
        self, sizes: tuple[int, ...], name: str, sync_axis: str | None, policy: Policy
    ):
        for number in (1, 2):
            each = f"{name}/conv_{number}"
            conv = VolumeConv(*sizes[number - 1 : number + 1], name=each, policy=policy)
            norm = BatchNorm(sizes[number], policy=policy, sync_axis=sync_axis)
            setattr(self, f"conv_{number}", conv)
            setattr(self, f"norm_{number}", norm)

    def __call__(self, x: jax.Array, *, train: bool, space: Space) -> jax.Array:
        for number in (1, 2):
            y = getattr(self, f"conv_{number}")(x, space=space)
            y = getattr(self, f"norm_{number}")(y, train=train, space=space)
            x = jax.nn.relu(y)
        return x


class _Up(nnx.Module):
    """A transposed 2³ convolution, the skip connection, and two convolutions."""

    def __init__(
        self, wide: int, skip: int, name: str, sync_axis: str | None, policy: Policy
    ):
        self.kernel = param((2, 2, 2, wide, wide), HE_FAN_IN, policy.param)
        self.double = _Double((wide + skip, skip, skip), name, sync_axis, policy)
        self.compute = policy.compute

    def __call__(self, x: jax.Array, skip: jax.Array, **cut: Any) -> jax.Array:
        x = layers.conv_transpose(x, self.kernel[...], compute=self.compute)
        return self.double(jnp.concatenate([x, skip], axis=-1), **cut)


class _VolumeUNet(nnx.Module):
    """The network of `volume_unet`."""

    def __init__(
        self,
        channels: int,
        outputs: int,
        divisor: int,
        sync_axis: str | None,
        space: Space,
        policy: Policy,
    ):
        self.space, self.output = space, policy.output
        for level, (first, last) in enumerate(_DOWN):
            sizes = channels, first // divisor, last // divisor
            channels, name = sizes[-1], f"down_{level}"
            setattr(self, name, _Double(sizes, name, sync_axis, policy))
        for level in reversed(range(len(_DOWN) - 1)):
            wide, skip = _DOWN[level + 1][1] // divisor, _DOWN[level][1] // divisor
            name = f"up_{level}"
            setattr(self, name, _Up(wide, skip, name, sync_axis, policy))
        self.head = VolumeConv(
            _DOWN[0][1] // divisor, outputs, name="head", kernel_size=1, policy=policy
        )

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> Any:
        del key
        skips, cut = [], {"train": train, "space": self.space}
        for level in range(len(_DOWN) - 1):
            skips.append(getattr(self, f"down_{level}")(x, **cut))
            window = (2,) * 3, (2,) * 3, ((0, 0),) * 3, (1,) * 3
            require_cuttable(f"pool_{level}", skips[-1], self.space, *window)
            x = layers.pool(skips[-1], (2, 2, 2), space=self.space)
        x = getattr(self, f"down_{len(skips)}")(x, **cut)
        for level in reversed(range(len(skips))):
            x = getattr(self, f"up_{level}")(x, skips[level], **cut)
        y = self.head(x, space=self.space).astype(self.output)
        axes = axes_of_space(self.space)
        return CutPixels(values=y, axes=axes) if axes else y


def volume_unet(
    inputs: tuple[int, ...],
    outputs: int,
    *,
    width_divisor: int = 1,
    sync_axis: str | None = None,
    space: Space = (),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns a U-Net on volumes `[batch, depth, height, width, channels]`.

    Three levels of two 3³ convolutions (32 and 64, 64 and 128, 128 and 256 channels)
    and 2³ max-pooling, two of 256 and 512 below, and back by transposed 2³ convolutions
    of as many channels, with the level's features behind theirs, and two convolutions
    of 256, 128 and 64. Each convolution has a batch norm and a ReLU; none has a bias.
    The last is of 1³.

    Args:
      inputs: (depth, height, width, channels); 8 divides all sides.
      outputs: number of classes of a point.
      width_divisor: what channels are divided by, but for inputs and outputs.
      sync_axis: mesh axis over which batch statistics are averaged; None takes those of
        the samples that are here, over all blocks of them.
      space: mesh axes over which space is cut, see `layers.conv`; `apply` takes and
        gives this device's block then, as `CutPixels`.
      policy: dtypes of parameters, products and logits; norms are float32 at least.

    Returns:
      A model whose `apply` gives logits `[batch, depth, height, width, outputs]`.

    Raises:
      ConfigError: inputs that are no such volumes, or a divisor that does not divide
        the channels; when it is traced, blocks that are too thin for a layer.

    References:
      Oyama et al., The Case for Strong Scaling in Deep Learning, IEEE TPDS 2020.

    Examples:
      >>> from hpcjax import models
      >>> models.num_params(volume_unet((128, 128, 128, 1), 3))
      19070560
    """
    check_fields(VolumeUNetConfig, width_divisor=width_divisor)
    if len(inputs) != 4 or min(*inputs, outputs) < 1 or any(n % 8 for n in inputs[:3]):
        raise errors.ConfigError(
            "inputs must be (depth, height, width, channels) with sides that 8 divides,"
            f" and outputs at least 1: got inputs={inputs}, outputs={outputs}"
        )
    rule = "width_divisor must divide the 32 channels of the first layer"
    checks.require(32 % width_divisor == 0, rule, width_divisor=width_divisor)
    options = width_divisor, sync_axis, space, policy
    return from_nnx(lambda: _VolumeUNet(inputs[-1], outputs, *options))
