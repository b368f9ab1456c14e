"""Integers of 2, 3, 4 or 8 bits, packed along the inputs into words of 32 bits.

One rule for all widths: value k of a run of 32 is bits b·k … b·k + b − 1 of a little-
endian stream of b words.

References:
  Frantar et al., GPTQ, ICLR 2023; its 3-bit layout follows from this rule.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer, UInt8, UInt32

from hpcjax.core.errors import ConfigError

RUN = 32
BITS = (2, 3, 4, 8)


def packed_rows(inputs: int, bits: int) -> int:
    """Returns how many words `inputs` integers take, the last run filled up.

    Raises:
      ConfigError: bits is not 2, 3, 4 or 8, or there is no input.

    Examples:
      >>> packed_rows(33, 3)
      6
    """
    if bits not in BITS or inputs < 1:
        raise ConfigError(
            f"bits must be one of {BITS} and inputs at least 1: got bits={bits}, "
            f"inputs={inputs}"
        )
    return -(-inputs // RUN) * bits


def pack(
    integers: Integer[Array, "inputs outputs"], bits: int
) -> UInt32[Array, "words outputs"]:
    """Packs integers in [0, 2^bits); those that fill up the last run are 0.

    Args:
      integers: `[inputs, outputs]`; bits above the width are dropped.
      bits: 2, 3, 4 or 8.

    Raises:
      ConfigError: another number of bits, or no inputs.

    Examples:
      >>> [hex(word) for word in pack(jnp.arange(8, dtype=jnp.uint8)[:, None], 4)[:, 0]]
      ['0x76543210', '0x0', '0x0', '0x0']
    """
    rows = packed_rows(integers.shape[0], bits)
    whole = jnp.pad(integers, ((0, rows // bits * RUN - len(integers)), (0, 0)))
    taken = whole.astype(jnp.uint32)[:, None] >> _places(bits) & 1
    # The same bits in the same order, cut every `bits` of them and every 32.
    stream = taken.reshape(rows, RUN, -1) << _places(RUN)
    return jnp.sum(stream, axis=1, dtype=jnp.uint32)


def unpack(
    words: UInt32[Array, "words outputs"], bits: int, inputs: int
) -> UInt8[Array, "inputs outputs"]:
    """Returns the first `inputs` integers of `pack`.

    Raises:
      ConfigError: another number of bits, or of words than so many inputs take.
    """
    if words.shape[0] != packed_rows(inputs, bits):
        raise ConfigError(
            f"{inputs} inputs of {bits} bits are {packed_rows(inputs, bits)} words: "
            f"got {words.shape[0]}"
        )
    taken = words[:, None] >> _places(RUN) & 1
    stream = taken.reshape(-1, bits, words.shape[1]) << _places(bits)
    return jnp.sum(stream, axis=1, dtype=jnp.uint32)[:inputs].astype(jnp.uint8)


def _places(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.uint32)[:, None]
