"""How the work of a product is cut up: data, and pure functions that choose from it."""

import math
from typing import NamedTuple

from hpcjax.kernels._quantized_matmul.packing import RUN

# Rows from which unpacking the whole matrix once is cheaper than once a tile of rows.
MANY_ROWS = 256


class Tile(NamedTuple):
    """What one program of a kernel works on; block sizes are powers of two.

    Attributes:
      rows: of x; 1 means the kernel for one row.
      outputs: columns.
      runs: runs of 32 inputs whose words are loaded together.
      warps: threads / 32.
    """

    rows: int
    outputs: int
    runs: int
    warps: int


class Split(NamedTuple):
    """How inputs are shared out over programs, each of which makes a partial sum.

    Attributes:
      chunk: runs that have one scale, or that one tensor-core product takes.
      chunks: how many there are.
      share: chunks of a program; the last may have fewer.
      parts: programs for a tile of outputs.
    """

    chunk: int
    chunks: int
    share: int
    parts: int


# By bits: eight outputs a thread, so that a load of x serves eight of them.
GEMV = {
    2: Tile(rows=1, outputs=1024, runs=2, warps=4),
    3: Tile(rows=1, outputs=1024, runs=1, warps=4),
    4: Tile(rows=1, outputs=1024, runs=1, warps=4),
    8: Tile(rows=1, outputs=1024, runs=1, warps=4),
}
# By rows: 16 is the least that tensor cores take; 16 runs make their inner axis.
GEMM = {
    16: Tile(rows=16, outputs=64, runs=16, warps=4),
    32: Tile(rows=32, outputs=64, runs=16, warps=4),
    64: Tile(rows=64, outputs=64, runs=16, warps=4),
}
# Programs that fill an H200 (132 multiprocessors) four times over.
PROGRAMS = 528


def choose_tile(rows: int, outputs: int, bits: int) -> Tile:
    """Returns the tile for a product, no wider than the outputs need.

    Examples:
      >>> choose_tile(1, 100, 4).outputs, choose_tile(20, 4096, 4).rows
      (128, 32)
    """
    if rows == 1:
        tile = GEMV[bits]
    else:
        tile = GEMM[min((size for size in GEMM if size >= rows), default=max(GEMM))]
    least = 32 if rows == 1 else 16
    needed = max(least, 1 << (outputs - 1).bit_length())
    return tile._replace(outputs=min(tile.outputs, needed))


def choose_split(
    tile: Tile, rows: int, inputs: int, outputs: int, group_size: int | None
) -> Split:
    """Returns how the inputs are shared out, so that about `PROGRAMS` programs run.

    Args:
      tile: of the kernel.
      rows: of x.
      inputs: of the matrix.
      outputs: of the matrix.
      group_size: a multiple of 32, or None.

    Examples:
      >>> choose_split(GEMV[4], 1, 12288, 49152, 128)
      Split(chunk=4, chunks=96, share=9, parts=11)
    """
    runs = -(-inputs // RUN)
    if tile.rows == 1:
        whole = group_size // RUN if group_size else 1 << (runs - 1).bit_length()
        # At most 8 runs, so that large groups can be shared out too.
        chunk = math.gcd(whole, 8) if whole > 8 else whole
    else:
        chunk = tile.runs
    chunks = -(-runs // chunk)
    others = -(-outputs // tile.outputs) * -(-rows // tile.rows)
    wanted = min(chunks, max(1, PROGRAMS // others))
    share = -(-chunks // wanted)
    return Split(chunk, chunks, share, -(-chunks // share))
