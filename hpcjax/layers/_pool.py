"""Pooling over windows in one to three dimensions."""

import math
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpcjax.collectives.halo import Boundary, Space
from hpcjax.core import checks
from hpcjax.layers import _space


def pool(
    x: Float[Array, "batch *space channels"],
    window: Sequence[int],
    kind: Literal["max", "mean"] = "max",
    *,
    strides: Sequence[int] | None = None,
    padding: _space.Padding = "VALID",
    space: Space = (),
    boundary: Boundary = "zero",
    sizes: _space.Sizes = None,
) -> Float[Array, "batch *out_space channels"]:
    """Returns the largest number of each window, or its mean.

    Args:
      x: lines, images or volumes, `[batch, ..., channels]`.
      window: its sizes.
      kind: "max", or "mean", of which zeros of the padding are part.
      strides: from one window to the next; None for the window's sizes.
      padding: see `layers.conv`.
      space: likewise.
      boundary: likewise.
      sizes: likewise.

    Raises:
      ConfigError: another kind, blocks that are not of `sizes`.
      ValueError: an unknown padding.

    Examples:
      >>> x = jnp.array([1.0, 3.0, 5.0, 4.0])[None, :, None]
      >>> pool(x, (2,))[0, :, 0].tolist(), pool(x, (2,), "mean")[0, :, 0].tolist()
      ([3.0, 5.0], [2.0, 4.5])
    """
    checks.require_choice("kind", kind, ("max", "mean"))
    _space.check_padding(padding, len(window))
    steps = tuple(strides or window)
    fill, reducer = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
    x, padding, outputs = _space.open_windows(
        x,
        window,
        steps,
        padding,
        (1,) * len(window),
        space=space,
        boundary=boundary,
        sizes=sizes,
        fill=fill,
    )
    pads = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))
    y = lax.reduce_window(x, fill, reducer, (1, *window, 1), (1, *steps, 1), pads)
    if kind == "mean":
        y = y / math.prod(window)
    return _space.close_windows(y, space, outputs)
