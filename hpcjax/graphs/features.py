"""Features of vertices that are mostly zeros, which are never made dense."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.structs import pytree, static
from hpcjax.graphs import columns, segments


@pytree
class SparseRows:
    """A matrix [rows, width] by the entries of its rows that are not zero.

    Attributes:
      offsets: integers [rows + 1], where each row's entries begin, and the end.
      columns: integers [entries], the column of each.
      values: [entries].
      width: number of columns.

    Raises:
      ConfigError: arrays that are no such matrix, as far as they are in host memory.
    """

    offsets: Any
    columns: Any
    values: Any
    width: int = static()

    def __post_init__(self) -> None:
        arrays = (self.offsets, self.columns, self.values)
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return  # traced, or a shape, or in a device's memory
        _check_rows(self.offsets, self.columns, self.values, self.width)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return len(self.offsets) - 1, self.width


def _check_rows(
    offsets: np.ndarray, columns: np.ndarray, values: np.ndarray, width: int
) -> None:
    rule = ""
    if any(each.ndim != 1 for each in (offsets, columns, values)):
        rule = "offsets, columns and values must have one axis each"
    elif {offsets.dtype.kind, columns.dtype.kind} - {*"iu"} and len(columns):
        rule = f"offsets and columns must be integers: got {columns.dtype}"
    elif len(columns) != len(values):
        rule = f"columns and values must be alike: got {len(columns)}, {len(values)}"
    elif not len(offsets) or offsets[0] != 0 or offsets[-1] != len(columns):
        rule = f"offsets must go from 0 to the {len(columns)} entries"
    elif (offsets[1:] < offsets[:-1]).any():
        rule = "offsets must not decrease"
    elif columns.size and not 0 <= columns.min() <= columns.max() < width:
        rule = f"columns must be in [0, {width}): got {columns.min()}, {columns.max()}"
    elif not np.isfinite(values).all():
        rule = "values must be finite: there is NaN or inf"
    if rule:
        raise ConfigError(f"SparseRows: {rule}")


Features = Any
"""Features of vertices: an array [vertices, features], `SparseRows` or `Columns`."""


def project(features: Features, kernel: jax.Array) -> jax.Array:
    """Returns X W; of sparse rows it takes rows of the kernel and adds them up.

    Of `Columns`, a device's columns of it.

    Args:
      features: X `[vertices, features]`.
      kernel: W `[features, *outputs]`, whose dtype products have.

    Returns:
      `[vertices, *outputs]`.

    Raises:
      ConfigError: another number of features than the kernel has.

    Examples:
      >>> rows = SparseRows(
      ...     offsets=np.array([0, 1, 3]),
      ...     columns=np.array([2, 0, 2]),
      ...     values=np.array([1.0, 1.0, 0.5], np.float32),
      ...     width=3,
      ... )
      >>> project(rows, jnp.array([[1.0], [2.0], [4.0]])).tolist()
      [[4.0], [3.0]]
    """
    if features.shape[1] != len(kernel):
        raise ConfigError(
            f"features must be {len(kernel)}, as the kernel has rows: got "
            f"{features.shape[1]}"
        )
    if isinstance(features, columns.Columns):
        return features.project(kernel)
    if isinstance(features, SparseRows):
        taken = kernel[features.columns]
        weights = jnp.asarray(features.values, kernel.dtype)
        weights = weights.reshape(-1, *[1] * (kernel.ndim - 1))
        rows = _rows_of(features)
        count = features.shape[0]
        return segments.segment_sum(taken * weights, rows, count, is_sorted=True)
    return jnp.tensordot(features.astype(kernel.dtype), kernel, 1)


def _rows_of(features: SparseRows) -> Any:
    """Returns the row of each entry, int32 [entries]."""
    offsets, entries = features.offsets, len(features.columns)
    if isinstance(offsets, np.ndarray):
        return np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    rows = jnp.arange(len(offsets) - 1, dtype=jnp.int32)
    return jnp.repeat(rows, jnp.diff(offsets), total_repeat_length=entries)


def drop_entries(features: Features, rate: float, key: jax.Array) -> Features:
    """Returns features each of which is zero with probability `rate`, others scaled up.

    Of sparse rows, the entries that are stored are drawn for: the others are zero.

    Args:
      features: an array of any shape, `SparseRows` or `Columns`.
      rate: in [0, 1).
      key: of the draw.

    Raises:
      ConfigError: another rate.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"rate must be in [0, 1): got {rate}")
    if isinstance(features, SparseRows):
        return SparseRows(
            offsets=features.offsets,
            columns=features.columns,
            values=drop_entries(jnp.asarray(features.values), rate, key),
            width=features.width,
        )
    if isinstance(features, columns.Columns):
        own = jax.random.fold_in(key, jax.lax.axis_index(features.axis))
        values = drop_entries(features.values, rate, own)
        return columns.like(features, values, features.width, features.groups)
    kept = jax.random.bernoulli(derive(key, "dropout"), 1 - rate, features.shape)
    return jnp.where(kept, features / (1 - rate), 0)


def make_dense(features: Features) -> np.ndarray:
    """Returns features as a numpy array [vertices, features], for peers and tests."""
    if not isinstance(features, SparseRows):
        return np.asarray(features)
    dense = np.zeros(features.shape, features.values.dtype)
    np.add.at(dense, (_rows_of(features), features.columns), features.values)
    return dense
