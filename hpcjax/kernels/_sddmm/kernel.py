"""Products of dense matrices at the places of a sparse one, in Triton."""

import triton
import triton.language as tl

from hpcjax.kernels._sr_bcrs.kernel import (
    high_limb,
    load_integers,
    low_limb,
    widen,
)


@triton.jit
def sddmm(
    x: tl.tensor,
    y: tl.tensor,
    columns: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    K: tl.constexpr,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BITS: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes a group of vectors of x yᵀ.

    Args:
      x: [M, K]: int8, int16, uint8 [M, K / 2] of nibbles, or floats
      y: [N, K], likewise
      columns: int32 [groups * STRIDE], -1 in padding
      rows: int32 [groups], the row of vectors of each
      out: int32 or float32 [groups, V, STRIDE]
      K: columns of x and y
      V: rows of a vector
      STRIDE: vectors of a group
      BITS: of an integer; 0 for floats
      STEPS: blocks of K whose float32 sums are exact
      LANES: the tensor cores' shorter side, of which V are rows
      BLOCK: of K that are multiplied at once
    """
    group = tl.program_id(0)
    slot, lane = tl.arange(0, STRIDE), tl.arange(0, LANES)
    column = tl.load(columns + group * STRIDE + slot)
    line = tl.load(rows + group) * V + lane
    total = tl.zeros((STRIDE, LANES), out.dtype.element_ty)
    for begin in range(0, K, STEPS * BLOCK):
        low = tl.zeros((STRIDE, LANES), tl.float32)
        mixed = tl.zeros((STRIDE, LANES), tl.float32)
        high = tl.zeros((STRIDE, LANES), tl.float32)
        for k in range(begin, tl.minimum(begin + STEPS * BLOCK, K), BLOCK):
            own = tl.trans(load_integers(x, line, lane < V, k, K, BLOCK, BITS))
            other = load_integers(y, column, column >= 0, k, K, BLOCK, BITS)
            if BITS == 0:
                low = tl.dot(other, own, low, input_precision="ieee")
            elif BITS == 16:
                low = tl.dot(low_limb(other), low_limb(own), low)
                mixed = tl.dot(low_limb(other), high_limb(own), mixed)
                mixed = tl.dot(high_limb(other), low_limb(own), mixed)
                high = tl.dot(high_limb(other), high_limb(own), high)
            else:
                low = tl.dot(widen(other), widen(own), low)
        total += low.to(total.dtype)
        if BITS == 16:
            # All sums are modulo 2^32.
            total += (mixed.to(tl.int32) << 8) + (high.to(tl.int32) << 16)
    at = (group * V + lane)[None, :] * STRIDE + slot[:, None]
    tl.store(out + at, total, mask=(lane < V)[None, :])
