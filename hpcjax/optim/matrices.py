"""Parameters as matrices: their shape, their cut into blocks, batches of blocks."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class MatrixPlan(NamedTuple):
    """A parameter as a grid of blocks, each with a left and a right preconditioner.

    Attributes:
      row_sizes: heights of the blocks.
      column_sizes: widths of the blocks.
      left: whether the rows are preconditioned.
      right: whether the columns are.
    """

    row_sizes: tuple[int, ...]
    column_sizes: tuple[int, ...]
    left: bool
    right: bool


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """Returns the shape of the matrix that a parameter becomes, None for vectors.

    A convolution kernel [h, w, in, out] becomes [h·w·in, out]. That is the transpose of
    PyTorch's [out, in·h·w], up to the order of the inputs; the left and the right
    preconditioner change places. In other shapes of more than two axes the adjacent
    pair with the smallest product is merged until two axes are left.

    Args:
      shape: the shape of the parameter.

    Examples:
      >>> matrix_shape((3, 3, 16, 32)), matrix_shape((64, 4, 16)), matrix_shape((7,))
      ((144, 32), (64, 64), None)
    """
    if len(shape) < 2 or 0 in shape:
        return None
    if len(shape) == 4:
        return int(np.prod(shape[:3])), shape[3]
    # Greedy: merging the smallest product keeps the two sides, and so the matrices that
    # precondition them, small.
    sides = list(shape)
    while len(sides) > 2:
        products = [a * b for a, b in itertools.pairwise(sides)]
        at = int(np.argmin(products))
        sides[at : at + 2] = [products[at]]
    return sides[0], sides[1]


class Cuts(NamedTuple):
    """How parameters are cut into blocks.

    Attributes:
      max_dim: a side of a block longer than this is not preconditioned.
      block_size: sides are cut into pieces of at most this length; None cuts nothing.
      stacked: regexes of parameters whose first axis is a stack of layers, such as the
        blocks of a scanned Transformer; each layer is a matrix of its own.
    """

    max_dim: int
    block_size: int | None = None
    stacked: tuple[str, ...] = ()


def matrix_plan(
    shape: Sequence[int],
    max_dim: int,
    block_size: int | None = None,
    *,
    stack: bool = False,
) -> MatrixPlan | None:
    """Returns how a parameter is cut into blocks, None if no side is preconditioned.

    Args:
      shape: the shape of the parameter.
      max_dim: a side of a block longer than this is not preconditioned.
      block_size: sides are cut into pieces of at most this length; None cuts nothing.
      stack: the first axis counts layers, each of which is a matrix of its own.

    Examples:
      >>> matrix_plan((4, 5, 3), max_dim=8, stack=True)
      MatrixPlan(row_sizes=(5, 5, 5, 5), column_sizes=(3,), left=True, right=True)
      >>> matrix_plan((5, 3), max_dim=4, block_size=2)
      MatrixPlan(row_sizes=(2, 2, 1), column_sizes=(2, 1), left=True, right=True)
      >>> matrix_plan((5, 3), max_dim=4)
      MatrixPlan(row_sizes=(5,), column_sizes=(3,), left=False, right=True)
    """
    layers, shape = (shape[0], shape[1:]) if stack and shape else (1, shape)
    sides = matrix_shape(shape)
    if sides is None or not layers:
        return None

    def cut(length: int) -> tuple[int, ...]:
        size = block_size or length
        whole, rest = divmod(length, size)
        return (size,) * whole + ((rest,) if rest else ())

    # The layers of a stack lie below one another, so they are blocks of its rows.
    rows, columns = cut(sides[0]) * layers, cut(sides[1])
    left, right = max(rows) <= max_dim, max(columns) <= max_dim
    return MatrixPlan(rows, columns, left, right) if left or right else None


def to_blocks(plan: MatrixPlan, array: Float[Array, "..."]) -> list[Any]:
    """Returns the blocks of `array`, row by row of the grid.

    Examples:
      >>> plan = matrix_plan((2, 4), max_dim=8, block_size=2)
      >>> [b.tolist() for b in to_blocks(plan, jnp.arange(8.0).reshape(2, 4))]
      [[[0.0, 1.0], [4.0, 5.0]], [[2.0, 3.0], [6.0, 7.0]]]
    """
    matrix = array.reshape(sum(plan.row_sizes), sum(plan.column_sizes))
    row_ends = np.cumsum(plan.row_sizes)[:-1].tolist()
    column_ends = np.cumsum(plan.column_sizes)[:-1].tolist()
    return [
        block
        for stripe in jnp.split(matrix, row_ends, axis=0)
        for block in jnp.split(stripe, column_ends, axis=1)
    ]


def from_blocks(
    plan: MatrixPlan, blocks: Sequence[Any], shape: Sequence[int]
) -> Float[Array, "..."]:
    """Joins the blocks of `to_blocks` to an array of the given shape.

    Examples:
      >>> plan = matrix_plan((3, 2), max_dim=8, block_size=2)
      >>> array = jnp.arange(6.0).reshape(3, 2)
      >>> bool((from_blocks(plan, to_blocks(plan, array), (3, 2)) == array).all())
      True
    """
    # `to_blocks` numbers the grid row by row: each run of `width` blocks is one stripe.
    width = len(plan.column_sizes)
    stripes = [
        jnp.concatenate(blocks[start : start + width], axis=1)
        for start in range(0, len(blocks), width)
    ]
    return jnp.concatenate(stripes, axis=0).reshape(shape)


def sandwich(
    left: Float[Array, "rows rows"] | None,
    block: Float[Array, "rows columns"],
    right: Float[Array, "columns columns"] | None,
    precision: str = "highest",
) -> Float[Array, "rows columns"]:
    """Returns left·block·right, where None is the identity.

    Examples:
      >>> sandwich(2 * jnp.eye(1), jnp.ones((1, 2)), None).tolist()
      [[2.0, 2.0]]
    """
    if left is not None:
        block = jnp.matmul(left, block, precision=precision)
    return block if right is None else jnp.matmul(block, right, precision=precision)


def gram(
    gradient: Float[Array, "rows columns"], precision: str = "highest"
) -> Float[Array, "rows rows"]:
    """Returns GGᵀ.

    Examples:
      >>> gram(jnp.ones((1, 2))).tolist()
      [[2.0]]
    """
    return jnp.matmul(gradient, gradient.T, precision=precision)


def _signature(arguments: Any) -> Any:
    """Returns structure, shapes and dtypes of a tree, as a key for grouping."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple((leaf.shape, jnp.result_type(leaf)) for leaf in leaves)


