"""What convolutions and pools do where devices share out the space of an example."""

from collections.abc import Sequence

import jax
from jax import lax
from jaxtyping import Array, Shaped

from hpcjax.collectives import halo
from hpcjax.core import checks, errors
from hpcjax.core.varying import require_axes

Padding = str | Sequence[tuple[int, int]]
Sizes = tuple[int, ...] | None


def check_padding(padding: Padding, dims: int) -> None:
    """Raises ValueError unless it is "SAME", "VALID" or a pair of counts for each."""
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID"):
            hint = errors.nearest(padding, ("SAME", "VALID"))
            raise ValueError(f"unknown padding: got padding={padding!r}{hint}")
    elif len(padding) != dims or any(low < 0 or high < 0 for low, high in padding):
        raise ValueError(
            f"padding must be {dims} pairs (low, high) of non-negative integers: got "
            f"padding={tuple(padding)}"
        )


def open_windows(
    x: jax.Array,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
    *,
    space: halo.Space,
    boundary: halo.Boundary,
    sizes: Sizes,
    fill: float = 0,
) -> tuple[jax.Array, Padding, Sizes]:
    """Returns what windows take, the padding they still need, and sizes of outputs.

    Where nothing is cut and nothing periodic, that is all as given, and no sizes.
    """
    if boundary == "zero" and not any(space):
        return x, padding, None
    space = space or (None,) * len(kernel)
    rule = "space must name a mesh axis, or None, for each axis of the window"
    checks.require(len(space) == len(kernel), rule, space=space, window=kernel)
    require_axes(tuple(axis for axis in space if axis), "a window over blocks")
    sizes = sizes or _whole_sizes(x, space)
    padding = pairs(padding, sizes, kernel, strides, dilation)
    each = zip(sizes, kernel, strides, padding, dilation, strict=True)
    outputs = tuple(halo.output_size(*axis) for axis in each)
    x = halo.take_windows(
        x,
        space,
        kernel,
        strides=strides,
        padding=padding,
        dilation=dilation,
        sizes=sizes,
        boundary=boundary,
        fill=fill,
    )
    left = [
        (0, 0) if axis or boundary == "periodic" else pads
        for axis, pads in zip(space, padding, strict=True)
    ]
    return x, left, outputs


def pairs(
    padding: Padding,
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Sequence[tuple[int, int]]:
    """Returns padding in numbers."""
    if not isinstance(padding, str):
        return padding
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    return lax.padtype_to_pads(sizes, reach, strides, padding)


def _whole_sizes(x: jax.Array, space: halo.Space) -> tuple[int, ...]:
    """Returns the sizes of space of an array of which all blocks are full."""
    return tuple(
        size * (lax.axis_size(axis) if axis else 1)
        for size, axis in zip(x.shape[1:-1], space, strict=True)
    )


def close_windows(y: jax.Array, space: halo.Space, outputs: Sizes) -> jax.Array:
    """Returns outputs with zeros past the end."""
    for dim, (size, axis) in enumerate(zip(outputs or (), space, strict=False), 1):
        if axis and y.shape[dim] * lax.axis_size(axis) != size:
            y = halo.mask_past_end(y, size, axis, dim)
    return y


def gather_space(
    x: Shaped[Array, "batch *space channels"], space: halo.Space
) -> Shaped[Array, "batch *whole channels"]:
    """Returns the whole of examples of which each device has a block.

    All devices have the same then, and what they compute of it counts once: the mean of
    their gradients is its gradient.

    Args:
      x: this device's block; all are full.
      space: for each axis of space the mesh axis over which it is cut, or None.
    """
    for dim, axis in enumerate(space, 1):
        if axis:
            x = lax.all_gather(x, axis, axis=dim, tiled=True)
    return x


def find_obstacle(
    x: Shaped[Array, "batch *space channels"],
    space: halo.Space,
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Padding,
    dilation: Sequence[int],
) -> tuple[str, str] | None:
    """Returns why a window should not take such blocks, and along which mesh axis.

    None if it may: where each device needs at most a block of one neighbour on each
    side, and all have equally many outputs. Else the whole has to be gathered first.

    Args:
      x: this device's block.
      space: see `gather_space`.
      kernel: sizes of the window.
      strides: of the window.
      padding: of the whole array.
      dilation: of the window.
    """
    sizes = _whole_sizes(x, space)
    padding = pairs(padding, sizes, kernel, strides, dilation)
    window = zip(kernel, strides, padding, dilation, strict=True)
    for axis, size, each in zip(space, sizes, window, strict=True):
        if axis is None:
            continue
        blocks = lax.axis_size(axis)
        outputs = halo.output_size(size, *each)
        needs = halo.halo_widths(size, blocks, *each)
        widest = max(max(own) for own in needs)
        if widest > size // blocks:
            return f"block {size // blocks} < halo {widest}", axis
        if outputs % blocks or len(set(needs)) > 1:
            return f"{blocks} blocks do not divide {outputs} of {size} points", axis
    return None
