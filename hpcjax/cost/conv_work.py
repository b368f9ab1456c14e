"""Operations and memory of convolutional networks, from the shapes of their layers."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from hpcjax.core import checks


class WindowLayer(NamedTuple):
    """A convolution or a pool, of one sample.

    Attributes:
      outputs: shape of what it puts out, `(*space, channels)`.
      window: sizes of its windows.
      inputs: channels that an output of a convolution sums; None for a pool.
    """

    outputs: tuple[int, ...]
    window: tuple[int, ...]
    inputs: int | None = None


class ConvWork(NamedTuple):
    """What one sample takes.

    Attributes:
      forward: floating-point operations of the convolutions, two a product.
      step: those of a training step, of which the backward pass has two thirds.
      memory: bytes of activations and of their gradients.
    """

    forward: int
    step: int
    memory: int


def conv_work(layers: Iterable[WindowLayer], sample: tuple[int, ...]) -> ConvWork:
    """Returns operations and activation bytes of a network, as TPDS 2020 counts them.

    A convolution whose outputs are n numbers has 2 n Π window · inputs operations
    forward, and twice as many back. Memory is 4 bytes of each output of a convolution,
    of its activation function and of a pool, and of two copies of the sample; and once
    more for gradients. Fully connected layers and norms are not counted.

    Args:
      layers: convolutions and pools in any order.
      sample: shape of one sample, `(*space, channels)`.

    Raises:
      ConfigError: a size below 1.

    Examples:
      >>> layer = WindowLayer(outputs=(4, 4, 2), window=(3, 3), inputs=1)
      >>> conv_work([layer], (4, 4, 1))
      ConvWork(forward=576, step=1728, memory=768)
    """
    forward, numbers = 0, 2 * math.prod(sample)
    for layer in layers:
        sizes = (*layer.outputs, *layer.window, *sample, layer.inputs or 1)
        checks.require(min(sizes) > 0, "sizes must be at least 1", layer=layer)
        points = math.prod(layer.outputs)
        if layer.inputs is None:
            numbers += points
            continue
        numbers += 2 * points
        forward += 2 * points * math.prod(layer.window) * layer.inputs
    return ConvWork(forward, 3 * forward, 2 * 4 * numbers)
