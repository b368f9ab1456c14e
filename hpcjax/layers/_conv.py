"""Two-dimensional convolution of channels-last images."""

from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Float

from hpcjax.core import errors
from hpcjax.layers import _precision

Padding = str | Sequence[tuple[int, int]]

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def check_padding(padding: Padding) -> None:
    """Raises ValueError unless `padding` is "SAME", "VALID" or two pairs of counts."""
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            hint = errors.nearest(padding, ("SAME", "VALID"))
            raise ValueError(f"unknown padding: got padding={padding!r}{hint}")
    elif len(padding) != 2 or any(low < 0 or high < 0 for low, high in padding):
        raise ValueError(
            "padding must be two pairs (low, high) of non-negative integers: got "
            f"padding={tuple(padding)}"
        )


def conv(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "kernel_height kernel_width inputs outputs"],
    bias: Float[Array, " outputs"] | None = None,
    *,
    strides: tuple[int, int] = (1, 1),
    padding: Padding = "SAME",
    dilation: tuple[int, int] = (1, 1),
    compute: str = "float32",
    output: str | None = None,
) -> Float[Array, "batch out_height out_width outputs"]:
    """Cross-correlates images with a kernel, as neural networks mean convolution.

    y[n, i, j, o] = b[o] + Σ_{u,v,c} x[n, i·s₀ + u·d₀ − p₀, j·s₁ + v·d₁ − p₁, c]
    W[u, v, c, o], with zeros outside the image.

    Args:
      x: images, `[batch, height, width, inputs]`.
      kernel: W, `[kernel_height, kernel_width, inputs, outputs]`.
      bias: b, `[outputs]`, or None.
      strides: (s₀, s₁).
      padding: "SAME", "VALID" or ((top, bottom), (left, right)).
      dilation: (d₀, d₁), the distance between the kernel's taps.
      compute: dtype of the product's operands; sums are float32.
      output: dtype of the result; None means `compute`.

    Returns:
      `[batch, out_height, out_width, outputs]`.

    Raises:
      ValueError: an unknown padding.

    Examples:
      >>> import jax.numpy as jnp
      >>> y = conv(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)), padding="VALID")
      >>> y.tolist()
      [[[[9.0]]]]
    """
    check_padding(padding)

    def product(x: jax.Array, kernel: jax.Array, accumulate: str | None) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            window_strides=strides,
            padding=padding,
            rhs_dilation=dilation,
            dimension_numbers=DIMENSIONS,
            preferred_element_type=accumulate,
        )

    y = _precision.accumulate_float32(product, x, kernel, compute)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(output or compute)
