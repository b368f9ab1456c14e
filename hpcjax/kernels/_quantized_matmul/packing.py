"""Packing of integers of b = 2, 3, 4 or 8 bits along the inputs into 32-bit words.

32 consecutive values form a run, which takes b words. Value k of a run is bits b·k …
b·k + b − 1 of the little-endian stream of these words, for all widths.

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
    """Returns the number of words of `inputs` integers, with the last run padded.

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
    """Packs integers in [0, 2^bits); the last run is padded with 0.

    Args:
      integers: `[inputs, outputs]`; higher bits are dropped.
      bits: 2, 3, 4 or 8.

    Raises:
      ConfigError: another number of bits, or no inputs.

    Examples:
      >>> [hex(word) for word in pack(jnp.arange(8, dtype=jnp.uint8)[:, None], 4)[:, 0]]
      ['0x76543210', '0x0', '0x0', '0x0']
    """
    rows = packed_rows(integers.shape[0], bits)
    whole = jnp.pad(integers, ((0, rows // bits * RUN - len(integers)), (0, 0)))
    # [values, bits, outputs]: single bits in the order of the stream. Reshaped to
    # [words, 32, outputs], they are the bits of words.
    single = whole.astype(jnp.uint32)[:, None] >> _places(bits) & 1
    stream = single.reshape(rows, RUN, -1) << _places(RUN)
    return jnp.sum(stream, axis=1, dtype=jnp.uint32)


def unpack(
    words: UInt32[Array, "words outputs"], bits: int, inputs: int
) -> UInt8[Array, "inputs outputs"]:
    """Returns the first `inputs` integers that `pack` packed.

    Raises:
      ConfigError: another number of bits, or a number of words that does not fit.
    """
    if words.shape[0] != packed_rows(inputs, bits):
        raise ConfigError(
            f"{inputs} inputs of {bits} bits are {packed_rows(inputs, bits)} words: "
            f"got {words.shape[0]}"
        )
    # As in `pack`, in reverse.
    single = words[:, None] >> _places(RUN) & 1
    stream = single.reshape(-1, bits, words.shape[1]) << _places(bits)
    return jnp.sum(stream, axis=1, dtype=jnp.uint32)[:inputs].astype(jnp.uint8)


def _places(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.uint32)[:, None]
