"""Grids of quantized values, and rounding of weights to the nearest one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped, UInt8

from hpcjax.compress.config import GridSpec
from hpcjax.core.extremes import largest
from hpcjax.core.structs import pytree

# Of the search over ranges, as in the published code of GPTQ.
_SHRINKS, _NORM = 80, 2.4


@pytree
class Grid:
    """Grids with the values scale · (q − zero) for integers q.

    There is one for each group of inputs and each output. A ternary grid has the values
    `zero`, 0 and `scale` instead.

    Attributes:
      scale: `[groups, outputs]`, positive.
      zero: the zero point, an integer as a float, `[groups, outputs]`.
    """

    scale: Float[Array, "groups outputs"]
    zero: Float[Array, "groups outputs"]

    def by_input(self, inputs: int) -> tuple[jax.Array, jax.Array]:
        """Returns scale and zero of each input, for groups of neighbouring inputs."""
        size = inputs // len(self.scale)
        return jnp.repeat(self.scale, size, axis=0), jnp.repeat(self.zero, size, axis=0)


def fit_grid(kernel: Float[Array, "inputs outputs"], spec: GridSpec) -> Grid:
    """Fits a grid to the weights of each group and output.

    With a = min(0, smallest weight) and b = max(0, largest weight), scale =
    (b − a) / (2^bits − 1) and zero = round(−a / scale). A symmetric grid has
    b = max(−a, b), a = −b and zero = 2^(bits−1). If all weights are zero, the range is
    (−1, 1).

    Args:
      kernel: weights, `[inputs, outputs]`.
      spec: the kind of grid.

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
    # Zero is inside the range, so that it can be a value of the grid.
    low, high = -largest(-split, 1), largest(split, 1)
    # The published code leaves low at 0 for outputs without negative weights; half of
    # the symmetric grid is then never used.
    if spec.symmetric:
        high = jnp.maximum(-low, high)
        low = jnp.where(low < 0, -high, low) if spec.reference else -high
    empty = (low == 0) & (high == 0)
    low, high = jnp.where(empty, -1, low), jnp.where(empty, 1, high)
    if spec.ternary:
        return Grid(scale=high, zero=low)
    grid = _range_grid(low, high, spec)
    if not spec.mse:
        return grid

    def shrink(
        number: jax.Array, so_far: tuple[Grid, jax.Array]
    ) -> tuple[Grid, jax.Array]:
        best, least = so_far
        share = (1 - number / 100).astype(low.dtype)
        tried = _range_grid(share * low, share * high, spec)
        error = _norm_error(split, tried, spec)
        chosen = jax.tree.map(lambda t, b: jnp.where(error < least, t, b), tried, best)
        return chosen, jnp.minimum(error, least)

    # The full range is candidate 0.
    return jax.lax.fori_loop(
        1, _SHRINKS, shrink, (grid, _norm_error(split, grid, spec))
    )[0]


def _range_grid(low: jax.Array, high: jax.Array, spec: GridSpec) -> Grid:
    scale = (high - low) / spec.levels
    middle = jnp.full_like(scale, (spec.levels + 1) / 2)
    return Grid(scale=scale, zero=middle if spec.symmetric else jnp.round(-low / scale))


def _norm_error(split: jax.Array, grid: Grid, spec: GridSpec) -> jax.Array:
    """Returns Σ|w − ŵ|^2.4 of each group and output, `[groups, outputs]`."""
    q = jnp.round(split / grid.scale[:, None]) + grid.zero[:, None]
    values = (jnp.clip(q, 0, spec.levels) - grid.zero[:, None]) * grid.scale[:, None]
    return jnp.sum(jnp.abs(split - values) ** _NORM, axis=1)


def quantize(
    weights: Float[Array, "... outputs"],
    scale: Float[Array, "... outputs"],
    zero: Float[Array, "... outputs"],
    spec: GridSpec,
) -> UInt8[Array, "... outputs"]:
    """Returns the integers of the nearest values, clip(round(w / scale) + zero).

    Halves are rounded to the even integer. In a ternary grid, 0, 1 and 2 stand for the
    smallest value, 0 and the largest value, with thresholds half-way between them.

    Args:
      weights: of one or more inputs.
      scale: see `Grid`; of the same inputs, or broadcast to them.
      zero: see `Grid`; likewise.
      spec: of the grid.
    """
    if spec.ternary:
        # 1, plus 1 above half of the largest value, minus 1 below half of the smallest.
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
    """Returns the values that integers stand for; arguments as in `quantize`."""
    if spec.ternary:
        return jnp.where(integers == 2, scale, jnp.where(integers == 0, zero, 0))
    return scale * (integers.astype(scale.dtype) - zero)


def round_to_nearest(
    kernel: Float[Array, "inputs outputs"], spec: GridSpec
) -> tuple[UInt8[Array, "inputs outputs"], Grid]:
    """Rounds every weight to the nearest value of its grid.

    This is the baseline for GPTQ on the same grid.

    Args:
      kernel: weights, `[inputs, outputs]`.
      spec: the kind of grid.

    Returns:
      The integers and the grid.

    Examples:
      >>> kernel = jnp.array([[-1.0], [0.4], [2.0]])
      >>> round_to_nearest(kernel, GridSpec(bits=2))[0].ravel().tolist()
      [0, 1, 3]
    """
    grid = fit_grid(kernel, spec)
    return quantize(kernel, *grid.by_input(len(kernel)), spec), grid
