"""Selection above a threshold as a Triton kernel that reads the values once.

Each program selects the entries of one block, writes them to the front of a segment of
its own, and counts them. The entries are then gathered from the segments; they are few
compared with the values, and the unused parts of segments are never read or written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from hpcjax.kernels._top_k.order import magnitudes

# Values of a program.
BLOCK = 2048


def select_above(
    x: Float[Array, " n"],
    threshold: Int[Array, ""],
    capacity: int,
    *,
    block: int = BLOCK,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `kernels.select_above`.

    Args:
      x: as there.
      threshold: as there.
      capacity: as there.
      block: values of a program, a power of two.
      interpret: runs the kernel in Python on any device, slowly.

    Raises:
      ValueError: block is not a power of two.
    """
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two: got block={block}")
    size = len(x)
    blocks = max(1, pl.cdiv(size, block))
    segment = pl.BlockSpec((block,), lambda b: (b,))
    places, values, counts = pl.pallas_call(
        functools.partial(_kernel, size=size),
        grid=(blocks,),
        in_specs=[segment, pl.BlockSpec((1,), lambda _: (0,))],
        out_specs=(segment, segment, pl.BlockSpec((1,), lambda b: (b,))),
        out_shape=(
            jax.ShapeDtypeStruct((blocks * block,), jnp.int32),
            jax.ShapeDtypeStruct((blocks * block,), x.dtype),
            jax.ShapeDtypeStruct((blocks,), jnp.int32),
        ),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="select_above",
    )(x, threshold.reshape(1))
    # Entry e of the result is in the block in whose range of entries it falls.
    ends = jnp.cumsum(counts)
    entry = jnp.arange(capacity, dtype=jnp.int32)
    own = jnp.searchsorted(ends, entry, side="right", method="scan_unrolled")
    own = jnp.minimum(own, blocks - 1)
    place = own * block + entry - (ends - counts)[own]
    real = entry < ends[-1]
    indices = jnp.where(real, places.at[place].get(mode="clip"), size)
    selected = jnp.where(real, values.at[place].get(mode="clip"), 0)
    return indices, selected, ends[-1]


def _kernel(*refs: Any, size: int) -> None:
    x, threshold, places, values, count = refs
    (block,) = x.shape
    place = pl.program_id(0) * block + jnp.arange(block)
    own = triton.load(x.at[:], mask=place < size, other=0)
    order = magnitudes(own)
    chosen = (order >= threshold[0]) & (order > 0)
    ranks = jnp.cumsum(chosen.astype(jnp.int32))
    total = jnp.sum(chosen.astype(jnp.int32))
    # Entries that are not chosen get places behind the others, which the mask keeps
    # from being written. They must be different ones: the interpreter would let two
    # entries with one place overwrite each other, in spite of the mask.
    target = jnp.where(chosen, ranks - 1, total + jnp.arange(block) - ranks)
    triton.store(places.at[target], place, mask=chosen)
    triton.store(values.at[target], own, mask=chosen)
    count[0] = total
