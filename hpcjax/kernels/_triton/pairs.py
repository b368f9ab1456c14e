"""Arithmetic of two float16 in a word, an instruction that Triton has no name for.

Where a kernel calls a function of this module, the interpreter calls its entry in
`STAND_INS`, which is the same in Triton's own words.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl


@triton.jit
def multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    """Returns a b + c of both halves, each rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [a, b, c],
        dtype=tl.uint32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def low(word: tl.tensor) -> tl.tensor:
    """Returns the low half in float32."""
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high(word: tl.tensor) -> tl.tensor:
    """Returns the high half in float32."""
    return low(word >> 16)


@triton.jit
def join_halves(first: tl.tensor, second: tl.tensor) -> tl.tensor:
    """Rounds two float32 to the halves of a word, the low one first."""
    bits = first.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    above = second.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return bits | (above << 16)


@triton.jit
def _multiply_add(a: tl.tensor, b: tl.tensor, c: tl.tensor) -> tl.tensor:
    # Products of two float16 are exact in float32. Its sum is rounded twice, which
    # differs from one rounding only halfway between two float16.
    return join_halves(low(a) * low(b) + low(c), high(a) * high(b) + high(c))


STAND_INS: Mapping[Any, Any] = {multiply_add.fn: _multiply_add.fn}
