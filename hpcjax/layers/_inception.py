"""Convolutions of several sizes beside each other."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.layers._conv import conv
from hpcjax.layers._globe import GlobePadding, pad_globe


def inception(
    x: Float[Array, "batch latitude longitude inputs"],
    kernels: Sequence[Float[Array, "rows columns inputs outputs"]],
    biases: Sequence[Float[Array, " outputs"]],
    *,
    padding: GlobePadding = "periodic",
    compute: str = "float32",
) -> Float[Array, "batch latitude longitude all_outputs"]:
    """Returns convolutions of one field of the globe by kernels of several sizes.

    Args:
      x: fields `[batch, latitude, longitude, inputs]`.
      kernels: each of an odd number of points a side.
      biases: of each.
      padding: of longitudes, see `pad_globe`.
      compute: dtype of the products' operands; sums are float32.

    Returns:
      The channels of the first kernel, of the second, and so on.

    Raises:
      ConfigError: a kernel without a middle.

    References:
      Szegedy et al., Going deeper with convolutions, CVPR 2015.

    Examples:
      >>> kernels = [jnp.ones((1, 1, 1, 1)), jnp.ones((3, 3, 1, 1))]
      >>> y = inception(jnp.ones((1, 1, 4, 1)), kernels, [jnp.zeros(1)] * 2)
      >>> y[0, 0, 0].tolist()
      [1.0, 3.0]
    """
    sizes = [kernel.shape[:2] for kernel in kernels]
    rule = "kernels must have an odd number of points a side, the same for both"
    checks.require(all(a == b and a % 2 for a, b in sizes), rule, sizes=sizes)
    height, width = x.shape[1:3]
    most = max(size // 2 for size, _ in sizes)
    wide = pad_globe(x, most, padding) if most else x
    found = []
    for kernel, bias in zip(kernels, biases, strict=True):
        half = kernel.shape[0] // 2
        cut = most - half
        part = wide[:, cut : cut + height + 2 * half, cut : cut + width + 2 * half]
        found.append(conv(part, kernel, bias, padding="VALID", compute=compute))
    return jnp.concatenate(found, axis=-1)
