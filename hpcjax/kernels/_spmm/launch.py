"""Products of a sparse matrix with a dense one by a kernel: its plan, and its bytes."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from hpcjax.kernels._sr_bcrs.exact import count_exact
from hpcjax.kernels._sr_bcrs.format import SRBCRS, count_padding
from hpcjax.kernels._triton.launch import Launch, run

STRIDE = 32
# Columns of a program: the longer side of Hopper's products is 64 at least.
BLOCK = 128


class Sizes(NamedTuple):
    """What a launch depends on.

    Attributes:
      height: M of the sparse matrix.
      columns: N of the dense one.
      vector: V.
      left: bits of the sparse matrix's integers; 0 for floats.
      limb: bits of their limbs; 0 for floats.
      right: bits of the dense one's integers; 0 for floats.
    """

    height: int
    columns: int
    vector: int
    left: int
    limb: int
    right: int

    @property
    def limbs(self) -> int:
        """Limbs of an integer of the sparse matrix."""
        return self.left // self.limb if self.limb else 1


def find_problem(matrix: SRBCRS) -> str | None:
    """Returns why the kernel does not take a matrix; None if it does."""
    if matrix.stride != STRIDE:
        return f"the kernel takes stride={STRIDE}: got {matrix.stride}"
    return None


def plan(sizes: Sizes) -> Launch:
    """Returns the launch of a product."""
    unsigned = sizes.limbs > 1 or sizes.right == 16
    # A limb of the right operand has 8 bits at most.
    right = min(8, sizes.right)
    exact = count_exact(sizes.limb, right, unsigned=unsigned) if sizes.limb else None
    block = min(BLOCK, max(64, 1 << (sizes.columns - 1).bit_length()))
    lanes = max(16, 1 << (sizes.limbs * sizes.vector - 1).bit_length())
    total = jnp.int32 if sizes.limb else jnp.float32
    return Launch(
        kernel="hpcjax.kernels._spmm.kernel:spmm",
        grid=(sizes.height // sizes.vector, -(-sizes.columns // block), 1),
        outputs=(jax.ShapeDtypeStruct((sizes.height, sizes.columns), total),),
        constants={
            "N": sizes.columns,
            "V": sizes.vector,
            "STRIDE": STRIDE,
            "LIMBS": sizes.limbs,
            "LIMB": sizes.limb,
            "RIGHT": sizes.right,
            "GROUPS": exact // STRIDE if exact else 2**20,
            "LANES": lanes,
            "BLOCK": block,
        },
        stages=3,
    )


def spmm(matrix: SRBCRS, b: jax.Array, right: int, *, interpreted: bool) -> jax.Array:
    """See `kernels.spmm`; `right` are the bits of b, 0 for floats."""
    sizes = Sizes(
        height=matrix.shape[0],
        columns=b.shape[1] * (2 if right == 4 else 1),
        vector=matrix.vector,
        left=matrix.bits or 0,
        limb=matrix.limb or 0,
        right=right,
    )
    arrays = (matrix.values, matrix.columns, matrix.pointers, b)
    (y,) = run(plan(sizes), *arrays, interpreted=interpreted)
    return y


def operand_bytes(matrix: SRBCRS, columns: int, right: int) -> dict[str, int]:
    """Returns the bytes that a product reads and writes, by what they are.

    Args:
      matrix: the sparse operand.
      columns: N of the dense one.
      right: bits of its numbers.

    Returns:
      `operands`: indices, values and gathered rows of the vectors that are there;
      `padding`: indices and values of the others; `output`: int32 or float32.
    """
    padding = count_padding(matrix)
    vectors = matrix.columns.shape[0] - padding
    tile = matrix.values.size * matrix.values.dtype.itemsize
    # The same number of bytes for every slot.
    slot = 4 + tile // max(1, matrix.columns.shape[0])
    return {
        "operands": vectors * (slot + math.ceil(columns * right / 8)),
        "padding": padding * slot,
        "output": 4 * matrix.shape[0] * columns,
    }
