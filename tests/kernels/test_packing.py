"""Packed integers: words by hand, round trips, and the stream of bits as a number."""

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import kernels
from hpcjax.core import ConfigError

K = np.arange(32)
SPARSE = np.zeros(32, int)
SPARSE[[10, 21, 31]] = 5, 6, 7
WORDS = [
    (3, K % 8, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    (3, (5 * K + 3) % 8, [0x43C67543, 0x7543C675, 0xC67543C6]),
    (3, SPARSE, [0x40000000, 0x00000001, 0xE0000003]),
    (4, K[:8], [0x76543210, 0, 0, 0]),
    (2, K % 4, [0xE4E4E4E4] * 2),
    (8, np.array([1, 2, 3, 255]), [0xFF030201] + [0] * 7),
]


@pytest.mark.acceptance("gptq", 7)
@pytest.mark.parametrize(("bits", "values", "words"), WORDS)
def test_words_by_hand(bits, values, words):
    column = jnp.asarray(values.astype(np.uint8))[:, None]
    packed = kernels.pack(column, bits)
    assert packed[:, 0].tolist() == words
    np.testing.assert_array_equal(kernels.unpack(packed, bits, len(values)), column)


@pytest.mark.acceptance("gptq", 7)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("inputs", [32, 96, 100])
def test_a_round_trip_and_the_stream_as_one_number(bits, inputs):
    rng = np.random.default_rng(bits + inputs)
    values = rng.integers(0, 2**bits, (inputs, 7)).astype(np.uint8)
    # The largest integer sets every bit of its word, the sign of int32 too.
    values[:, 0], values[:, 1] = 2**bits - 1, 0
    packed = kernels.pack(jnp.asarray(values), bits)
    assert packed.shape == (kernels.packed_rows(inputs, bits), 7)
    np.testing.assert_array_equal(kernels.unpack(packed, bits, inputs), values)
    for column in range(7):
        number = sum(int(v) << bits * k for k, v in enumerate(values[:, column]))
        stream = np.asarray(packed[:, column]).astype("<u4").tobytes()
        assert int.from_bytes(stream, "little") == number


def test_other_widths_and_lengths_are_refused():
    words = jnp.zeros((3, 1), jnp.uint32)
    with pytest.raises(ConfigError, match="bits=5"):
        kernels.pack(jnp.zeros((4, 1), jnp.uint8), 5)
    with pytest.raises(ConfigError, match="33 inputs of 3 bits are 6 words: got 3"):
        kernels.unpack(words, 3, 33)
