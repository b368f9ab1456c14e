"""How the kernels of an encoder layer are launched, from shapes and orders of axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.kernels._encoder.dropout import limit_of
from hpcjax.kernels._triton.launch import Launch

# The widest row, which a program holds in registers.
WIDEST = 8192
# Rows of a program that adds columns, and the most such programs, whose sums are read
# again by what adds them.
ROWS, PROGRAMS = 32, 1024
_DTYPES = ("float32", "bfloat16", "float16")


def find_problem(x: Any, order: Sequence[int] | None) -> str | None:
    """Returns why the kernels do not take such an array; None if they do."""
    width = x.shape[order.index(x.ndim - 1) if order else -1]
    if width > WIDEST:
        return f"the kernel takes rows of at most {WIDEST}: got {width}"
    if x.dtype.name not in _DTYPES:
        return f"the kernel takes {', '.join(_DTYPES)}: got {x.dtype}"
    if order is not None and x.ndim > 4:
        return f"the kernel takes an order of at most 4 axes: got {x.ndim}"
    return None if x.size else f"the kernel takes no empty array: got {x.shape}"


def lay_out(shape: Sequence[int], order: Sequence[int] | None) -> dict[str, int]:
    """Returns the constants by which a kernel finds rows, see `kernel`.

    Args:
      shape: of the array in memory.
      order: of its axes there, by their canonical numbers; None for the canonical one.
    """
    if order is None:
        sizes = [shape[0] if len(shape) > 1 else 1, math.prod(shape[1:-1]), 1]
        width = shape[-1]
        steps = [sizes[1] * width, width, 0, 1]
    else:
        step = {axis: math.prod(shape[at + 1 :]) for at, axis in enumerate(order)}
        size = dict(zip(order, shape, strict=True))
        outer, last = range(len(shape) - 1), len(shape) - 1
        sizes = [*(size[axis] for axis in outer), 1, 1, 1][:3]
        steps = [*(step[axis] for axis in outer), 0, 0, 0][:3]
        width, steps = size[last], [*steps, step[last]]
    names = ("TO_OUTER", "TO_MIDDLE", "TO_INNER", "STEP")
    return {
        "WIDTH": width,
        "BLOCK": 1 << (width - 1).bit_length(),
        "MIDDLE": sizes[1],
        "INNER": sizes[2],
        **dict(zip(names, steps, strict=True)),
    }


def plan(
    kernel: str,
    like: Any,
    order: Sequence[int] | None,
    *,
    seeds: int = 1,
    rate: float = 0.0,
    stored: bool = False,
    **constants: Any,
) -> Launch:
    """Returns the launch of a kernel for arrays of one shape and dtype.

    Args:
      kernel: its name in `kernel`.
      like: shape and dtype of the arrays.
      order: see `lay_out`.
      seeds: how many there are, 1 or one for each element of the first axis.
      rate: of dropout.
      stored: whether masks are stored.
      **constants: the kernel's own.
    """
    layout = lay_out(like.shape, order)
    rows, width = like.size // layout["WIDTH"], layout["WIDTH"]
    programs, grid = 1, rows
    if kernel.endswith("_backward") and kernel != "softmax_backward":
        each = max(ROWS, -(-rows // PROGRAMS))
        programs = grid = -(-rows // each)
        constants |= {"TOTAL": rows, "ROWS": each}
    dropped = rate > 0
    none = jax.ShapeDtypeStruct((1,), like.dtype)
    whole = jax.ShapeDtypeStruct(like.shape, like.dtype)
    mask = jax.ShapeDtypeStruct(like.shape if dropped and stored else (1,), jnp.uint8)
    sums = jax.ShapeDtypeStruct((programs, width), jnp.float32)
    outputs = {
        "softmax": (whole, whole if dropped else none, mask),
        "softmax_backward": (whole,),
        "residual_norm": (
            whole,
            whole,
            jax.ShapeDtypeStruct((rows,), jnp.float32),
            mask,
        ),
        "residual_norm_backward": (whole, whole, sums, sums, sums),
        "activation": (whole, mask),
        "activation_backward": (whole, sums),
    }
    return Launch(
        kernel=f"hpcjax.kernels._encoder.kernel:{kernel}",
        grid=(grid, 1, 1),
        outputs=outputs[kernel],
        constants={
            **layout,
            "PER_SEED": rows // seeds,
            "LIMIT": limit_of(rate) if dropped else 0,
            "KEEP": 1 - rate,
            "STORED": stored and dropped,
            **constants,
        },
        # A thread holds at most 16 elements of a row of 32-bit words.
        warps=min(16, max(1, layout["BLOCK"] // 256)),
    )
