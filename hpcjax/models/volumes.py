"""A convolution of volumes as a module."""

from typing import Any

import jax
from flax import nnx

from hpcjax import layers
from hpcjax.collectives.halo import Space
from hpcjax.core.dtypes import Policy
from hpcjax.models.modules import ZEROS, Initializer, param, require_cuttable

GLOROT: Initializer = nnx.initializers.glorot_uniform()
HE_FAN_IN: Initializer = nnx.initializers.he_normal()


class VolumeConv(nnx.Module):
    """Convolution of volumes, padded by half a window; no tap observes it.

    Parameters are `kernel` [depth, height, width, inputs, outputs] and maybe `bias`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        name: str,
        kernel_size: int = 3,
        stride: int = 1,
        use_bias: bool = False,
        initializer: Initializer = HE_FAN_IN,
        policy: Policy,
    ):
        """Declares the parameters; `name` is for messages about thin blocks."""
        shape = (*[kernel_size] * 3, inputs, outputs)
        self.kernel = param(shape, initializer, policy.param)
        self.bias = param((outputs,), ZEROS, policy.param) if use_bias else None
        self.name, self.compute = name, policy.compute
        pads = ((kernel_size // 2,) * 2,) * 3
        self.window = nnx.static(
            ((kernel_size,) * 3, (stride,) * 3, pads, (1, 1, 1)),
        )

    def __call__(self, x: jax.Array, *, space: Space = ()) -> jax.Array:
        """Maps volumes, or blocks of them, `[batch, depth, height, width, inputs]`.

        Raises:
          ConfigError: blocks that are too thin, or outputs that do not divide.
        """
        window: Any = self.window
        require_cuttable(self.name, x, space, *window)
        bias = None if self.bias is None else self.bias[...]
        return layers.conv(
            x.astype(self.compute),
            self.kernel[...],
            bias,
            strides=window[1],
            padding=window[2],
            compute=self.compute,
            space=space,
        )
