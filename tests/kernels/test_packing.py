"""Packed integers: words by hand, round trips, and the stream of bits as a number."""

import jax
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


@pytest.mark.quick("3-values1-words1", "3-values2-words2", "2-values4-words4")
@pytest.mark.acceptance("gptq", 7)
@pytest.mark.parametrize(("bits", "values", "words"), WORDS)
def test_words_by_hand(bits, values, words):
    column = jnp.asarray(values.astype(np.uint8))[:, None]
    packed = kernels.pack(column, bits)
    assert packed[:, 0].tolist() == words
    np.testing.assert_array_equal(kernels.unpack(packed, bits, len(values)), column)


@pytest.mark.quick("100-3", "100-2", "96-3")
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


def matrix(seed, outputs=6, group=None, bits=4, size=8):
    """A packed matrix of 32 inputs."""
    rng = np.random.default_rng(seed)
    scale, zero = rng.uniform(1, 2, (32 // size, outputs)), np.full(outputs, 2.0)
    return kernels.quantized_matrix(
        jnp.asarray(rng.integers(0, 2**bits, (32, outputs)).astype(np.uint8)),
        jnp.asarray(scale, jnp.float32),
        jnp.broadcast_to(jnp.asarray(zero, jnp.float32), scale.shape),
        bits=bits,
        group=None if group is None else jnp.asarray(group),
    )


SCATTERED = np.random.default_rng(9).permutation(32) // 8


@pytest.mark.slow
def test_matrices_are_stacked_side_by_side_and_cut():
    plain, other = matrix(0), matrix(1, group=SCATTERED)
    assert plain.order is None
    assert other.order is not None
    both = kernels.stack_matrices([plain, other])
    wanted = np.stack([plain.dequantize(), other.dequantize()])
    np.testing.assert_array_equal(both.dequantize(), wanted)
    assert kernels.stack_matrices([plain, plain]).order is None
    wide = kernels.join_outputs([other, matrix(2, outputs=3, group=SCATTERED)])
    assert wide.shape == (32, 9)
    np.testing.assert_array_equal(
        kernels.take_outputs(wide, slice(0, 6)).dequantize(), other.dequantize()
    )
    # An order that is that of the inputs is the same as none.
    sorted_ = kernels.stack_matrices([plain, other])
    first = jax.tree.map(lambda leaf: leaf[0], sorted_)
    joined = kernels.join_outputs([plain, first])
    np.testing.assert_array_equal(
        joined.dequantize(), np.tile(np.asarray(plain.dequantize()), 2)
    )


def test_matrices_that_do_not_go_together_are_refused():
    plain = matrix(0)
    for others in ({"outputs": 5}, {"bits": 3}, {"size": 16}):
        with pytest.raises(ConfigError, match="must be alike"):
            kernels.stack_matrices([plain, matrix(1, **others)])
    for others in ({"bits": 3}, {"size": 16}):
        with pytest.raises(ConfigError, match="must be alike"):
            kernels.join_outputs([plain, matrix(1, **others)])
    with pytest.raises(ConfigError, match="rows in one order"):
        kernels.join_outputs([plain, matrix(1, group=SCATTERED)])
    for none in (kernels.stack_matrices, kernels.join_outputs):
        with pytest.raises(ConfigError, match="must be alike"):
            none([])
