"""Grids of values that weights are rounded to, and rounding to the nearest."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from hpcjax.compress.config import GridSpec
from hpcjax.core.structs import pytree

_SHRINKS, _NORM = 80, 2.4


@pytree
class Grid:
    """Values scale · (q − zero) of integers q, for each group of inputs and output.

    A ternary grid has the values `zero`, 0 and `scale` instead.

    Attributes:
      scale: `[groups, outputs]`, positive.
      zero: the same, integers as floats.
    """

    scale: Float[Array, "groups outputs"]
    zero: Float[Array, "groups outputs"]

    def by_input(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        """Returns scale and zero of each input, groups being of neighbouring ones."""
        size = inputs // len(self.scale)
        return jnp.repeat(self.scale, size, axis=0), jnp.repeat(self.zero, size, axis=0)


def fit_grid(kernel: Float[Array, "inputs outputs"], spec: GridSpec) -> Grid:
    """Fits a grid to the weights of each output, group by group.

    With a = min(0, least weight) and b = max(0, largest), scale = (b − a)/(2^bits − 1)
    and zero = round(−a / scale); symmetric: b = max(−a, b), a = −b, zero = 2^(bits−1).
    Weights that are all zero get the range (−1, 1).

    Args:
      kernel: weights, `[inputs, outputs]`.
      spec: which grid.

    Raises:
      ConfigError: the groups do not divide the inputs.

    References:
      Frantar et al., GPTQ, ICLR 2023, §4.

    Examples:
      >>> grid = fit_grid(jnp.array([[-1.0], [2.0]]), GridSpec(bits=2))
      >>> grid.scale.item(), grid.zero.item()
      (1.0, 1.0)
    """
    groups = spec.groups(kernel.shape[0])
    split = kernel.reshape(groups, -1, kernel.shape[1])
    low = jnp.minimum(split.min(1), 0)
    high = jnp.maximum(split.max(1), 0)
    if spec.symmetric:
        high = jnp.maximum(-low, high)
        low = jnp.where(low < 0, -high, low) if spec.reference else -high
    empty = (low == 0) & (high == 0)
    low, high = jnp.where(empty, -1, low), jnp.where(empty, 1, high)
    if spec.ternary:
        return Grid(scale=high, zero=low)
    grid = _of_range(low, high, spec)
    if not spec.mse:
        return grid

    def shrink(
        number: jax.Array, kept: tuple[Grid, jax.Array]
    ) -> tuple[Grid, jax.Array]:
        best, least = kept
        share = (1 - number / 100).astype(low.dtype)
        tried = _of_range(share * low, share * high, spec)
        lost = _lost(split, tried, spec)
        chosen = jax.tree.map(lambda t, b: jnp.where(lost < least, t, b), tried, best)
        return chosen, jnp.minimum(lost, least)

    return jax.lax.fori_loop(1, _SHRINKS, shrink, (grid, _lost(split, grid, spec)))[0]


def _of_range(low: jax.Array, high: jax.Array, spec: GridSpec) -> Grid:
    scale = (high - low) / spec.levels
    middle = jnp.full_like(scale, (spec.levels + 1) / 2)
    return Grid(scale=scale, zero=middle if spec.symmetric else jnp.round(-low / scale))


def _lost(split: jax.Array, grid: Grid, spec: GridSpec) -> jax.Array:
    """Returns Σ|w − q|^2.4 of each group and output."""
    q = jnp.round(split / grid.scale[:, None]) + grid.zero[:, None]
    made = (jnp.clip(q, 0, spec.levels) - grid.zero[:, None]) * grid.scale[:, None]
    return jnp.sum(jnp.abs(split - made) ** _NORM, axis=1)


def quantize(
    weights: Float[Array, "... outputs"],
    scale: Float[Array, "... outputs"],
    zero: Float[Array, "... outputs"],
    spec: GridSpec,
) -> UInt8[Array, "... outputs"]:
    """Returns the integers of the nearest values, clip(round(w / scale) + zero).

    Halves go to the even integer. Ternary: 0, 1 or 2 for the least value, nothing and
    the largest, with thresholds half-way.

    Args:
      weights: one input's, or several inputs'.
      scale: of the same inputs, or broadcast against them; see `Grid`.
      zero: the same.
      spec: of the grid.
    """
    if spec.ternary:
        q = 1 + (weights > scale / 2).astype(jnp.int32) - (weights < zero / 2)
        return q.astype(jnp.uint8)
    q = jnp.round(weights / scale) + zero
    return jnp.clip(q, 0, spec.levels).astype(jnp.uint8)


def dequantize(
    integers: Shaped[Array, "... outputs"],
    scale: Float[Array, "... outputs"],
    zero: Float[Array, "... outputs"],
    spec: GridSpec,
) -> Float[Array, "... outputs"]:
    """Returns the values of integers; arguments as in `quantize`."""
    if spec.ternary:
        return jnp.where(integers == 2, scale, jnp.where(integers == 0, zero, 0))
    return scale * (integers.astype(scale.dtype) - zero)


def round_to_nearest(
    kernel: Float[Array, "inputs outputs"], spec: GridSpec
) -> tuple[UInt8[Array, "inputs outputs"], Grid]:
    """Rounds every weight to the nearest value of its group's grid.

    The baseline of every better method, on the same grid.

    Args:
      kernel: weights, `[inputs, outputs]`.
      spec: which grid.

    Returns:
      Integers and grid.

    Examples:
      >>> kernel = jnp.array([[-1.0], [0.4], [2.0]])
      >>> round_to_nearest(kernel, GridSpec(bits=2))[0].ravel().tolist()
      [0, 1, 3]
    """
    grid = fit_grid(kernel, spec)
    return quantize(kernel, *grid.by_input(len(kernel)), spec), grid
