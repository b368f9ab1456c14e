"""Integers of four bits, two in a byte, and integers as limbs of few bits."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Integer, UInt8

from hpcjax.core import checks


def pack_nibbles(integers: Integer[Array, "*rows n"]) -> UInt8[Array, "*rows half"]:
    """Packs integers in [−8, 8), two in a byte, of which the low half is the even one.

    Args:
      integers: an even number of them along the last axis; only the low four bits of
        each count.

    Raises:
      ConfigError: an odd number.

    Examples:
      >>> [hex(byte) for byte in pack_nibbles(jnp.array([-1, 2, 7, -8])).tolist()]
      ['0x2f', '0x87']
    """
    count = integers.shape[-1]
    checks.require(count % 2 == 0, "nibbles are packed in twos", count=count)
    low = integers.astype(jnp.uint8) & 0xF
    return low[..., ::2] | low[..., 1::2] << 4


def unpack_nibbles(packed: UInt8[Array, "*rows half"]) -> Int[Array, "*rows n"]:
    """Returns the integers in [−8, 8) that were packed, int8.

    Examples:
      >>> unpack_nibbles(pack_nibbles(jnp.array([-1, 2, 7, -8]))).tolist()
      [-1, 2, 7, -8]
    """
    return sign_extend(split_nibbles(packed), 4).astype(jnp.int8)


def split_nibbles(packed: UInt8[Array, "*rows half"]) -> UInt8[Array, "*rows n"]:
    """Returns the nibbles of bytes, low ones first, in [0, 16)."""
    both = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def sign_extend(integers: Integer[Array, "*n"], bits: int) -> Int[Array, "*n"]:
    """Returns int32 whose low bits are those of an integer in two's complement.

    Examples:
      >>> sign_extend(jnp.array([7, 8, 15], jnp.uint8), 4).tolist()
      [7, -8, -1]
    """
    return integers.astype(jnp.int32) << (32 - bits) >> (32 - bits)


def split_limbs(
    integers: Integer[Array, "*n"], bits: int, limb: int
) -> list[UInt8[Array, "*n"]]:
    """Returns an integer's limbs, low ones first; the last is signed, others are not.

    a = Σ_i 2^(limb·i) a_i (Li et al., §4.4).
    """
    wide = integers.astype(jnp.int32)
    mask = (1 << limb) - 1
    return [(wide >> place & mask).astype(jnp.uint8) for place in range(0, bits, limb)]


def join_limbs(limbs: list[UInt8[Array, "*n"]], limb: int) -> Int[Array, "*n"]:
    """Returns int32 of limbs: what `split_limbs` split."""
    *low, high = limbs
    total = sign_extend(high, limb) << limb * len(low)
    for place, each in enumerate(low):
        total |= each.astype(jnp.int32) << limb * place
    return total
