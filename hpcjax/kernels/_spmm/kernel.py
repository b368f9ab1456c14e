"""Products of a sparse matrix with a dense one, in Triton."""

import triton
import triton.language as tl

from hpcjax.kernels._sr_bcrs.kernel import (
    high_limb,
    load_integers,
    low_limb,
    widen,
)


@triton.jit
def spmm(
    values: tl.tensor,
    columns: tl.tensor,
    pointers: tl.tensor,
    b: tl.tensor,
    y: tl.tensor,
    N: tl.constexpr,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMBS: tl.constexpr,
    LIMB: tl.constexpr,
    RIGHT: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiplies a row of vectors with a tile of columns of b.

    The transposed product yᵀ = bᵀ aᵀ has the gathered rows of b on the tensor cores'
    longer side. On the shorter one, limbs of V rows each stand beside each other.

    Args:
      values: uint8 [groups, LIMBS, V, STRIDE * LIMB / 8], or floats
      columns: int32 [groups * STRIDE], -1 in padding
      pointers: int32 [2 * rows of vectors]
      b: [K, N]: int8, int16, uint8 [K, N / 2] of nibbles, or floats
      y: int32 or float32 [M, N]
      N: columns of b
      V: rows of a vector
      STRIDE: vectors of a group
      LIMBS: of an integer of a
      LIMB: bits of a limb; 0 for floats
      RIGHT: bits of an integer of b; 0 for floats
      GROUPS: whose float32 sums are exact
      LANES: the power of two from LIMBS * V on, at least 16
      BLOCK: columns of a program
    """
    row = tl.program_id(0)
    first_n = tl.program_id(1) * BLOCK
    slot = tl.arange(0, STRIDE)
    first = tl.load(pointers + 2 * row) // STRIDE
    last = tl.cdiv(tl.load(pointers + 2 * row + 1), STRIDE)
    total = tl.zeros((BLOCK, LANES), y.dtype.element_ty)
    for begin in range(first, last, GROUPS):
        low = tl.zeros((BLOCK, LANES), tl.float32)
        high = tl.zeros((BLOCK, LANES), tl.float32)
        for group in range(begin, tl.minimum(begin + GROUPS, last)):
            tile = _load_tile(values, group, V, STRIDE, LIMBS, LIMB, LANES)
            column = tl.load(columns + group * STRIDE + slot)
            taken = load_integers(b, column, column >= 0, first_n, N, BLOCK, RIGHT)
            taken = tl.trans(taken)
            if RIGHT == 0:
                low = tl.dot(taken, tile, low, input_precision="ieee")
            elif RIGHT == 16:
                low = tl.dot(low_limb(taken), tile, low)
                high = tl.dot(high_limb(taken), tile, high)
            else:
                low = tl.dot(widen(taken), tile, low)
        total += low.to(total.dtype)
        if RIGHT == 16:
            total += high.to(tl.int32) << 8
    if LIMB > 0:
        # All sums are modulo 2^32.
        place = tl.arange(0, LANES) // V
        total *= tl.where(place < LIMBS, 1 << (LIMB * place), 0)[None, :]
    found = tl.sum(tl.reshape(total, (BLOCK, LANES // V, V)), 1)
    n = first_n + tl.arange(0, BLOCK)
    line = row * V + tl.arange(0, V)
    at = line.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(y + at, found, mask=(n < N)[:, None])


@triton.jit
def _load_tile(
    values: tl.tensor,
    group: tl.tensor,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    LIMBS: tl.constexpr,
    LIMB: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:
    """Loads a group's values, [STRIDE, LANES], zero in lanes that are no limb's."""
    lane, slot = tl.arange(0, LANES), tl.arange(0, STRIDE)
    line = (group * LIMBS * V + lane)[None, :] * STRIDE + slot[:, None]
    real = (lane < LIMBS * V)[None, :]
    if LIMB == 0:
        return tl.load(values + line, mask=real, other=0)
    else:
        byte = tl.load(values + line // (8 // LIMB), mask=real, other=0).to(tl.int32)
        if LIMB == 4:
            byte = (byte >> (slot % 2 * 4)[:, None]) & 0xF
        # The last limb alone has a sign.
        signed = byte << (32 - LIMB) >> (32 - LIMB)
        return widen(tl.where((lane // V == LIMBS - 1)[None, :], signed, byte))
