"""Strided row-major block-compressed rows, SR-BCRS: the format, and what it takes.

A nonzero is a column vector of V rows. The vectors of V rows of the matrix, a row of
vectors, are padded to whole groups of s, the depth of a tensor-core product. A group's
values are a row-major V×s tile for each limb of their integers.

References:
  Li, Osawa and Hoefler, Efficient Quantized Sparse Matrix Operations on Tensor Cores,
  SC 2022, §4.1 (the format) and §4.4 (limbs).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Shaped

from hpcjax.core import checks
from hpcjax.core.structs import pytree, static
from hpcjax.kernels._sr_bcrs import nibbles

VECTORS = (2, 4, 8)
STRIDES = (4, 8, 16, 32)
BITS = (4, 8, 12, 16)
_LIMBS = (4, 8)


@pytree
class SRBCRS:
    """A sparse matrix of column vectors.

    Attributes:
      values: a tile for each group and limb: integers in uint8 `[groups, limbs, V, s]`,
        or `[groups, limbs, V, s / 2]` of two nibbles a byte; or floats
        `[groups, 1, V, s]`. Zero in padding.
      columns: int32 `[groups * s]`, ascending in a row of vectors; −1 in padding.
      pointers: int32 `[2 * rows of vectors]`: where each row begins, a multiple of s,
        and where it ends without its padding.
      rows: int32 `[groups]`, the row of vectors of each group.
      shape: `(M, K)` of the matrix.
      vector: V.
      stride: s.
      bits: of an integer; None for floats.
      limb: bits of a limb, of which integers are made; None for floats.
    """

    values: Any
    columns: Any
    pointers: Any
    rows: Any
    shape: tuple[int, int] = static()
    vector: int = static()
    stride: int = static()
    bits: int | None = static(default=None)
    limb: int | None = static(default=None)

    @property
    def groups(self) -> int:
        """Number of groups of s vectors."""
        return self.rows.shape[0]

    def tiles(self) -> Shaped[Array, "groups V s"]:
        """Returns the numbers, int32 or floats."""
        if self.limb is None:
            return self.values[:, 0]
        planes = self.values if self.limb == 8 else nibbles.split_nibbles(self.values)
        limbs = [planes[:, place] for place in range(planes.shape[1])]
        return nibbles.join_limbs(limbs, self.limb)

    def to_dense(self) -> Shaped[Array, "M K"]:
        """Returns the whole matrix, int32 or floats.

        Examples:
          >>> matrix = sr_bcrs(np.array([[0, 1, 0], [0, 2, -3]]), vector=2)
          >>> matrix.to_dense().tolist()
          [[0, 1, 0], [0, 2, -3]]
        """
        height, width = self.shape
        tiles = self.tiles().reshape(self.groups, self.vector, self.stride)
        line = self.rows[:, None] * self.vector + np.arange(self.vector)
        columns = self.columns.reshape(self.groups, 1, self.stride)
        # Padding goes to a column behind the last, which is cut off.
        to = jnp.where(columns < 0, width, columns)
        dense = jnp.zeros((height, width + 1), tiles.dtype)
        return dense.at[line[:, :, None], to].set(tiles)[:, :width]


def sr_bcrs(
    dense: Any,
    *,
    vector: int = 8,
    stride: int = 32,
    bits: int | None = None,
    limb: int | None = None,
    mask: Bool[Array | np.ndarray, "rows K"] | None = None,
) -> SRBCRS:
    """Compresses a matrix, on the host.

    Args:
      dense: `[M, K]`, integers or floats.
      vector: V, of 2, 4 or 8 rows.
      stride: s; the kernels take 32.
      bits: of an integer, 4, 8, 12 or 16; None for 8. Not for floats.
      limb: bits of a limb, 8 or 4, which `spmm` takes with right operands of 8 and 16
        or of 4 bits; None for 8, or as many as the integer has.
      mask: which vectors are kept, `[M / V, K]`; None for those with a nonzero.

    Raises:
      ConfigError: sizes that do not fit, or integers out of range.

    Examples:
      >>> matrix = sr_bcrs(np.eye(4, dtype=int), vector=2, stride=4)
      >>> matrix.columns.tolist(), matrix.pointers.tolist()
      ([0, 1, -1, -1, 2, 3, -1, -1], [0, 2, 4, 6])
    """
    array = np.asarray(dense)
    _check_sizes(array, vector, stride)
    height, width = array.shape
    blocks = array.reshape(height // vector, vector, width)
    kept = np.any(blocks != 0, axis=1) if mask is None else np.asarray(mask, bool)
    wanted = (height // vector, width)
    checks.require(kept.shape == wanted, f"mask must be {wanted}", shape=kept.shape)
    columns, pointers, rows = _place(kept, stride)
    # [groups, V, s]: of each slot the vector of its row, zero in padding.
    slots = columns.reshape(-1, 1, stride)
    tiles = np.where(
        slots < 0, 0, blocks[rows[:, None, None], np.arange(vector)[:, None], slots]
    )
    # JAX's, for numpy does not know that int4 is an integer, nor bfloat16 a float.
    if jnp.issubdtype(array.dtype, jnp.integer):
        bits, limb = _check_integers(array, bits, limb)
        values = _split(jnp.asarray(tiles, jnp.int32), bits, limb)
    else:
        checks.require(
            bits is None and limb is None, "floats have no bits", bits=bits, limb=limb
        )
        values = jnp.asarray(tiles)[:, None]
    return SRBCRS(
        values=values,
        columns=jnp.asarray(columns),
        pointers=jnp.asarray(pointers),
        rows=jnp.asarray(rows),
        shape=(height, width),
        vector=vector,
        stride=stride,
        bits=bits,
        limb=limb,
    )


def storage_bytes(matrix: SRBCRS) -> int:
    """Returns the bytes of indices, values and pointers, padding included.

    Examples:
      >>> storage_bytes(sr_bcrs(np.eye(4, dtype=int), vector=2, stride=4))
      64
    """
    arrays = (matrix.values, matrix.columns, matrix.pointers)
    return sum(array.size * array.dtype.itemsize for array in arrays)


def count_padding(matrix: SRBCRS) -> int:
    """Returns how many vectors are padding.

    Examples:
      >>> count_padding(sr_bcrs(np.eye(4, dtype=int), vector=2, stride=4))
      4
    """
    begins, ends = np.asarray(matrix.pointers).reshape(-1, 2).T
    return matrix.columns.shape[0] - int(np.sum(ends - begins))


def with_values(
    pattern: SRBCRS,
    tiles: Shaped[Array, "groups V s"],
    *,
    bits: int | None = None,
    limb: int | None = None,
) -> SRBCRS:
    """Returns a matrix with other numbers at the places of a pattern.

    Args:
      pattern: where the numbers are.
      tiles: of every group, zero in padding; floats or, with `bits`, int32 in range.
      bits: of integers; None for numbers that are kept as they are.
      limb: bits of their limbs; as for `sr_bcrs`.

    Raises:
      ConfigError: tiles of another shape, or bits that do not fit or are of floats.

    Examples:
      >>> pattern = sr_bcrs(np.array([[0, 1], [0, 1]]), vector=2)
      >>> with_values(pattern, 2.0 * pattern.tiles()).to_dense().tolist()
      [[0.0, 2.0], [0.0, 2.0]]
    """
    wanted = (pattern.groups, pattern.vector, pattern.stride)
    good = tuple(tiles.shape) == wanted
    checks.require(good, f"tiles must be {list(wanted)}", shape=list(tiles.shape))
    if bits is None:
        checks.require(limb is None, "numbers without bits have no limbs", limb=limb)
        values = tiles[:, None]
    else:
        bits, limb = _check_bits(bits, limb)
        good = jnp.issubdtype(tiles.dtype, jnp.integer)
        checks.require(good, "floats have no bits", dtype=str(tiles.dtype), bits=bits)
        values = _split(tiles, bits, limb)
    return dataclasses.replace(pattern, values=values, bits=bits, limb=limb)


def _place(kept: np.ndarray, stride: int) -> tuple[np.ndarray, ...]:
    """Returns columns with padding, pointers, and the row of each group."""
    count = kept.sum(axis=1)
    groups = -(-count // stride)
    begins = np.concatenate([[0], np.cumsum(groups)[:-1]]) * stride
    columns = np.full(groups.sum() * stride, -1, np.int32)
    row, column = np.nonzero(kept)
    within = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    columns[begins[row] + within] = column
    pointers = np.stack([begins, begins + count], axis=1).reshape(-1)
    rows = np.repeat(np.arange(len(kept)), groups)
    return columns, pointers.astype(np.int32), rows.astype(np.int32)


def _split(tiles: jax.Array, bits: int, limb: int) -> jax.Array:
    planes = jnp.stack(nibbles.split_limbs(tiles, bits, limb), axis=1)
    return planes if limb == 8 else nibbles.pack_nibbles(planes)


def _check_sizes(array: np.ndarray, vector: int, stride: int) -> None:
    checks.require(vector in VECTORS, f"vector must be one of {VECTORS}", vector=vector)
    checks.require(stride in STRIDES, f"stride must be one of {STRIDES}", stride=stride)
    good = array.ndim == 2 and array.shape[0] % vector == 0 and array.size > 0
    rule = f"a matrix of whole vectors must be [multiple of {vector}, columns]"
    checks.require(good, rule, shape=array.shape)
    kinds = jnp.integer, jnp.floating
    good = any(jnp.issubdtype(array.dtype, kind) for kind in kinds)
    rule = "a matrix must hold integers or floats"
    checks.require(good, rule, dtype=str(array.dtype))


def _check_bits(bits: int, limb: int | None) -> tuple[int, int]:
    checks.require(bits in BITS, f"bits must be one of {BITS}", bits=bits)
    limb = min(8, bits) if limb is None else limb
    good = limb in _LIMBS and bits % limb == 0
    checks.require(
        good, f"limb must be one of {_LIMBS} and divide bits", limb=limb, bits=bits
    )
    return bits, limb


def _check_integers(
    array: np.ndarray, bits: int | None, limb: int | None
) -> tuple[int, int]:
    bits, limb = _check_bits(8 if bits is None else bits, limb)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    good = least <= array.min() and array.max() <= most
    rule = f"integers of {bits} bits must be in [{least}, {most}]"
    checks.require(good, rule, least=int(array.min()), most=int(array.max()))
    return bits, limb
