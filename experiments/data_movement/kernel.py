"""A norm that reads its input twice, in Triton: a negative control."""

import triton
import triton.language as tl

from hpcjax.kernels._encoder import kernel


@triton.jit
def residual_norm(
    x: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    scale: tl.tensor,
    shift: tl.tensor,
    seeds: tl.tensor,
    y: tl.tensor,
    normed: tl.tensor,
    inverse: tl.tensor,
    mask: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
    TO_OUTER: tl.constexpr,
    TO_MIDDLE: tl.constexpr,
    TO_INNER: tl.constexpr,
    STEP: tl.constexpr,
    PER_SEED: tl.constexpr,
    LIMIT: tl.constexpr,
    KEEP: tl.constexpr,
    STORED: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """Reads a row of x, whose mean is not used, and calls `kernel.residual_norm`."""
    column = tl.arange(0, BLOCK)
    place = tl.program_id(0) * WIDTH + column
    mean = tl.sum(tl.load(x + place, mask=column < WIDTH, other=0.0), 0) / WIDTH
    tl.store(inverse + tl.program_id(0), mean)
    kernel.residual_norm(
        *(x, bias, residual, scale, shift, seeds, y, normed, inverse, mask),
        *(WIDTH, BLOCK, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP),
        *(PER_SEED, LIMIT, KEEP, STORED, EPS),
    )
