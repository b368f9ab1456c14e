"""A product that unpacks its weights as one writes it first: the control."""

import triton
import triton.language as tl


@triton.jit
def plain_row(
    x: tl.tensor,
    words: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    y: tl.tensor,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Multiplies one row of x with weights of four bits, loaded and converted singly.

    Args:
      x: float32 [GROUPS * GROUP * 8]
      words: uint32 [GROUPS * GROUP, OUTPUTS]
      scale: [GROUPS, OUTPUTS]
      zero: [GROUPS, OUTPUTS]
      y: float32 [OUTPUTS]
      OUTPUTS: columns of the matrix
      GROUPS: groups of inputs
      GROUP: words of a group
      TILE: outputs of a program, which divide OUTPUTS
    """
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for group in range(GROUPS):
        at = group * OUTPUTS + column
        size = tl.load(scale + at).to(tl.float32)
        none = tl.load(zero + at).to(tl.float32)
        for i in range(group * GROUP, group * GROUP + GROUP):
            for place in tl.static_range(8):
                word = tl.load(words + i * OUTPUTS + column)
                value = ((word >> (4 * place)) & 15).to(tl.float32)
                total += (value - none) * size * tl.load(x + i * 8 + place)
    tl.store(y + column, total)
