"""A product of sparse integers that is not swapped: the control."""

import triton
import triton.language as tl


@triton.jit
def plain_product(
    values: tl.tensor,
    columns: tl.tensor,
    b: tl.tensor,
    y: tl.tensor,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    V: tl.constexpr,
) -> None:
    """Multiplies tiles with gathered rows, as int8 and as the formula has it.

    Args:
      values: int8 [GROUPS, V, 32]
      columns: int32 [GROUPS * 32]
      b: int8 [K, N]
      y: int32 [V, N]
      GROUPS: of the row of vectors
      N: columns of b
      V: rows of a vector, at least 16 for Triton
    """
    slot, line, n = tl.arange(0, 32), tl.arange(0, V), tl.arange(0, N)
    total = tl.zeros((V, N), tl.int32)
    for group in range(GROUPS):
        tile = tl.load(values + (group * V + line[:, None]) * 32 + slot[None, :])
        column = tl.load(columns + group * 32 + slot)
        taken = tl.load(b + column[:, None] * N + n[None, :])
        total = tl.dot(tile, taken, total)
    tl.store(y + line[:, None] * N + n[None, :], total)
