"""Convolution in one to three dimensions, channels last."""

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from hpcjax.collectives.halo import Boundary, Space
from hpcjax.layers import _precision, _space
from hpcjax.layers._dense import dense
from hpcjax.layers._space import Padding, Sizes

log = logging.getLogger(__name__)

# Where volumes are convolved by slices on CPUs. Copying what each window takes pays
# with few inputs, and compiling that takes a second more; and it needs their memory.
_MOST_INPUTS, _LEAST_PRODUCTS, _MOST_BYTES = 8, 10**7, 2**26

# Orders of the axes of inputs, kernel and result: N, H, W, C and H, W, I, O.
Axes = tuple[str, str, str]


def _axes(dims: int) -> Axes:
    """Returns them for one to three axes of space: "NHWC", "HWIO", "NHWC"."""
    space = "DHW"[-dims:]
    return f"N{space}C", f"{space}IO", f"N{space}C"


def conv(  # noqa: PLR0913 - of all convolutions
    x: Float[Array, "batch *space inputs"],
    kernel: Float[Array, "*window inputs outputs"],
    bias: Float[Array, " outputs"] | None = None,
    *,
    strides: Sequence[int] | None = None,
    padding: Padding = "SAME",
    dilation: Sequence[int] | None = None,
    compute: str = "float32",
    output: str | None = None,
    space: Space = (),
    boundary: Boundary = "zero",
    sizes: Sizes = None,
) -> Float[Array, "batch *out_space outputs"]:
    """Cross-correlates images with a kernel, as neural networks mean convolution.

    y[n, i, j, o] = b[o] + Σ_{u,v,c} x[n, i·s₀ + u·d₀ − p₀, j·s₁ + v·d₁ − p₁, c]
    W[u, v, c, o], with zeros outside the image; likewise of lines and of volumes.

    Args:
      x: images, `[batch, height, width, inputs]`, lines or volumes.
      kernel: W, `[kernel_height, kernel_width, inputs, outputs]`.
      bias: b, `[outputs]`, or None.
      strides: (s₀, s₁); None means 1.
      padding: "SAME", "VALID" or ((top, bottom), (left, right)).
      dilation: (d₀, d₁), the distance between the kernel's taps; None means 1.
      compute: dtype of the product's operands; sums are float32.
      output: dtype of the result; None means `compute`.
      space: for each axis of space the mesh axis over which it is cut, or None. Inside
        `shard_map` x is this device's block then, and so is the result: halos are
        exchanged, see `collectives.halo`.
      boundary: "zero", or "periodic" for the other end instead of zeros.
      sizes: of the whole's space, where blocks of ⌈size / devices⌉ go past the end; the
        result has zeros there. None: all blocks are full.

    Returns:
      `[batch, out_height, out_width, outputs]`.

    Raises:
      ValueError: an unknown padding.
      ConfigError: blocks that are not of `sizes`.

    Examples:
      >>> import jax.numpy as jnp
      >>> y = conv(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)), padding="VALID")
      >>> y.tolist()
      [[[[9.0]]]]
    """
    dims = kernel.ndim - 2
    plain = _axes(dims)
    strides, dilation = strides or (1,) * dims, dilation or (1,) * dims
    _space.check_padding(padding, dims)
    window = kernel.shape[:-2], strides, padding, dilation
    x, padding, outputs = _space.open_windows(
        x, *window, space=space, boundary=boundary, sizes=sizes
    )

    def convolve(
        x: jax.Array,
        kernel: jax.Array,
        accumulate: str | None,
        axes: Axes = plain,
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

    if _slices_pay(x, kernel, strides, compute):
        _log_slices()
        product = _by_slices(strides, padding, dilation)
    elif jax.default_backend() == "cpu":
        product = _with_plain_transposes(convolve)
    else:
        product = convolve
    y = _precision.accumulate_float32(product, x, kernel, compute)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return _space.close_windows(y.astype(output or compute), space, outputs)


def conv_transpose(
    x: Float[Array, "batch *space inputs"],
    kernel: Float[Array, "*window inputs outputs"],
    *,
    compute: str = "float32",
) -> Float[Array, "batch *out_space outputs"]:
    """Upsamples by windows side by side: y[n, s·i + u, o] = Σ_c x[n, i, c] W[u, c, o].

    The stride s is the kernel's size, as in a U-Net's 2 by 2, so that each output has
    one input: blocks of what is cut in space need nothing of each other.

    Args:
      x: lines, images or volumes, or this device's block of them.
      kernel: W, `[s, ..., inputs, outputs]`.
      compute: dtype of the product's operands; sums are float32.

    Examples:
      >>> y = conv_transpose(jnp.ones((1, 2, 1)), jnp.array([3.0, 4.0])[:, None, None])
      >>> y[0, :, 0].tolist()
      [3.0, 4.0, 3.0, 4.0]
    """
    *window, inputs, outputs = kernel.shape
    dims = len(window)
    flat = jnp.moveaxis(kernel, -2, 0).reshape(inputs, -1)
    y = dense(x, flat, compute=compute).reshape(*x.shape[:-1], *window, outputs)
    pairs = [axis for at in range(1, dims + 1) for axis in (at, at + dims)]
    sides = [size * by for size, by in zip(x.shape[1:-1], window, strict=True)]
    y = y.transpose(0, *pairs, 2 * dims + 1)
    return y.reshape(x.shape[0], *sides, outputs)


def _with_plain_transposes(convolve: Callable[..., jax.Array]) -> _precision.Bilinear:
    """Returns a convolution whose gradients, too, are convolutions of `_axes`.

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

        plain = _axes(x.ndim - 2)
        space = plain[0][1:-1]

        def differentiate(primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
            (x, kernel), (dx, dk) = primals, tangents
            slopes = []
            if type(dx) is not SymbolicZero:
                axes = plain[0], f"{space}OI", plain[2]
                turned = jnp.swapaxes(kernel, -1, -2)
                slopes.append(convolve(dx, turned, accumulate, axes))
            if type(dk) is not SymbolicZero:
                axes = f"C{space}N", f"I{space}O", f"{space}NC"
                turned = jnp.swapaxes(x, 0, -1), jnp.moveaxis(dk, -2, 0)
                slope = convolve(*turned, accumulate, axes)
                slopes.append(jnp.moveaxis(slope, -2, 0))
            return run(x, kernel), sum(slopes[1:], start=slopes[0])

        run.defjvp(differentiate, symbolic_zeros=True)
        return run(x, kernel)

    return product


def _slices_pay(
    x: jax.Array, kernel: jax.Array, strides: Sequence[int], compute: Any
) -> bool:
    """Says whether slices and one product are quicker than XLA's convolution.

    Measured on two cores, of 16 volumes of 16³, one input and 16 outputs: forward and
    back 30 in place of 190 ms; with 16 inputs and more neither form is clearly quicker.
    Never of a size that is a symbol (`jax.export`), which compares with no number.
    """
    if not all(isinstance(size, int) for size in x.shape):
        return False
    *_, inputs, outputs = kernel.shape
    windows = math.prod(x.shape[:-1]) // math.prod(strides)
    taken = windows * (kernel.size // outputs)
    return (
        (kernel.ndim == 5 and jax.default_backend() == "cpu")
        and (jnp.dtype(compute) == jnp.float32 and inputs <= _MOST_INPUTS)
        and taken * outputs >= _LEAST_PRODUCTS
        and 4 * taken <= _MOST_BYTES
    )


@functools.cache
def _log_slices() -> None:
    log.info("convolutions of volumes with few inputs: by slices and one product")


def _by_slices(
    strides: Sequence[int], padding: Padding, dilation: Sequence[int]
) -> _precision.Bilinear:
    """Returns a convolution that puts what windows take side by side, and multiplies.

    One axis after another, the last one first, whose taps then change the fastest: a
    third of the slices that a cube has taps, and of their compiling.
    """

    def product(x: jax.Array, kernel: jax.Array, accumulate: str | None) -> jax.Array:
        *window, _, outputs = kernel.shape
        geometry = x.shape[1:-1], window, strides, dilation
        x = jnp.pad(x, ((0, 0), *_space.pairs(padding, *geometry), (0, 0)))
        for dim in range(len(window), 0, -1):
            step, stride = dilation[dim - 1], strides[dim - 1]
            far = (window[dim - 1] - 1) * step
            # None, and no slice past the end, where the window is larger than all of x.
            kept = max(x.shape[dim] - far, 0)
            starts = (
                min(first, x.shape[dim] - kept) for first in range(0, far + 1, step)
            )
            taps = [
                lax.slice_in_dim(x, first, first + kept, stride, dim)
                for first in starts
            ]
            x = jnp.concatenate(taps, axis=-1)
        flat = kernel.reshape(-1, outputs)
        return jnp.matmul(x, flat, preferred_element_type=accumulate)

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
    _space.check_padding(padding, 2)
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
