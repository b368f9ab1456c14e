"""Halos: what blocks of arrays that are cut in space need of their neighbours.

An axis of n points is cut over P devices into blocks of ⌈n / P⌉, of which the last ones
may be partly, or wholly, past the end. A window of K taps, of stride s, padding p and
dilation d takes for the outputs [a, b) the inputs [a s − p, (b − 1) s − p + (K − 1) d +
1): what of these is before or after a device's own block is its halo.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from hpcjax.core import checks
from hpcjax.core.varying import require_axes, vary

Boundary = Literal["zero", "periodic"]
Space = tuple[str | None, ...]
"""For each axis of space the mesh axis over which it is cut, or None."""
Widths = tuple[int, int]


def output_size(
    size: int, kernel: int, stride: int, padding: Widths, dilation: int = 1
) -> int:
    """Returns how many outputs a window has along an axis of so many points."""
    return max(0, (size + sum(padding) - (kernel - 1) * dilation - 1) // stride + 1)


def halo_widths(
    size: int,
    blocks: int,
    kernel: int,
    stride: int = 1,
    padding: Widths = (0, 0),
    dilation: int = 1,
) -> list[Widths]:
    """Returns how many points each device needs before and after its own block.

    Either number may be negative, of points of its own that it does not need, or more
    than a block. Outputs are cut into blocks, too; a device without any needs nothing.

    Args:
      size: points of the whole axis, n.
      blocks: devices, P.
      kernel: taps, K.
      stride: s.
      padding: before the first point and after the last.
      dilation: d.

    Examples:
      >>> halo_widths(8, 2, kernel=3, padding=(1, 1))
      [(1, 1), (1, 1)]
      >>> halo_widths(8, 2, kernel=3, stride=2, padding=(1, 1))
      [(1, 0), (1, 0)]
    """
    outputs = output_size(size, kernel, stride, padding, dilation)
    inside, outside = -(-size // blocks), -(-outputs // blocks)
    found = []
    for rank in range(blocks):
        first, end = rank * outside, min((rank + 1) * outside, outputs)
        start = first * stride - padding[0]
        stop = (end - 1) * stride - padding[0] + (kernel - 1) * dilation + 1
        own = rank * inside - start, stop - (rank + 1) * inside
        found.append(own if first < end else (0, -inside))
    return found


def exchange_halos(
    x: Shaped[Array, "batch *space channels"],
    widths: Sequence[Widths],
    axes: Space,
    boundary: Boundary = "zero",
    fill: float = 0,
) -> Shaped[Array, "batch *widened channels"]:
    """Returns a block with what is before and after it, inside `shard_map`.

    One axis comes after another, on what is wider already, so that corners arrive. Each
    neighbour from which points come costs a permutation; its transpose sends slopes of
    halos back, to be added.

    Args:
      x: this device's block, `[batch, ..., channels]`.
      widths: points before and after the block along each axis of space, on all
        devices; a negative number leaves out so many.
      axes: see `Space`; along None the block is the whole.
      boundary: what is past the ends: "zero" for `fill`, "periodic" for the other end.
      fill: such as −∞ for a maximum.

    Raises:
      ConfigError: an unknown boundary, axes that are not there, less than no points.
    """
    checks.require_choice("boundary", boundary, ("zero", "periodic"))
    require_axes(tuple(axis for axis in axes if axis), "an exchange of halos")
    for dim, ((low, high), axis) in enumerate(zip(widths, axes, strict=True), 1):
        rule = "widths must leave points of a block"
        checks.require(x.shape[dim] + low + high >= 0, rule, widths=(low, high))
        before = _pieces(x, low, dim, axis, 1, boundary, fill)
        after = _pieces(x, high, dim, axis, -1, boundary, fill)
        if before or after:
            x = jnp.concatenate([*reversed(before), x, *after], axis=dim)
        end = x.shape[dim] - max(0, -high)
        x = lax.slice_in_dim(x, max(0, -low), end, axis=dim)
    return x


def _pieces(
    x: jax.Array,
    width: int,
    dim: int,
    axis: str | None,
    sign: int,
    boundary: Boundary,
    fill: float,
) -> list[jax.Array]:
    """Returns what comes from each neighbour on one side, the nearest one first."""
    size, found = x.shape[dim], []
    blocks = lax.axis_size(axis) if axis else 1
    for hop in range(1, -(-width // size) + 1):
        taken = min(size, width - (hop - 1) * size)
        start = size - taken if sign > 0 else 0
        piece = lax.slice_in_dim(x, start, start + taken, axis=dim)
        if boundary == "periodic":
            pairs = [(i, (i + sign * hop) % blocks) for i in range(blocks)]
        else:
            ends = range(blocks)
            pairs = [(i, i + sign * hop) for i in ends if i + sign * hop in ends]
        if not pairs:
            piece = jnp.full_like(piece, fill)
        elif axis and hop % blocks:
            piece = lax.ppermute(vary(piece, axis), axis, pairs)
            if fill and boundary == "zero":  # those to whom nobody sends have zeros
                own = lax.axis_index(axis) - sign * hop
                piece = jnp.where((own >= 0) & (own < blocks), piece, fill)
        found.append(piece)
    return found


def take_windows(
    x: Shaped[Array, "batch *space channels"],
    axes: Space,
    kernel: Sequence[int],
    *,
    strides: Sequence[int],
    padding: Sequence[Widths],
    dilation: Sequence[int],
    sizes: Sequence[int],
    boundary: Boundary = "zero",
    fill: float = 0,
) -> Shaped[Array, "batch *taken channels"]:
    """Returns what windows without padding take to give this device's block of outputs.

    Args:
      x: this device's block; what of it is past the end does not matter.
      axes: see `Space`; nothing is done along None but what is periodic.
      kernel: sizes of the window.
      strides: of the window.
      padding: of the whole array.
      dilation: of the window.
      sizes: of the whole array's space.
      boundary: see `exchange_halos`.
      fill: likewise.
    """
    each = zip(axes, sizes, kernel, strides, padding, dilation, strict=True)
    for at, (axis, size, taps, stride, pads, apart) in enumerate(each):
        if axis is None and boundary == "zero":
            continue
        blocks, dim = lax.axis_size(axis) if axis else 1, at + 1
        rule = "blocks must be ceil(size / blocks) long, and equal where periodic"
        block, whole = x.shape[dim], blocks * x.shape[dim] == size
        checks.require(block == -(-size // blocks), rule, size=size, block=block)
        checks.require(whole or boundary == "zero", rule, size=size, blocks=blocks)
        if not whole:
            x = mask_past_end(x, size, axis, dim, fill)
        needs = halo_widths(size, blocks, taps, stride, pads, apart)
        low, high = max(own[0] for own in needs), max(own[1] for own in needs)
        only = [(0, 0)] * len(axes)
        only[at] = low, max(high, -block)
        names = tuple(axis if i == at else None for i in range(len(axes)))
        x = exchange_halos(x, only, names, boundary, fill)
        outputs = -(-output_size(size, taps, stride, pads, apart) // blocks)
        length = (outputs - 1) * stride + (taps - 1) * apart + 1
        starts = [low - own for own, _ in needs]
        if set(starts) != {0} or x.shape[dim] != length:
            x = _crop(x, dim, axis, starts, length, fill)
    return x


def _crop(
    x: jax.Array,
    dim: int,
    axis: str | None,
    starts: list[int],
    length: int,
    fill: float,
) -> jax.Array:
    """Returns `length` points from where this device starts."""
    missing = max(0, max(starts) + length - x.shape[dim])
    ends = [(0, missing if at == dim else 0) for at in range(x.ndim)]
    x = jnp.pad(x, ends, constant_values=fill)
    start = jnp.asarray(np.array(starts))[lax.axis_index(axis)] if axis else starts[0]
    return lax.dynamic_slice_in_dim(x, start, length, dim)


def mask_past_end(
    x: Shaped[Array, "..."], size: int, axis: str | None, dim: int, fill: float = 0
) -> Shaped[Array, "..."]:
    """Returns a block with `fill` where it is past the end of `size` points."""
    first = lax.axis_index(axis) * x.shape[dim] if axis else 0
    shape = [-1 if at == dim else 1 for at in range(x.ndim)]
    inside = (first + jnp.arange(x.shape[dim]) < size).reshape(shape)
    return jnp.where(inside, x, fill)
