"""A kernel for the tests of how kernels run."""

import triton
import triton.language as tl


@triton.jit
def double(x, y, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    own = tl.load(x + place, mask=inside)
    if own.dtype == tl.bfloat16:
        own = own.to(tl.float32)
    tl.store(y + place, (own + own).to(y.dtype.element_ty), mask=inside)
