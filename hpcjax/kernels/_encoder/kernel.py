"""Fused operations of an encoder layer, in Triton: each array is read once.

A row is what an operation reduces, `WIDTH` elements that are `STEP` apart in memory.
Rows are numbered in the canonical order of the axes, of which those before the last are
[outer, MIDDLE, INNER], and lie `TO_OUTER`, `TO_MIDDLE` and `TO_INNER` apart. `seeds`
has one seed for every `PER_SEED` rows. `LIMIT` is rate · 2³²; 0 drops nothing. A mask
is drawn, `STORED` ones are written by the forward kernel and read by the backward one.
"""

import triton
import triton.language as tl


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """See `dropout._mix`; plain factors would widen the word to 64 bits."""
    x = (x ^ (x >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _keep(
    seeds: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    WIDTH: tl.constexpr,
    PER_SEED: tl.constexpr,
    LIMIT: tl.constexpr,
) -> tl.tensor:
    """Draws the mask of a part of a row, see `dropout.keep_mask`."""
    seed = _mix(tl.load(seeds + row // PER_SEED))
    # Indices wrap as the definition's do.
    index = ((row % PER_SEED) * WIDTH + column).to(tl.uint32)
    hashed = _mix(_mix(index * tl.full((), 0x9E3779B9, tl.uint32)) + seed)
    return hashed >= tl.full((), LIMIT, tl.uint32)


@triton.jit
def _place(
    row: tl.tensor,
    column: tl.tensor,
    MIDDLE: tl.constexpr,
    INNER: tl.constexpr,
    TO_OUTER: tl.constexpr,
    TO_MIDDLE: tl.constexpr,
    TO_INNER: tl.constexpr,
    STEP: tl.constexpr,
) -> tl.tensor:
    """Returns where a row's elements are; arrays may have more than 2³¹ of them."""
    # Interpreted, the row of a loop is a plain number.
    wide = tl.full((), 0, tl.int64) + row
    outer = wide // (MIDDLE * INNER)
    middle, inner = wide // INNER % MIDDLE, wide % INNER
    return outer * TO_OUTER + middle * TO_MIDDLE + inner * TO_INNER + column * STEP


@triton.jit
def _drop(x: tl.tensor, kept: tl.tensor, KEEP: tl.constexpr) -> tl.tensor:
    return tl.where(kept, x / KEEP, 0.0)


@triton.jit
def softmax(
    scores: tl.tensor,
    seeds: tl.tensor,
    y: tl.tensor,
    weights: tl.tensor,
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
    SCALE: tl.constexpr,
) -> None:
    """SM of one row; without dropout `weights`, which y is then, are not written."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = _place(row, column, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP)
    own = tl.load(scores + place, mask=inside, other=float("-inf")).to(tl.float32)
    own = own * SCALE
    largest = tl.max(own, 0)
    # Where every score is -inf no weight is given.
    shifted = tl.exp(own - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(shifted, 0)
    given = shifted / tl.where(total == 0.0, 1.0, total)
    if LIMIT:
        tl.store(weights + place, given.to(y.dtype.element_ty), mask=inside)
        kept = _keep(seeds, row, column, WIDTH, PER_SEED, LIMIT)
        if STORED:
            tl.store(mask + place, kept.to(tl.uint8), mask=inside)
        given = _drop(given, kept, KEEP)
    tl.store(y + place, given.to(y.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward(
    grad: tl.tensor,
    weights: tl.tensor,
    mask: tl.tensor,
    seeds: tl.tensor,
    d_scores: tl.tensor,
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
    SCALE: tl.constexpr,
) -> None:
    """BS of one row."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = _place(row, column, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP)
    own = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    if LIMIT:
        if STORED:
            kept = tl.load(mask + place, mask=inside, other=0) != 0
        else:
            kept = _keep(seeds, row, column, WIDTH, PER_SEED, LIMIT)
        own = _drop(own, kept, KEEP)
    wide = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    total = SCALE * wide * (own - tl.sum(wide * own, 0))
    tl.store(d_scores + place, total.to(d_scores.dtype.element_ty), mask=inside)


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
    """BDRLN of one row; both passes of its variance are over registers."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = _place(row, column, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP)
    total = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if LIMIT:
        kept = _keep(seeds, row, column, WIDTH, PER_SEED, LIMIT)
        if STORED:
            tl.store(mask + place, kept.to(tl.uint8), mask=inside)
        total = _drop(total, kept, KEEP)
    total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, total - tl.sum(total, 0) / WIDTH, 0.0)
    over = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + EPS)
    own = centred * over
    tl.store(inverse + row, over)
    tl.store(normed + place, own.to(normed.dtype.element_ty), mask=inside)
    own = own * tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    own = own + tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, own.to(y.dtype.element_ty), mask=inside)


@triton.jit
def residual_norm_backward(
    grad: tl.tensor,
    normed: tl.tensor,
    inverse: tl.tensor,
    scale: tl.tensor,
    mask: tl.tensor,
    seeds: tl.tensor,
    d_residual: tl.tensor,
    d_x: tl.tensor,
    d_scale: tl.tensor,
    d_shift: tl.tensor,
    d_bias: tl.tensor,
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
    TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """BSB, BLNRD and the bias of `ROWS` of `TOTAL` rows; writes its sums of columns."""
    part, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    by_scale = tl.zeros((BLOCK,), tl.float32)
    by_shift = tl.zeros((BLOCK,), tl.float32)
    by_bias = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(part * ROWS, tl.minimum(part * ROWS + ROWS, TOTAL)):
        place = _place(row, column, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(normed + place, mask=inside, other=0.0).to(tl.float32)
        by_scale += g * wide
        by_shift += g
        own = g * factor
        along = tl.sum(own * wide, 0) / WIDTH
        own = (own - tl.sum(own, 0) / WIDTH - wide * along) * tl.load(inverse + row)
        to = d_x.dtype.element_ty
        tl.store(d_residual + place, own.to(to), mask=inside)
        if LIMIT:
            if STORED:
                kept = tl.load(mask + place, mask=inside, other=0) != 0
            else:
                kept = _keep(seeds, row, column, WIDTH, PER_SEED, LIMIT)
            own = _drop(own, kept, KEEP)
        by_bias += own
        tl.store(d_x + place, own.to(to), mask=inside)
    end = part * WIDTH + column
    tl.store(d_scale + end, by_scale, mask=inside)
    tl.store(d_shift + end, by_shift, mask=inside)
    tl.store(d_bias + end, by_bias, mask=inside)


@triton.jit
def _activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "gelu_erf":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 is a logistic function of 2 u.
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-2.0 * u))
    return y


@triton.jit
def _slope(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    if ACTIVATION == "relu":
        y = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu_erf":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * density
    else:
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        share = 1.0 / (1.0 + tl.exp(-2.0 * u))
        rise = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        y = share + x * share * (1.0 - share) * rise
    return y


@triton.jit
def activation(
    x: tl.tensor,
    bias: tl.tensor,
    seeds: tl.tensor,
    y: tl.tensor,
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
    ACTIVATION: tl.constexpr,
) -> None:
    """BAD of one row."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = _place(row, column, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP)
    own = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    own += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    own = _activate(own, ACTIVATION)
    if LIMIT:
        kept = _keep(seeds, row, column, WIDTH, PER_SEED, LIMIT)
        if STORED:
            tl.store(mask + place, kept.to(tl.uint8), mask=inside)
        own = _drop(own, kept, KEEP)
    tl.store(y + place, own.to(y.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward(
    grad: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    mask: tl.tensor,
    seeds: tl.tensor,
    d_x: tl.tensor,
    d_bias: tl.tensor,
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
    ACTIVATION: tl.constexpr,
    TOTAL: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """BDRLB of `ROWS` of `TOTAL` rows; writes its sums of columns."""
    part, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < WIDTH
    added = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(part * ROWS, tl.minimum(part * ROWS + ROWS, TOTAL)):
        place = _place(row, column, MIDDLE, INNER, TO_OUTER, TO_MIDDLE, TO_INNER, STEP)
        own = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if LIMIT:
            if STORED:
                kept = tl.load(mask + place, mask=inside, other=0) != 0
            else:
                kept = _keep(seeds, row, column, WIDTH, PER_SEED, LIMIT)
            own = _drop(own, kept, KEEP)
        before = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + added
        own = own * _slope(before, ACTIVATION)
        total += own
        tl.store(d_x + place, own.to(d_x.dtype.element_ty), mask=inside)
    tl.store(d_bias + part * WIDTH + column, total, mask=inside)
