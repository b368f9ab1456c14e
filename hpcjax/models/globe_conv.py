"""The step of which networks of the globe consist: a convolution, a norm, ReLU."""

import math
from typing import Literal

import jax
from flax import nnx

from hpcjax.core.dtypes import Policy
from hpcjax.layers import GlobePadding, pad_globe
from hpcjax.models.modules import (
    HE_FAN_OUT,
    ZEROS,
    BatchNorm,
    Conv,
    GroupNorm,
    Initializer,
)

FieldNorm = Literal["batch", "group", "none"]
_GROUPS = 8  # at most


def field_norm(
    norm: FieldNorm, channels: int, policy: Policy
) -> BatchNorm | GroupNorm | None:
    """Returns a norm of channels; groups are as many as divide them, up to eight."""
    if norm == "batch":
        return BatchNorm(channels, policy=policy)
    groups = math.gcd(channels, _GROUPS)
    return (
        GroupNorm(channels, groups=groups, policy=policy) if norm == "group" else None
    )


class GlobeConv(nnx.Module):
    """A convolution with bias, norm and ReLU; the last one alone, and from zero."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        padding: GlobePadding,
        policy: Policy,
        size: int = 3,
        norm: FieldNorm = "batch",
        last: bool = False,
        initializer: Initializer | None = None,
    ):
        """Declares the parameters; `initializer` is the kernel's if it is another."""
        self.padding, self.half, self.last = padding, size // 2, last
        self.conv = Conv(
            inputs,
            outputs,
            kernel_size=size,
            padding="VALID",
            use_bias=True,
            initializer=initializer or (ZEROS if last else HE_FAN_OUT),
            policy=policy,
        )
        self.norm = None if last else field_norm(norm, outputs, policy)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Maps `[batch, latitude, longitude, inputs]` to `outputs` channels."""
        y = self.conv(pad_globe(x, self.half, self.padding) if self.half else x)
        if self.norm is not None:
            y = self.norm(y, train=train)
        return y if self.last else jax.nn.relu(y)
