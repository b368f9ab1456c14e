"""Products of dense matrices at the places of a sparse one by a kernel."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hpcjax.kernels._sr_bcrs.exact import count_exact
from hpcjax.kernels._sr_bcrs.format import SRBCRS
from hpcjax.kernels._triton.launch import Launch, run

# Of K, multiplied at once; and lanes of the tensor cores' shorter side.
BLOCK, LANES = 64, 16


class Sizes(NamedTuple):
    """What a launch depends on.

    Attributes:
      groups: of the pattern.
      depth: K.
      vector: V.
      stride: s.
      bits: of the integers; 0 for floats.
    """

    groups: int
    depth: int
    vector: int
    stride: int
    bits: int


def find_problem(pattern: SRBCRS) -> str | None:
    """Returns why the kernel does not take a pattern; None if it does."""
    if pattern.stride < 16:
        return f"the kernel takes stride=16 or 32: got {pattern.stride}"
    return None


def plan(sizes: Sizes) -> Launch:
    """Returns the launch of a product."""
    limb = min(8, sizes.bits)
    # Two of the four products of limbs of 16 bits have one sum.
    exact = count_exact(limb, limb, unsigned=sizes.bits == 16) if limb else None
    shape = (sizes.groups, sizes.vector, sizes.stride)
    total = jnp.int32 if sizes.bits else jnp.float32
    return Launch(
        kernel="hpcjax.kernels._sddmm.kernel:sddmm",
        grid=(sizes.groups, 1, 1),
        outputs=(jax.ShapeDtypeStruct(shape, total),),
        constants={
            "K": sizes.depth,
            "V": sizes.vector,
            "STRIDE": sizes.stride,
            "BITS": sizes.bits,
            "STEPS": exact // BLOCK // (2 if sizes.bits == 16 else 1)
            if exact
            else 2**20,
            "LANES": LANES,
            "BLOCK": BLOCK,
        },
        stages=3,
    )


def sddmm(
    x: jax.Array, y: jax.Array, pattern: SRBCRS, bits: int, *, interpreted: bool
) -> jax.Array:
    """Returns the tiles of `kernels.sddmm`; `bits` are 0 for floats."""
    if not pattern.groups:
        total = jnp.int32 if bits else jnp.float32
        return jnp.zeros((0, pattern.vector, pattern.stride), total)
    sizes = Sizes(
        groups=pattern.groups,
        depth=x.shape[1] * (2 if bits == 4 else 1),
        vector=pattern.vector,
        stride=pattern.stride,
        bits=bits,
    )
    arrays = (x, y, pattern.columns, pattern.rows)
    (tiles,) = run(plan(sizes), *arrays, interpreted=interpreted)
    return tiles
