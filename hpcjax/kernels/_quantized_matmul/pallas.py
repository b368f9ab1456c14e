"""Products with quantized matrices as Pallas kernels, compiled by Triton.

A kernel never forms the matrix in memory: it loads words, extracts their integers as
floats (see `windows`) and multiplies. Each program sums over some of the inputs for a
tile of outputs. The partial sums are added in a second pass in a fixed order, without
atomics, so that a product is reproducible bit for bit.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from hpcjax.core.errors import UnsupportedOp
from hpcjax.kernels._quantized_matmul import tiles, windows
from hpcjax.kernels._quantized_matmul.matrix import QuantizedMatrix
from hpcjax.kernels._quantized_matmul.packing import RUN
from hpcjax.kernels._quantized_matmul.tiles import Split, Tile


class _Plan(NamedTuple):
    """Static sizes of a kernel.

    Attributes:
      bits: of a value.
      runs: runs of 32 inputs in the matrix.
      group: consecutive runs with one scale.
      tile: what one program computes.
      split: how the inputs are divided among programs.
    """

    bits: int
    runs: int
    group: int
    tile: Tile
    split: Split


def find_problem(matrix: QuantizedMatrix) -> str | None:
    """Returns why no kernel supports a matrix; None if one does."""
    if matrix.group_size is not None and matrix.group_size % RUN:
        return f"group_size must be a multiple of {RUN}: got {matrix.group_size}"
    return None


def pallas(
    x: jax.Array, matrix: QuantizedMatrix, *, interpret: bool = False
) -> jax.Array:
    """Returns x Ŵ in float32; arguments as `reference`.

    One row of x is multiplied in float32. For several, weights are rounded to the dtype
    of x and multiplied by tensor cores, float32 ones at full precision.

    Raises:
      UnsupportedOp: groups that are not a multiple of 32 inputs.
    """
    problem = find_problem(matrix)
    if problem:
        raise UnsupportedOp(f"quantized_matmul, implementation='pallas': {problem}")
    if matrix.order is not None:
        x = x[..., matrix.order]
    outputs = matrix.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), matrix.inputs)
    if not len(flat):
        return jnp.zeros((*x.shape[:-1], outputs), "float32")
    tile = tiles.choose_tile(len(flat), outputs, matrix.bits)
    split = tiles.choose_split(
        tile, len(flat), matrix.inputs, outputs, matrix.group_size
    )
    runs = matrix.words.shape[0] // matrix.bits
    group = matrix.group_size // RUN if matrix.group_size else runs
    plan = _Plan(matrix.bits, runs, group, tile, split)
    product = _one_row if tile.rows == 1 else _many_rows
    y = product(flat, matrix, plan, interpret)
    return y.reshape(*x.shape[:-1], outputs)


def _one_row(
    x: jax.Array, matrix: QuantizedMatrix, plan: _Plan, interpret: bool
) -> jax.Array:
    bits, runs, _, tile, split = plan
    # The kernel's weights are (q - zero) 2^p (see `windows`). The factors 2^-p go into
    # x, which has one row, instead of into every weight.
    powers = np.exp2(-np.array(windows.places(bits), np.float32))
    filled = jnp.pad(x[0].astype("float32"), (0, runs * RUN - matrix.inputs))
    scaled = (filled.reshape(runs, RUN) * powers).reshape(-1)
    outputs = matrix.shape[-1]
    parts = pl.pallas_call(
        functools.partial(_one_row_kernel, plan=plan),
        grid=(pl.cdiv(outputs, tile.outputs), split.parts),
        out_shape=jax.ShapeDtypeStruct((split.parts, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            num_warps=tile.warps, num_stages=tile.stages
        ),
        interpret=interpret,
        name=f"quantized_gemv_{bits}_bits",
    )(scaled, matrix.words, matrix.scale, matrix.zero, _magic())
    return parts.sum(0, keepdims=True)


def _one_row_kernel(
    x: Any,
    words: Any,
    scale: Any,
    zero: Any,
    magic: Any,
    out: Any,
    *,
    plan: _Plan,
) -> None:
    bits, runs, group, tile, split = plan
    part = pl.program_id(1)
    columns = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)
    mask = columns < out.shape[1]
    load = functools.partial(_load, columns=columns, mask=mask)
    step = math.gcd(tile.runs, split.chunk, runs)

    def some_runs(number: jax.Array, total: jax.Array, first: Any, shift: Any) -> Any:
        run = first + number * step
        loaded = [load(words, run * bits + i) for i in range(step * bits)]
        for i in range(step):
            own = loaded[i * bits : (i + 1) * bits]
            values = windows.scaled_values(own, shift, magic[0], bits)
            for k, value in enumerate(values):
                total += x[(run + i) * RUN + k] * value
        return total

    def chunk(number: jax.Array, total: jax.Array) -> jax.Array:
        first = number * split.chunk
        row = first // group
        shift = windows.offsets(load(zero, row).astype(jnp.float32), bits)
        steps = split.chunk // step
        if runs % split.chunk:
            steps = jnp.minimum(steps, (runs - first) // step)
        body = functools.partial(some_runs, first=first, shift=shift)
        # All runs of a chunk have one scale, which multiplies their sum.
        unscaled = jax.lax.fori_loop(0, steps, body, jnp.zeros_like(total))
        return total + load(scale, row).astype(jnp.float32) * unscaled

    begin = part * split.share
    end = begin + split.share
    if split.chunks % split.share:
        end = jnp.minimum(end, split.chunks)
    nothing = jnp.zeros(tile.outputs, jnp.float32)
    total = jax.lax.fori_loop(begin, end, chunk, nothing)
    plgpu.store(out.at[part, columns], total, mask=mask)


def _many_rows(
    x: jax.Array, matrix: QuantizedMatrix, plan: _Plan, interpret: bool
) -> jax.Array:
    bits, _, _, tile, split = plan
    rows, outputs = pl.cdiv(len(x), tile.rows) * tile.rows, matrix.shape[-1]
    more = split.chunks * split.chunk * RUN - matrix.inputs
    filled = jnp.pad(x, ((0, rows - len(x)), (0, more)))
    # From [rows, runs, 32] to [32, rows, runs]: the kernel extracts value k of 16 runs
    # at a time, so that a tensor-core product contracts runs.
    by_value = filled.reshape(rows, -1, RUN).transpose(2, 0, 1).reshape(RUN * rows, -1)
    parts = pl.pallas_call(
        functools.partial(_rows_kernel, plan=plan),
        grid=(pl.cdiv(outputs, tile.outputs), split.parts, rows // tile.rows),
        out_shape=jax.ShapeDtypeStruct((split.parts, rows, outputs), jnp.float32),
        compiler_params=plgpu.CompilerParams(
            num_warps=tile.warps, num_stages=tile.stages
        ),
        interpret=interpret,
        name=f"quantized_gemm_{bits}_bits",
    )(by_value, matrix.words, matrix.scale, matrix.zero, _magic())
    return parts.sum(0)[: len(x)]


def _rows_kernel(
    x: Any,
    words: Any,
    scale: Any,
    zero: Any,
    magic: Any,
    out: Any,
    *,
    plan: _Plan,
) -> None:
    bits, runs, group, tile, split = plan
    part = pl.program_id(1)
    first_line = pl.program_id(2) * tile.rows
    columns = pl.program_id(0) * tile.outputs + jnp.arange(tile.outputs)
    inside = columns < out.shape[2]

    def chunk(number: jax.Array, total: jax.Array) -> jax.Array:
        run = number * tile.runs + jnp.arange(tile.runs)
        # The padding behind the last run: words load as 0, and x is 0 there.
        mask = (run < runs)[:, None] & inside
        load = functools.partial(_load, columns=columns, mask=mask)
        loaded = [load(words, run * bits + i) for i in range(bits)]
        row = run // group
        shift = windows.offsets(load(zero, row).astype(jnp.float32), bits)
        size = load(scale, row).astype(jnp.float32)
        sizes = {place: size * np.float32(2.0**-place) for place in shift}
        values = windows.scaled_values(loaded, shift, magic[0], bits)
        for k, place in enumerate(windows.places(bits)):
            weights = (values[k] * sizes[place]).astype(x.dtype)
            # x is padded with zeros, so that no load is out of bounds.
            line = k * out.shape[1] + first_line
            own = x[pl.ds(line, tile.rows), pl.ds(number * tile.runs, tile.runs)]
            total += jnp.dot(
                own, weights, precision="highest", preferred_element_type=jnp.float32
            )
        return total

    begin = part * split.share
    end = begin + split.share
    if split.chunks % split.share:
        end = jnp.minimum(end, split.chunks)
    nothing = jnp.zeros((tile.rows, tile.outputs), jnp.float32)
    total = jax.lax.fori_loop(begin, end, chunk, nothing)
    lines = first_line + jnp.arange(tile.rows)
    at = jnp.broadcast_arrays(lines[:, None], columns[None])
    plgpu.store(out.at[part, *at], total, mask=inside[None])


def _load(ref: Any, row: Any, *, columns: jax.Array, mask: jax.Array) -> jax.Array:
    """Loads columns of a row, or `[rows, columns]`; zeros where `mask` is false."""
    at = (row, columns)
    if jnp.ndim(row):
        at = jnp.broadcast_arrays(row[:, None], columns[None])
    return plgpu.load(ref.at[*at], mask=mask, other=0)


def _magic() -> jax.Array:
    # An operand of the kernel, not a constant in it; `windows` says why.
    return jnp.full(1, windows.MAGIC, jnp.uint32)
