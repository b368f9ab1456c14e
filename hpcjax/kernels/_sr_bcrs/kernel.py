"""What kernels of sparse products share, in Triton: small integers as bfloat16.

Every product is one of bfloat16, which holds limbs of 8 bits exactly, with or without a
sign; float32 sums of them are exact up to 2^24, before which they are added up in
int32. Tensor cores transpose operands of 16 bits themselves, but not bytes.
"""

import triton
import triton.language as tl


@triton.jit
def load_integers(
    start: tl.tensor,
    lines: tl.tensor,
    real: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Loads a part of some lines of a matrix of integers, or of floats.

    Args:
      start: of the matrix, [..., WIDTH], or of bytes of two nibbles [..., WIDTH / 2]
      lines: [n], numbers of lines
      real: [n], whether the line is read; else it is zero
      first: of the entries of a line, even
      WIDTH: entries of a line
      SIZE: entries that are read
      BITS: of an integer; 0 for floats
    """
    if BITS == 4:
        place = first // 2 + tl.arange(0, SIZE // 2)
        inside = real[:, None] & (place < WIDTH // 2)[None, :]
        at = lines.to(tl.int64)[:, None] * (WIDTH // 2) + place[None, :]
        both = tl.load(start + at, mask=inside, other=0).to(tl.int32)
        # The sign is the bit of 8: two's complement in 32 bits.
        return tl.interleave(both << 28 >> 28, both << 24 >> 28)
    else:
        place = first + tl.arange(0, SIZE)
        inside = real[:, None] & (place < WIDTH)[None, :]
        at = lines.to(tl.int64)[:, None] * WIDTH + place[None, :]
        return tl.load(start + at, mask=inside, other=0)


@triton.jit
def widen(integers: tl.tensor) -> tl.tensor:
    """Returns integers of up to 8 bits and a sign as bfloat16, exactly."""
    return integers.to(tl.float32).to(tl.bfloat16)


@triton.jit
def low_limb(integers: tl.tensor) -> tl.tensor:
    """Returns the low byte of integers of 16 bits, without a sign."""
    return widen(integers.to(tl.int32) & 0xFF)


@triton.jit
def high_limb(integers: tl.tensor) -> tl.tensor:
    """Returns the high byte of integers of 16 bits, with their sign."""
    return widen(integers.to(tl.int32) >> 8)
