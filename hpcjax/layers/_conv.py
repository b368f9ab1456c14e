"""Two-dimensional convolution of channels-last images."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from hpcjax.core import errors
from hpcjax.layers import _precision

Padding = str | Sequence[tuple[int, int]]
# Orders of the axes of images, kernel and result: N, H, W, C and H, W, I, O.
Axes = tuple[str, str, str]

DIMENSIONS: Axes = ("NHWC", "HWIO", "NHWC")


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

    def convolve(
        x: jax.Array, kernel: jax.Array, accumulate: str | None, axes: Axes = DIMENSIONS
    ) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            window_strides=strides,
            padding=padding,
            rhs_dilation=dilation,
            dimension_numbers=axes,
            preferred_element_type=accumulate,
        )

    if jax.default_backend() == "cpu":
        product = _with_plain_transposes(convolve)
    else:
        product = convolve
    y = _precision.accumulate_float32(product, x, kernel, compute)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(output or compute)


def _with_plain_transposes(convolve: Callable[..., jax.Array]) -> _precision.Bilinear:
    """Returns a convolution whose gradients, too, are convolutions of `DIMENSIONS`.

    XLA:CPU has fast code for convolutions of images `NHWC` by kernels `HWIO` alone. It
    brings others into that form in a program's outermost computation, but not within a
    `cond` or a `scan`, where a gradient then took 30 times as long. JAX's transpose of
    a convolution exchanges the roles of two axes of each array: batch and channels of
    the images, inputs and outputs of the kernel. So the derivative is stated with these
    axes exchanged beforehand, and its transpose has them where they should be.
    """

    def product(x: jax.Array, kernel: jax.Array, accumulate: str | None) -> jax.Array:
        @jax.custom_jvp
        def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return convolve(x, kernel, accumulate)

        def differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
            (x, kernel), (dx, dk) = primals, tangents
            slopes = []
            if type(dx) is not SymbolicZero:
                axes = ("NHWC", "HWOI", "NHWC")
                turned = kernel.transpose(0, 1, 3, 2)
                slopes.append(convolve(dx, turned, accumulate, axes))
            if type(dk) is not SymbolicZero:
                axes = ("CHWN", "IHWO", "HWNC")
                turned = x.transpose(3, 1, 2, 0), dk.transpose(2, 0, 1, 3)
                slope = convolve(*turned, accumulate, axes)
                slopes.append(slope.transpose(2, 0, 1, 3))
            return run(x, kernel), sum(slopes[1:], start=slopes[0])

        run.defjvp(differentiate, symbolic_zeros=True)
        return run(x, kernel)

    return product


def patches(
    x: Float[Array, "batch height width inputs"],
    kernel_size: tuple[int, int],
    *,
    strides: tuple[int, int] = (1, 1),
    padding: Padding = "SAME",
    dilation: tuple[int, int] = (1, 1),
) -> Float[Array, "batch out_height out_width size"]:
    """Returns what a convolution multiplies by its kernel at each output position.

    `patches(x, ...) @ kernel.reshape(size, outputs)` is `conv(x, kernel, ...)` with
    size = kernel_height · kernel_width · inputs: the order within a patch is that of
    the kernel's axes, the channel the fastest.

    Args:
      x: images, `[batch, height, width, inputs]`.
      kernel_size: (kernel_height, kernel_width).
      strides: see `conv`.
      padding: see `conv`.
      dilation: see `conv`.

    Raises:
      ValueError: an unknown padding.

    Examples:
      >>> x = jnp.arange(6.0).reshape(1, 2, 3, 1)
      >>> patches(x, (2, 2), padding="VALID").tolist()
      [[[[0.0, 1.0, 3.0, 4.0], [1.0, 2.0, 4.0, 5.0]]]]
    """
    check_padding(padding)
    # A dilated kernel covers `reach + 1` pixels.
    reach = [
        (size - 1) * step for size, step in zip(kernel_size, dilation, strict=True)
    ]
    if isinstance(padding, str):
        window = [far + 1 for far in reach]
        padding = lax.padtype_to_pads(x.shape[1:3], window, strides, padding)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    # For each kernel row (or column) the strided slice of the pixels that it meets, one
    # for each output position.
    along = [
        [slice(first, size - far + first, stride) for first in range(0, far + 1, step)]
        for size, far, step, stride in zip(
            x.shape[1:3], reach, dilation, strides, strict=True
        )
    ]
    taps = [x[:, row, column] for row in along[0] for column in along[1]]
    return jnp.concatenate(taps, axis=-1)
