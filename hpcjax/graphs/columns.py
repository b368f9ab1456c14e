"""Features of which each device has some columns, of all vertices; in `shard_map`.

Sums over neighbours need no exchange; a product with a matrix does. Each device has a
part of its sum, the products of its columns, and a reduce-scatter adds these up and
leaves each device the columns of the result that are its own. So the layers of `graphs`
compute columns of their outputs, with the parameters of the whole.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.core.structs import pytree, static
from hpcjax.core.varying import require_axes

T = TypeVar("T")


@pytree
class Columns:
    """A device's columns of a matrix, a layer's features; `rows_to_columns` makes it.

    Columns are cut into as many slices as there are devices, and zeros fill up the
    last. If they are groups, such as heads, a device has a slice of each.

    Attributes:
      values: [rows, groups * slice].
      width: columns of all devices.
      axis: of the mesh.
      groups: equal ones, one after the other.
    """

    values: Any
    width: int = static()
    axis: str = static()
    groups: int = static(default=1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        return len(self.values), self.width

    def project(self, kernel: jax.Array) -> jax.Array:
        """Returns own columns of X W, the last axis of W being cut; float32 is added.

        One reduce-scatter: each device gives rows times outputs numbers.
        """
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        own, values = self._own(kernel, 0, self.groups), self.values
        values = values.astype(kernel.dtype)
        partial = jnp.tensordot(values, own, 1, preferred_element_type=wide)
        partial = _fill(partial, partial.ndim - 1, lax.axis_size(self.axis))
        at = partial.ndim - 1
        total = lax.psum_scatter(partial, self.axis, scatter_dimension=at, tiled=True)
        return total.astype(kernel.dtype)

    def _own(self, values: jax.Array, at: int, groups: int) -> jax.Array:
        """Returns the slice of each group along an axis that is this device's."""
        devices, shape = lax.axis_size(self.axis), values.shape
        apart = values.reshape(*shape[:at], groups, -1, *shape[at + 1 :])
        apart = _fill(apart, at + 1, devices)
        size = apart.shape[at + 1] // devices
        first = lax.axis_index(self.axis) * size
        own = lax.dynamic_slice_in_dim(apart, first, size, at + 1)
        return own.reshape(*shape[:at], groups * size, *shape[at + 1 :])


def _fill(values: jax.Array, at: int, devices: int) -> jax.Array:
    """Returns an axis with zeros behind, so that devices divide it."""
    more = [(0, 0)] * values.ndim
    more[at] = (0, -values.shape[at] % devices)
    return jnp.pad(values, more)


def own_columns(values: jax.Array, x: Any, groups: int = 1) -> jax.Array:
    """Returns what columns of a layer's outputs have, of those of this device.

    Args:
      values: [..., outputs], such as a bias.
      x: the layer's features; all columns if these are no `Columns`.
      groups: of the outputs.
    """
    if not isinstance(x, Columns):
        return values
    return x._own(values, values.ndim - 1, groups)


def sum_columns(
    values: Float[Array, "... columns"], x: Any, keepdims: bool = False
) -> Float[Array, "..."]:
    """Returns sums over the columns, of all devices if features x are `Columns`."""
    total = values.sum(-1, keepdims=keepdims)
    return lax.psum(total, x.axis) if isinstance(x, Columns) else total


def values_of(x: Any) -> Any:
    """Returns an array, that of `Columns`."""
    return x.values if isinstance(x, Columns) else x


def like(x: T, values: Any, width: int, groups: int = 1) -> T:
    """Returns values as features of the kind of x: a device's of so many columns."""
    if not isinstance(x, Columns):
        return values
    return Columns(values=values, width=width, axis=x.axis, groups=groups)  # pyrefly: ignore


def rows_to_columns(x: Float[Array, "own inputs"], axis: str) -> Columns:
    """Returns all devices' rows, in their order, by columns: one all-to-all.

    Args:
      x: this device's rows, as many as any other's.
      axis: of the mesh.

    Raises:
      ConfigError: no such axis, or no rows by columns.
    """
    require_axes(axis, "an exchange of rows for columns")
    checks.require(x.ndim == 2, "rows of columns must be a matrix", shape=x.shape)
    wide = _fill(x, 1, lax.axis_size(axis))
    values = lax.all_to_all(wide, axis, 1, 0, tiled=True)
    return Columns(values=values, width=x.shape[1], axis=axis)


def columns_to_rows(x: Columns) -> Float[Array, "own width"]:
    """Returns this device's rows of all columns, which are no groups: one all-to-all.

    Raises:
      ConfigError: rows that devices do not divide, or groups.
    """
    devices, rows = lax.axis_size(x.axis), len(x.values)
    rule = f"rows must be divided by {devices} devices, and columns be one group"
    checks.require(rows % devices == 0 and x.groups == 1, rule, rows=rows)
    return lax.all_to_all(x.values, x.axis, 0, 1, tiled=True)[:, : x.width]
