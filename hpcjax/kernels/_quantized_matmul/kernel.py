"""Products with quantized matrices, in Triton.

A kernel never forms the matrix in memory: it loads words and multiplies the values in
them. Each program sums over a part of the inputs for a tile of outputs; the last one
to end adds the parts in their order, so that a product is reproducible bit for bit.
"""

import triton
import triton.language as tl

from hpcjax.kernels._triton import pairs


@triton.jit
def one_row(
    x: tl.tensor,
    sums: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    ended: tl.tensor,
    OUTPUTS: tl.constexpr,
    RUNS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    STARTS: tl.constexpr,
    SHIFTS: tl.constexpr,
    PLACES: tl.constexpr,
    APART: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Multiplies one row of x with a tile of outputs.

    Args:
      x: [RUNS * 16] words of two float16 if HALF, else [RUNS * 32] float32; scaled, in
        the order of `layout.pairs`
      sums: float32 [chunks], of x over a chunk
      words: uint32 [RUNS * BITS, OUTPUTS]
      scale: [groups, OUTPUTS]
      zero: [groups, OUTPUTS]
      y: float32 [OUTPUTS]
      parts: float32 [PARTS, OUTPUTS]
      ended: int32 [tiles], zeros: how many parts of a tile are written
      OUTPUTS: columns of the matrix
      RUNS: runs of 32 inputs
      GROUP: runs with one scale
      CHUNK: runs whose sum is scaled at once, part of a group
      SHARE: chunks of a program
      PARTS: programs of a tile
      TILE: outputs of a program
      BITS: of a value
      STARTS: of the pairs' windows, see `layout.Pair`
      SHIFTS: of the pairs' windows
      PLACES: of the pairs
      APART: see `layout.apart`
      HALF: multiplies and adds the values of a run in float16, else in float32
    """
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    part = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = column < OUTPUTS
    total = tl.zeros((TILE,), tl.float32)
    begin = part * SHARE
    for chunk in range(begin, tl.minimum(begin + SHARE, tl.cdiv(RUNS, CHUNK))):
        products = tl.zeros((TILE,), tl.float32)
        first = chunk * CHUNK
        for run in range(first, tl.minimum(first + CHUNK, RUNS)):
            own = ()
            for i in tl.static_range(BITS):
                row = words + (run * BITS + i) * OUTPUTS
                own = own + (tl.load(row + column, mask=inside, other=0),)
            halves = tl.zeros((TILE,), tl.uint32)
            for i in tl.static_range(16):
                window = _join_window(own, STARTS[i], APART) >> SHIFTS[i]
                value = window & (MASK << PLACES[i])
                place = run * 16 + i
                if HALF:
                    given = tl.load(x + place) + tl.zeros((TILE,), tl.uint32)
                    halves = pairs.multiply_add(value, given, halves)
                else:
                    products += pairs.low(value) * tl.load(x + 2 * place)
                    products += pairs.high(value) * tl.load(x + 2 * place + 1)
            if HALF:
                products += pairs.low(halves) + pairs.high(halves)
        at = first // GROUP * OUTPUTS + column
        products -= tl.load(zero + at, mask=inside).to(tl.float32) * tl.load(
            sums + chunk
        )
        total += tl.load(scale + at, mask=inside).to(tl.float32) * products
    if PARTS == 1:
        tl.store(y + column, total, mask=inside)
    else:
        tl.store(parts + part * OUTPUTS + column, total, mask=inside)
        if _is_last(ended + tl.program_id(0), PARTS):
            added = tl.zeros((TILE,), tl.float32)
            for i in range(PARTS):
                # From where all programs write to; a processor's own cache may be old.
                row = parts + i * OUTPUTS + column
                added += tl.load(row, mask=inside, cache_modifier=".cg")
            tl.store(y + column, added, mask=inside)


@triton.jit
def _is_last(ended: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """Counts this program as ended; returns whether all others have ended before."""
    tl.debug_barrier()  # what all threads have written precedes the count
    return tl.atomic_add(ended, 1, sem="acq_rel") == PARTS - 1


@triton.jit
def _join_window(
    words: tl.tensor, START: tl.constexpr, APART: tl.constexpr
) -> tl.tensor:
    """Returns a word with the window's values at the same places of both halves."""
    if APART == 16:
        return words[START // 32]
    else:
        above = _bits_from(words, START + APART) << 16
        return (_bits_from(words, START) & 0xFFFF) | above


@triton.jit
def _bits_from(words: tl.tensor, START: tl.constexpr) -> tl.tensor:
    """Returns at least 16 bits of a run's stream from a bit on."""
    WORD: tl.constexpr = START // 32
    SHIFT: tl.constexpr = START % 32
    if SHIFT == 0:
        return words[WORD]
    elif SHIFT <= 16:
        return words[WORD] >> SHIFT
    else:
        return (words[WORD] >> SHIFT) | (words[WORD + 1] << (32 - SHIFT))


@triton.jit
def several_rows(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    y: tl.tensor,
    parts: tl.tensor,
    ended: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RUNS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Multiplies a tile of rows of x with a tile of outputs.

    Args:
      x: [ROWS, chunks * CHUNK * 32], zeros behind the inputs
      words: uint32 [RUNS * BITS, OUTPUTS]
      scale: [groups, OUTPUTS]
      zero: [groups, OUTPUTS]
      y: float32 [ROWS, OUTPUTS]
      parts: float32 [PARTS, ROWS, OUTPUTS]
      ended: int32 [tiles of rows, tiles of outputs], zeros
      ROWS: of x, a multiple of TILE_ROWS
      OUTPUTS: columns of the matrix
      RUNS: runs of 32 inputs
      GROUP: runs with one scale
      CHUNK: runs of one tensor-core product
      SHARE: chunks of a program
      PARTS: programs of a tile
      TILE: outputs of a program
      TILE_ROWS: rows of a program
      BITS: of a value
    """
    part = tl.program_id(1)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.program_id(2) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inside = (column < OUTPUTS)[None, :]
    width: tl.constexpr = tl.cdiv(RUNS, CHUNK) * CHUNK * 32
    # The tile is computed with outputs first: the tensor cores' longer side.
    total = tl.zeros((TILE, TILE_ROWS), tl.float32)
    begin = part * SHARE
    for chunk in range(begin, tl.minimum(begin + SHARE, tl.cdiv(RUNS, CHUNK))):
        run = chunk * CHUNK + tl.arange(0, CHUNK)
        integers = _unpack(words, run, column, inside, OUTPUTS, RUNS, BITS)
        at = (run // GROUP)[:, None] * OUTPUTS + column[None, :]
        real = (run < RUNS)[:, None] & inside
        size = tl.load(scale + at, mask=real, other=0).to(tl.float32)
        zeros = tl.load(zero + at, mask=real, other=0).to(tl.float32)
        # 2^23 + q without a conversion; the difference is exact.
        number = (integers | 0x4B000000).to(tl.float32, bitcast=True)
        weights = (number - (zeros + 8388608.0)[:, None, :]) * size[:, None, :]
        weights = tl.reshape(weights, (CHUNK * 32, TILE)).to(x.dtype.element_ty)
        place = chunk * CHUNK * 32 + tl.arange(0, CHUNK * 32)
        own = tl.load(x + row[None, :] * width + place[:, None])
        total = tl.dot(tl.trans(weights), own, total, input_precision="ieee")
    to = row[None, :] * OUTPUTS + column[:, None]
    seen = (column < OUTPUTS)[:, None]
    if PARTS == 1:
        tl.store(y + to, total, mask=seen)
    else:
        tl.store(parts + part * ROWS * OUTPUTS + to, total, mask=seen)
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if _is_last(ended + tile, PARTS):
            added = tl.zeros((TILE, TILE_ROWS), tl.float32)
            for i in range(PARTS):
                own = parts + i * ROWS * OUTPUTS + to
                added += tl.load(own, mask=seen, cache_modifier=".cg")
            tl.store(y + to, added, mask=seen)


@triton.jit
def _unpack(
    words: tl.tensor,
    run: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    OUTPUTS: tl.constexpr,
    RUNS: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Returns the integers of runs, uint32 [runs, 32, outputs]."""
    if BITS == 3:
        # Two of the 32 values lie in two words.
        bit = tl.arange(0, 32) * BITS
        shift = (bit % 32).to(tl.uint32)[None, :, None]
        line = ((run * BITS)[:, None] + (bit // 32)[None, :])[:, :, None]
        real = (run < RUNS)[:, None, None] & inside[None, :, :]
        at = words + line * OUTPUTS + column[None, None, :]
        integers = tl.load(at, mask=real, other=0) >> shift
        split = shift > 32 - BITS
        more = tl.load(at + OUTPUTS, mask=real & split, other=0)
        return (integers | (more << (32 - shift))) & 7
    else:
        HELD: tl.constexpr = 32 // BITS
        CHUNK: tl.constexpr = run.shape[0]
        line = run[:, None] * BITS + tl.arange(0, BITS)[None, :]
        at = words + line[:, :, None] * OUTPUTS + column[None, None, :]
        real = (run < RUNS)[:, None, None] & inside[None, :, :]
        word = tl.load(at, mask=real, other=0)[:, :, None, :]
        shift = (tl.arange(0, HELD) * BITS).to(tl.uint32)[None, None, :, None]
        integers = (word >> shift) & ((1 << BITS) - 1)
        return tl.reshape(integers, (CHUNK, 32, column.shape[0]))
