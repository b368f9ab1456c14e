"""Selection above a threshold by a kernel that reads the values once.

Each program selects the entries of one block, writes them to the front of a segment of
its own, and counts them. The entries are then gathered from the segments; they are few
compared with the values, and the unused parts of segments are never read or written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.kernels._triton.launch import Launch, run

# Values of a program, a power of two.
BLOCK = 2048


def plan(size: int, dtype: Any) -> Launch:
    """Returns the launch for so many values of a dtype."""
    blocks = max(1, -(-size // BLOCK))
    segments = (blocks * BLOCK,)
    return Launch(
        kernel="hpcjax.kernels._top_k.kernel:select_above",
        grid=(blocks, 1, 1),
        outputs=(
            jax.ShapeDtypeStruct(segments, jnp.int32),
            jax.ShapeDtypeStruct(segments, dtype),
            jax.ShapeDtypeStruct((blocks,), jnp.int32),
        ),
        constants={"SIZE": size, "BLOCK": BLOCK},
        warps=8,
    )


def select_above(
    x: Float[Array, " n"],
    threshold: Int[Array, ""],
    capacity: int,
    *,
    interpreted: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `kernels.select_above`; `interpreted` as for `_triton.launch.run`."""
    size = len(x)
    launch = plan(size, x.dtype)
    places, values, counts = run(
        launch, x, threshold.reshape(1), interpreted=interpreted
    )
    # Entry e of the result is in the block in whose range of entries it falls.
    ends = jnp.cumsum(counts)
    entry = jnp.arange(capacity, dtype=jnp.int32)
    own = jnp.searchsorted(ends, entry, side="right", method="scan_unrolled")
    own = jnp.minimum(own, len(counts) - 1)
    place = own * BLOCK + entry - (ends - counts)[own]
    real = entry < ends[-1]
    indices = jnp.where(real, places.at[place].get(mode="clip"), size)
    selected = jnp.where(real, values.at[place].get(mode="clip"), 0)
    return indices, selected, ends[-1]
