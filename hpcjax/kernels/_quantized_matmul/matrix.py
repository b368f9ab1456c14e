"""A matrix of few bits a weight: packed integers, and a scale and zero by group."""

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
    """Weights scale · (q − zero), with q packed as `pack` does.

    Rows are stored group after group, the last one possibly short: row r has the scale
    of group r // group_size. Where groups are not of neighbouring inputs (act-order),
    `order` says which input a row belongs to, so that a product gathers x once and
    never looks a group up. Every array may have further axes in front, as stacked
    layers have; products take a matrix without.

    Attributes:
      words: uint32, `[..., packed_rows(inputs, bits), outputs]`.
      scale: float16, bfloat16 or float32, `[..., groups, outputs]`.
      zero: integers as floats, `[..., groups, outputs]`.
      order: int32, `[..., inputs]`, or None if rows are in the order of the inputs.
      bits: 2, 3, 4 or 8.
      inputs: how many rows there are; the packing may hold some more.
      group_size: rows of a group; None for one group of all of them.
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
        """How many axes `shape` has."""
        return len(self.words.shape)

    @property
    def dtype(self) -> Any:
        """That of the scales."""
        return self.scale.dtype

    def dequantize(self, dtype: Any = "float32") -> Float[Array, "*stack inputs outs"]:
        """Returns the weights, in the order of the inputs, formed in float32.

        Examples:
          >>> integers, one = jnp.array([[0], [3]], jnp.uint8), jnp.ones((1, 1))
          >>> quantized_matrix(integers, 2 * one, one, bits=2).dequantize().tolist()
          [[-2.0], [4.0]]
        """
        if self.ndim > 2:
            return jax.vmap(lambda one: one.dequantize(dtype))(self)
        rows = self.rows(dtype)
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
    """Packs integers; inputs that fill up the last run of 32 have their zero point.

    Args:
      integers: q in [0, 2^bits), `[inputs, outputs]`, in the order of the inputs.
      scale: of each group, `[groups, outputs]`.
      zero: the integer that stands for 0, as a float, `[groups, outputs]`.
      bits: 2, 3, 4 or 8.
      group: which group an input has, if not that of its place, `[inputs]`. Inputs are
        then stored sorted by group. Not traced.
      group_size: inputs of a group, the last one possibly short; None stands for
        inputs / groups.

    Raises:
      ConfigError: another number of bits; shapes, groups and group size that do not go
        together; ternary values, whose zero is no integer of the grid.

    Examples:
      >>> integers = jnp.arange(8, dtype=jnp.uint8).reshape(4, 2)
      >>> scale, zero = jnp.ones((2, 2)), jnp.zeros((2, 2))
      >>> made = quantized_matrix(
      ...   integers, scale, zero, bits=4, group=jnp.array([1, 0, 0, 1])
      ... )
      >>> made.shape, made.order.tolist()
      ((4, 2), [1, 2, 0, 3])
    """
    inputs, outputs = integers.shape
    rows = packing.packed_rows(inputs, bits) // bits * packing.RUN
    size = _group_size(inputs, outputs, scale.shape, zero.shape, group_size)
    _check_zero(zero, bits)
    order = None if group is None else _order(np.asarray(group), inputs, size)
    sorted_ = integers if order is None else integers[order]
    filler = jnp.clip(jnp.round(zero[-1]), 0, 2**bits - 1).astype(integers.dtype)
    filled = jnp.concatenate(
        [sorted_, jnp.broadcast_to(filler, (rows - inputs, outputs))]
    )
    return QuantizedMatrix(
        # Compiled, it forms no array of single bits.
        words=jax.jit(packing.pack, static_argnums=1)(filled, bits),
        scale=scale,
        zero=zero,
        order=None if order is None else jnp.asarray(order),
        bits=bits,
        inputs=inputs,
        group_size=None if scale.shape[0] == 1 else size,
    )


def stack_matrices(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Stacks matrices along a new first axis; if one of them keeps an order, all do.

    Raises:
      ConfigError: they differ in shape, bits or group size.
    """
    _check_alike({(each.shape, each.bits, each.group_size) for each in matrices})
    if any(each.order is not None for each in matrices):
        # An order may happen to be that of the inputs, which is left out.
        matrices = [
            dataclasses.replace(each, order=jnp.arange(each.inputs, dtype=jnp.int32))
            if each.order is None
            else each
            for each in matrices
        ]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *matrices)


def join_outputs(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Puts matrices of the same inputs side by side.

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
    return _each_output(lambda *parts: jnp.concatenate(parts, axis=-1), *matrices)


def take_outputs(matrix: QuantizedMatrix, outputs: slice) -> QuantizedMatrix:
    """Returns the matrix of some of the outputs."""
    return _each_output(operator.itemgetter((..., outputs)), matrix)


def _each_output(
    change: Callable[..., jax.Array], *matrices: QuantizedMatrix
) -> QuantizedMatrix:
    """Applies a function to every array that has outputs."""
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
    """Raises ConfigError unless a matrix without further axes has its shapes."""
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
    _group_size(
        matrix.inputs,
        outputs,
        matrix.scale.shape,
        matrix.zero.shape,
        matrix.group_size or matrix.inputs,
    )


def with_scales(matrix: QuantizedMatrix, scale: Any, zero: Any) -> QuantizedMatrix:
    """Returns the same integers on another grid."""
    return dataclasses.replace(matrix, scale=scale, zero=zero)


def _group_size(
    inputs: int,
    outputs: int,
    scale: tuple[int, ...],
    zero: tuple[int, ...],
    size: int | None,
) -> int:
    """Returns the inputs of a group, having checked shapes against it."""
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
    """Raises ConfigError for zero points that are no integers, where they are known."""
    if isinstance(zero, jax.core.Tracer):
        return
    found = np.asarray(zero, np.float32)
    if not ((found == np.round(found)) & (np.abs(found) <= 2**bits)).all():
        raise ConfigError(
            f"zero must hold integers of at most {2**bits} in size, as the grids of "
            f"{bits} bits have, ternary ones not: got {found.min()} to {found.max()}"
        )


def _order(group: np.ndarray, inputs: int, size: int) -> np.ndarray | None:
    """Returns the inputs sorted by group, None if they are already."""
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
