"""Layers that know where they are: a filter for each place, and coordinates."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.layers import _precision
from hpcjax.layers._conv import patches


def locally_connected(
    x: Float[Array, "batch height width inputs"],
    kernel: Float[Array, "height width rows columns inputs outputs"],
    *,
    compute: str = "float32",
) -> Float[Array, "batch height width outputs"]:
    """Returns a convolution that has a kernel of its own at each place.

    y[n, i, j, o] = Σ_{u,v,c} x[n, i + u − p, j + v − q, c] W[i, j, u, v, c, o], with
    zeros outside.

    Args:
      x: fields `[batch, height, width, inputs]`.
      kernel: W; rows and columns are odd.
      compute: dtype of the product's operands; sums are float32.

    Raises:
      ConfigError: a kernel for other places than the fields have.

    Examples:
      >>> kernel = jnp.array([2.0, 3.0]).reshape(1, 2, 1, 1, 1, 1)
      >>> locally_connected(jnp.ones((1, 1, 2, 1)), kernel).ravel().tolist()
      [2.0, 3.0]
    """
    height, width, rows, columns, _, outputs = kernel.shape
    rule = "kernel must have the height and width of the fields"
    good = (height, width) == x.shape[1:3]
    checks.require(good, rule, kernel=kernel.shape, fields=x.shape)

    def product(x: Array, kernel: Array, accumulate: str | None) -> Array:
        form = "bhws,hwso->bhwo"
        return jnp.einsum(form, x, kernel, preferred_element_type=accumulate)

    matrices = kernel.reshape(height, width, -1, outputs)
    taken = patches(x, (rows, columns))
    y = _precision.accumulate_float32(product, taken, matrices, compute)
    return y.astype(compute)


def add_coordinates(
    x: Float[Array, "batch height width channels"],
) -> Float[Array, "batch height width channels_and_2"]:
    """Adds the row and the column of each place, from −1 to 1, as two channels.

    References:
      Liu et al., An intriguing failing of convolutional neural networks and the
      CoordConv solution, NeurIPS 2018.

    Examples:
      >>> add_coordinates(jnp.zeros((1, 1, 3, 1)))[0, 0].tolist()
      [[0.0, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    axes = [
        jnp.linspace(-1.0, 1.0, side, dtype=x.dtype) if side > 1 else jnp.zeros(1)
        for side in x.shape[1:3]
    ]
    planes = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), axis=-1)
    both = jnp.broadcast_to(planes, (*x.shape[:-1], 2)).astype(x.dtype)
    return jnp.concatenate([x, both], axis=-1)


def difference_of_places(
    weights: Float[Array, "height width *rest"], *, wrap_height: bool = False
) -> Float[Array, ""]:
    """Returns by how much weights differ from those next to them, |Δ| in the mean.

    Means along both axes are added. A width goes all the way round; one row has no
    other.

    Args:
      weights: of each place `[height, width, ...]`.
      wrap_height: whether the first row is next to the last, one pole to the other.

    Examples:
      >>> float(difference_of_places(jnp.array([[0.0, 1.0], [0.0, 1.0]])))
      1.0
    """
    around = jnp.abs(weights - jnp.roll(weights, 1, 1)).mean()
    if wrap_height:
        return around + jnp.abs(weights - jnp.roll(weights, 1, 0)).mean()
    if len(weights) < 2:
        return around
    return around + jnp.abs(weights[1:] - weights[:-1]).mean()
