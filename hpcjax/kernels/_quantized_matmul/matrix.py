"""Quantized matrices: packed integers with a scale and a zero point for each group."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from hpcjax.core.errors import ConfigError
from hpcjax.core.structs import pytree, static
from hpcjax.kernels._quantized_matmul import packing


@pytree
class QuantizedMatrix:
    """Weights scale · (q − zero), with integers q packed by `pack`.

    Rows are stored group by group, so that row r has the scale of group r //
    group_size; the last group may be short. If groups are not of neighbouring inputs
    (act-order of GPTQ), `order` is the input of each row. A product then gathers x
    once, and needs no lookup of groups. All arrays may have further leading axes, such
    as stacked layers; products take a matrix without them.

    Attributes:
      words: uint32, `[..., packed_rows(inputs, bits), outputs]`.
      scale: float16, bfloat16 or float32, `[..., groups, outputs]`.
      zero: integers as floats, `[..., groups, outputs]`.
      order: int32, `[..., inputs]`; None if rows are in the order of inputs.
      bits: 2, 3, 4 or 8.
      inputs: number of rows, without the padding of the last run.
      group_size: rows of a group; None for a single group.
    """

    words: Any
    scale: Any
    zero: Any
    order: Any = None
    bits: int = static()
    inputs: int = static()
    group_size: int | None = static(default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., inputs, outputs]`, as the dense kernel has it."""
        *stacked, _, outputs = self.words.shape
        return (*stacked, self.inputs, outputs)

    @property
    def ndim(self) -> int:
        """Number of axes of `shape`."""
        return len(self.words.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the scales."""
        return self.scale.dtype

    def dequantize(self, dtype: Any = "float32") -> Float[Array, "*stack inputs outs"]:
        """Returns the weights in the order of inputs, computed in float32.

        Examples:
          >>> integers, one = jnp.array([[0], [3]], jnp.uint8), jnp.ones((1, 1))
          >>> quantized_matrix(integers, 2 * one, one, bits=2).dequantize().tolist()
          [[-2.0], [4.0]]
        """
        if self.ndim > 2:
            return jax.vmap(lambda one: one.dequantize(dtype))(self)
        rows = self.rows(dtype)
        # The argsort of a permutation is its inverse.
        return rows if self.order is None else rows[jnp.argsort(self.order)]

    def rows(self, dtype: Any) -> Float[Array, "inputs outputs"]:
        """Returns the weights in the order in which they are stored."""
        integers = packing.unpack(self.words, self.bits, self.inputs)
        group = np.arange(self.inputs) // (self.group_size or self.inputs)
        scale, zero = (v.astype("float32")[group] for v in (self.scale, self.zero))
        return (scale * (integers.astype("float32") - zero)).astype(dtype)


def quantized_matrix(
    integers: Integer[Array, "inputs outputs"],
    scale: Float[Array, "groups outputs"],
    zero: Float[Array, "groups outputs"],
    *,
    bits: int,
    group: Int[Array, " inputs"] | None = None,
    group_size: int | None = None,
) -> QuantizedMatrix:
    """Packs integers into a `QuantizedMatrix`.

    Args:
      integers: q in [0, 2^bits), `[inputs, outputs]`, in the order of inputs.
      scale: of each group, `[groups, outputs]`.
      zero: the integer that stands for 0, as a float, `[groups, outputs]`.
      bits: 2, 3, 4 or 8.
      group: the group of each input, `[inputs]`, if groups are not of neighbouring
        inputs. Rows are then sorted by group. Must not be traced.
      group_size: inputs of a group, of which the last may be short; None for
        inputs / groups.

    Raises:
      ConfigError: another number of bits; shapes, groups and group size that do not
        fit; ternary values, whose zero is not an integer of the grid.

    Examples:
      >>> integers = jnp.arange(8, dtype=jnp.uint8).reshape(4, 2)
      >>> scale, zero = jnp.ones((2, 2)), jnp.zeros((2, 2))
      >>> matrix = quantized_matrix(
      ...   integers, scale, zero, bits=4, group=jnp.array([1, 0, 0, 1])
      ... )
      >>> matrix.shape, matrix.order.tolist()
      ((4, 2), [1, 2, 0, 3])
    """
    inputs, outputs = integers.shape
    rows = packing.packed_rows(inputs, bits) // bits * packing.RUN
    size = _check_group_size(inputs, outputs, scale.shape, zero.shape, group_size)
    _check_zero(zero, bits)
    order = None if group is None else _sort_rows(np.asarray(group), inputs, size)
    sorted_ = integers if order is None else integers[order]
    # The padding of the last run dequantizes to 0, or to the nearest value of the grid.
    filler = jnp.clip(jnp.round(zero[-1]), 0, 2**bits - 1).astype(integers.dtype)
    filled = jnp.concatenate(
        [sorted_, jnp.broadcast_to(filler, (rows - inputs, outputs))]
    )
    return QuantizedMatrix(
        # Under jit, XLA fuses the array of single bits away.
        words=jax.jit(packing.pack, static_argnums=1)(filled, bits),
        scale=scale,
        zero=zero,
        order=None if order is None else jnp.asarray(order),
        bits=bits,
        inputs=inputs,
        group_size=None if scale.shape[0] == 1 else size,
    )


def stack_matrices(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Stacks matrices along a new first axis; if one of them has an order, all get one.

    Raises:
      ConfigError: they differ in shape, bits or group size.
    """
    _check_alike({(each.shape, each.bits, each.group_size) for each in matrices})
    if any(each.order is not None for each in matrices):
        # A matrix without an order may be one whose order is that of the inputs.
        matrices = [
            dataclasses.replace(each, order=jnp.arange(each.inputs, dtype=jnp.int32))
            if each.order is None
            else each
            for each in matrices
        ]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *matrices)