def map_equal_shapes(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    sequential: bool = False,
) -> list[Any]:
    """Returns `[function(*a) for a in arguments]`, with equal shapes in one batch.

    Equal means equal tree structure, shapes and dtypes. Each group of equal calls is
    stacked and traced once, which keeps programs for deep networks small.

    Args:
      function: takes and returns trees of arrays; must work under `vmap`, or in a scan.
      arguments: one tuple of trees for each call.
      sequential: runs the calls of a group in a loop instead of batching them.

    Examples:
      >>> pairs = [(jnp.ones(2),), (jnp.ones(3),), (jnp.zeros(2),)]
      >>> [float(total) for total in map_equal_shapes(jnp.sum, pairs)]
      [2.0, 3.0, 0.0]
    """
    # A decomposition of n matrices of one size in a batch is one operation in the
    # program instead of n, and keeps a GPU busy where single small matrices would not.
    groups: dict[Any, list[int]] = {}
    for index, argument in enumerate(arguments):
        groups.setdefault(_signature(argument), []).append(index)
    results: list[Any] = [None] * len(arguments)
    for members in groups.values():
        if len(members) == 1:
            results[members[0]] = function(*arguments[members[0]])
            continue
        chosen = [arguments[index] for index in members]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chosen)
        if sequential:
            batch = jax.lax.map(lambda each: function(*each), stacked)
        else:
            batch = jax.vmap(function)(*stacked)
        for place, index in enumerate(members):
            results[index] = jax.tree.map(lambda leaf, i=place: leaf[i], batch)
    return results
