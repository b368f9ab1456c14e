"""Sizes of the parts into which the kernels divide a product, and their choice."""

import math
from typing import NamedTuple

from hpcjax.kernels._quantized_matmul.packing import RUN


class Tile(NamedTuple):
    """What one program of a kernel computes; sizes are powers of two.

    Attributes:
      rows: rows of x; 1 for the kernel for one row.
      outputs: columns of the matrix.
      runs: runs of 32 inputs of one tensor-core product; any number for one row.
      warps: number of threads / 32.
      stages: stages of Triton's software pipeline of loads.
    """

    rows: int
    outputs: int
    runs: int
    warps: int
    stages: int


class Split(NamedTuple):
    """How inputs are divided among programs, each of which computes a partial sum.

    Attributes:
      chunk: runs with one scale, or of one tensor-core product.
      chunks: number of chunks.
      share: chunks of a program; the last one may have fewer.
      parts: programs of a tile of outputs.
    """

    chunk: int
    chunks: int
    share: int
    parts: int


# Eight outputs per thread, so that a loaded value of x is used eight times.
GEMV = Tile(rows=1, outputs=1024, runs=1, warps=4, stages=1)
# By rows, the tensor cores' shorter side. The longer one is of outputs.
GEMM = {
    rows: Tile(rows=rows, outputs=128, runs=2, warps=4, stages=2)
    for rows in (16, 32, 64)
}
# Programs that fill an H200 (132 multiprocessors) four times over.
PROGRAMS = 528


def choose_tile(rows: int, outputs: int) -> Tile:
    """Returns the tile for a product, no wider than the outputs need.

    Examples:
      >>> choose_tile(1, 100).outputs, choose_tile(20, 4096).rows
      (128, 32)
    """
    if rows == 1:
        tile = GEMV
    else:
        tile = GEMM[min((size for size in GEMM if size >= rows), default=max(GEMM))]
    least = 32 if rows == 1 else 64
    needed = max(least, 1 << (outputs - 1).bit_length())
    return tile._replace(outputs=min(tile.outputs, needed))


def choose_split(
    tile: Tile, rows: int, inputs: int, outputs: int, group_size: int | None
) -> Split:
    """Returns a division of the inputs with which about `PROGRAMS` programs run.

    Args:
      tile: of the kernel.
      rows: of x.
      inputs: of the matrix.
      outputs: of the matrix.
      group_size: a multiple of 32, or None.

    Examples:
      >>> choose_split(GEMV, 1, 12288, 49152, 128)
      Split(chunk=4, chunks=96, share=9, parts=11)
    """
    runs = -(-inputs // RUN)
    if tile.rows == 1:
        whole = group_size // RUN if group_size else 1 << (runs - 1).bit_length()
        # At most 8 runs, so that large groups can be divided, too.
        chunk = math.gcd(whole, 8) if whole > 8 else whole
    else:
        chunk = tile.runs
    chunks = -(-runs // chunk)
    others = -(-outputs // tile.outputs) * -(-rows // tile.rows)
    wanted = min(chunks, max(1, PROGRAMS // others))
    share = -(-chunks // wanted)
    return Split(chunk, chunks, share, -(-chunks // share))