def join_outputs(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Joins matrices with the same inputs along their outputs.

    Raises:
      ConfigError: they differ in inputs, bits, group size or the order of the rows.
    """
    _check_alike({(each.inputs, each.bits, each.group_size) for each in matrices})
    orders = [
        np.arange(each.inputs) if each.order is None else each.order
        for each in matrices
    ]
    if not all(np.array_equal(order, orders[0]) for order in orders):
        raise ConfigError(
            "matrices side by side must have their rows in one order: got several"
        )
    return _map_outputs(lambda *parts: jnp.concatenate(parts, axis=-1), *matrices)


def take_outputs(
    matrix: QuantizedMatrix, outputs: slice | np.ndarray
) -> QuantizedMatrix:
    """Returns the matrix of some of the outputs, a slice or their places in order."""
    return _map_outputs(operator.itemgetter((..., outputs)), matrix)


def _map_outputs(
    change: Callable[..., jax.Array], *matrices: QuantizedMatrix
) -> QuantizedMatrix:
    """Applies a function to every array with an axis of outputs."""
    changed: dict[str, Any] = {
        name: change(*(getattr(each, name) for each in matrices))
        for name in ("words", "scale", "zero")
    }
    return dataclasses.replace(matrices[0], **changed)


def _check_alike(kinds: set[tuple[Any, ...]]) -> None:
    if len(kinds) != 1:
        raise ConfigError(
            "matrices must be alike in size, bits and group size: got "
            f"{sorted(map(str, kinds))}"
        )


def check_matrix(matrix: QuantizedMatrix) -> None:
    """Raises ConfigError if a matrix is stacked or its shapes do not fit together."""
    if matrix.ndim != 2:
        raise ConfigError(
            "a product takes one matrix, not a stack of them: got words of shape "
            f"{list(matrix.words.shape)}; take one along the first axis"
        )
    if matrix.words.dtype != "uint32":
        raise ConfigError(
            "words must be uint32, to which a file's int32 are bitcast: got "
            f"{matrix.words.dtype}"
        )
    rows, outputs = matrix.words.shape
    wanted = packing.packed_rows(matrix.inputs, matrix.bits)
    if rows != wanted:
        raise ConfigError(
            f"{matrix.inputs} inputs of {matrix.bits} bits are {wanted} words: "
            f"got {rows}"
        )
    if matrix.order is not None and matrix.order.shape != (matrix.inputs,):
        raise ConfigError(
            f"order must be [{matrix.inputs}], one place for each input: got "
            f"{list(matrix.order.shape)}"
        )
    _check_group_size(
        matrix.inputs,
        outputs,
        matrix.scale.shape,
        matrix.zero.shape,
        matrix.group_size or matrix.inputs,
    )


def replace_scales(matrix: QuantizedMatrix, scale: Any, zero: Any) -> QuantizedMatrix:
    """Returns the matrix with other scales and zeros."""
    return dataclasses.replace(matrix, scale=scale, zero=zero)


def _check_group_size(
    inputs: int,
    outputs: int,
    scale: tuple[int, ...],
    zero: tuple[int, ...],
    size: int | None,
) -> int:
    """Returns the number of inputs of a group, after checks of the shapes."""
    if len(scale) != 2 or scale != zero or scale[1] != outputs or not scale[0]:
        raise ConfigError(
            f"scale and zero must be [groups, {outputs}] alike: got {list(scale)} "
            f"and {list(zero)}"
        )
    groups = scale[0]
    if size is None and inputs % groups:
        raise ConfigError(
            f"{groups} groups do not divide {inputs} inputs: say group_size, the last "
            "group is then short"
        )
    size = size or inputs // groups
    if size < 1 or groups != -(-inputs // size):
        raise ConfigError(
            f"{inputs} inputs in groups of group_size={size} are "
            f"{-(-inputs // max(size, 1))} groups: got {groups}"
        )
    return size


def _check_zero(zero: jax.Array, bits: int) -> None:
    """Raises ConfigError for zero points that are not integers, unless traced."""
    if isinstance(zero, jax.core.Tracer):
        return
    values = np.asarray(zero, np.float32)
    if not ((values == np.round(values)) & (np.abs(values) <= 2**bits)).all():
        raise ConfigError(
            f"zero must hold integers of at most {2**bits} in size, as the grids of "
            f"{bits} bits have, ternary ones not: got {values.min()} to {values.max()}"
        )


def _sort_rows(group: np.ndarray, inputs: int, size: int) -> np.ndarray | None:
    """Returns the inputs sorted by group; None if they already are."""
    if group.shape != (inputs,):
        raise ConfigError(
            f"group must be [{inputs}], one for each input: got {list(group.shape)}"
        )
    place = np.arange(inputs) // size
    if (group == place).all():
        return None
    order = np.argsort(group, kind="stable").astype(np.int32)
    if (group[order] != place).any():
        sizes = np.unique(group, return_counts=True)[1].tolist()
        raise ConfigError(
            f"all groups but the last must have group_size={size} inputs: got "
            f"{len(sizes)} groups, of {sizes[:8]} inputs"
        )
    return order
