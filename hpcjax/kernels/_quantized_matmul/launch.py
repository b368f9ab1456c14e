"""Products with quantized matrices by kernels: their plans, and what x is for them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.kernels._quantized_matmul import layout, tiles
from hpcjax.kernels._quantized_matmul.matrix import QuantizedMatrix
from hpcjax.kernels._quantized_matmul.packing import RUN
from hpcjax.kernels._triton.launch import Launch, run

_KERNELS = "hpcjax.kernels._quantized_matmul.kernel"


class Sizes(NamedTuple):
    """What a launch depends on.

    Attributes:
      rows: of x.
      inputs: of the matrix.
      outputs: of the matrix.
      bits: of a value.
      group_size: inputs of a group, None for a single group.
      dtype: of x.
    """

    rows: int
    inputs: int
    outputs: int
    bits: int
    group_size: int | None
    dtype: Any

    @property
    def runs(self) -> int:
        """Runs of 32 inputs in the matrix."""
        return -(-self.inputs // RUN)


def find_problem(matrix: QuantizedMatrix) -> str | None:
    """Returns why no kernel supports a matrix; None if one does."""
    if matrix.group_size is not None and matrix.group_size % RUN:
        return f"group_size must be a multiple of {RUN}: got {matrix.group_size}"
    return None


def product(
    x: jax.Array, matrix: QuantizedMatrix, *, interpreted: bool = False
) -> jax.Array:
    """Returns x Ŵ in float32; arguments as `reference`.

    One row of x of less than float32 is multiplied in float16, and sums of 32 products
    are added in float32. For several rows, weights are rounded to the dtype of x and
    multiplied by tensor cores.
    """
    if matrix.order is not None:
        x = x[..., matrix.order]
    outputs = matrix.shape[-1]
    flat = x.reshape(math.prod(x.shape[:-1]), matrix.inputs)
    if not len(flat):
        return jnp.zeros((*x.shape[:-1], outputs), "float32")

    @jax.custom_batching.custom_vmap
    def multiply(flat: jax.Array, matrix: QuantizedMatrix) -> jax.Array:
        return _multiply(flat, matrix, interpreted)

    @multiply.def_vmap
    def batch(size: int, batched: Any, flat: jax.Array, matrix: QuantizedMatrix) -> Any:
        if any(jax.tree.leaves(batched[1])):
            whole = jax.tree.map(
                lambda one, is_batched: (
                    one if is_batched else jnp.broadcast_to(one, (size, *one.shape))
                ),
                (flat, matrix),
                (batched[0], batched[1]),
            )
            return jax.lax.map(lambda given: multiply(*given), whole), True
        # One matrix for all: their rows are rows of one product.
        y = multiply(flat.reshape(-1, flat.shape[-1]), matrix)
        return y.reshape(size, -1, outputs), True

    return multiply(flat, matrix).reshape(*x.shape[:-1], outputs)


def _multiply(x: jax.Array, matrix: QuantizedMatrix, interpreted: bool) -> jax.Array:
    sizes = Sizes(
        rows=len(x),
        inputs=matrix.inputs,
        outputs=matrix.shape[-1],
        bits=matrix.bits,
        group_size=matrix.group_size,
        dtype=x.dtype,
    )
    arrays = (matrix.words, matrix.scale, matrix.zero)
    launch = plan(sizes)
    if sizes.rows > 1:
        y, *_ = run(launch, _fill_up(x, launch), *arrays, interpreted=interpreted)
        return y[: len(x)]
    scaled, sums, exponent = _arrange(x[0], matrix.bits, launch.constants)
    y, *_ = run(launch, scaled, sums, *arrays, interpreted=interpreted)
    return jnp.ldexp(y, exponent)[None]


def plan(sizes: Sizes) -> Launch:
    """Returns the launch of a product."""
    tile = tiles.choose_tile(sizes.rows, sizes.outputs)
    split = tiles.choose_split(
        tile, sizes.rows, sizes.inputs, sizes.outputs, sizes.group_size
    )
    rows = -(-sizes.rows // tile.rows)
    grid = (-(-sizes.outputs // tile.outputs), split.parts, rows)
    shape = (sizes.outputs,) if tile.rows == 1 else (rows * tile.rows, sizes.outputs)
    parts = (split.parts, *shape) if split.parts > 1 else (1,)
    constants = {
        "OUTPUTS": sizes.outputs,
        "RUNS": sizes.runs,
        "GROUP": sizes.group_size // RUN if sizes.group_size else sizes.runs,
        "CHUNK": split.chunk,
        "SHARE": split.share,
        "PARTS": split.parts,
        "TILE": tile.outputs,
        "BITS": sizes.bits,
    }
    if tile.rows == 1:
        found = layout.pairs(sizes.bits)
        constants |= {
            "STARTS": tuple(pair.start for pair in found),
            "SHIFTS": tuple(pair.shift for pair in found),
            "PLACES": tuple(pair.place for pair in found),
            "APART": layout.apart(sizes.bits),
            "HALF": jnp.dtype(sizes.dtype) != "float32",
        }
    else:
        constants |= {"ROWS": rows * tile.rows, "TILE_ROWS": tile.rows}
    return Launch(
        kernel=f"{_KERNELS}:{'one_row' if tile.rows == 1 else 'several_rows'}",
        grid=grid,
        outputs=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((rows * grid[0],), jnp.int32),
        ),
        constants=constants,
        zeroed=(2,),
        warps=tile.warps,
        stages=tile.stages,
    )


def _arrange(x: jax.Array, bits: int, constants: Any) -> tuple[jax.Array, ...]:
    """Returns x as the kernel reads it, its sums over chunks, and y's exponent.

    A value q at place p is the float16 q 2^(p − 24) (see `layout`). So x is scaled to
    numbers of up to 2^15, of which the products with q are far from both ends of
    float16, and by 2^−p; y is to be multiplied by 2^exponent.
    """
    runs, chunk = constants["RUNS"], constants["CHUNK"]
    wide = x.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(wide)))
    scaled = jnp.ldexp(wide, 15 - exponent)
    whole = -(-runs // chunk) * chunk * RUN
    filled = jnp.pad(scaled, (0, whole - len(x)))
    sums = jnp.sum(filled.reshape(-1, chunk * RUN), axis=1) * 2.0**layout.UNIT
    found = layout.pairs(bits)
    order = np.array([(pair.first, pair.second) for pair in found])
    places = np.exp2([-np.float32(pair.place) for pair in found])[:, None]
    arranged = filled[: runs * RUN].reshape(runs, RUN)[:, order] * places
    if constants["HALF"]:
        arranged = jax.lax.bitcast_convert_type(arranged.astype("float16"), jnp.uint32)
    return arranged.reshape(-1), sums, exponent - 15 - layout.UNIT


def _fill_up(x: jax.Array, launch: Launch) -> jax.Array:
    """Fills x up to whole tiles of rows and chunks of inputs, with zeros."""
    constants = launch.constants
    chunks = -(-constants["RUNS"] // constants["CHUNK"])
    rows, width = constants["ROWS"], chunks * constants["CHUNK"] * RUN
    return jnp.pad(x, ((0, rows - len(x)), (0, width - x.shape[1])))
