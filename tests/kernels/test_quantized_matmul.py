"""Quantized products: numpy in float64, the kernels interpreted, lowered for CUDA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import kernels
from hpcjax.core import ConfigError, UnsupportedOp
from hpcjax.kernels._quantized_matmul import api, layout, tiles
from hpcjax.kernels._quantized_matmul.matrix import _sort_rows
from hpcjax.kernels._triton.launch import find_problem

BITS = [2, 3, 4, 8]
# Of ‖ŵ‖·‖x‖ of an output; bfloat16 has a quarter of a digit less than float16.
BOUND = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}
interpreted = functools.partial(kernels.quantized_matmul, implementation="interpreted")
needs_triton = pytest.mark.skipif(
    find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)


def problem(
    bits, inputs, outputs, group_size=None, *, rows=1, dtype="float32", sort=False
):
    """A matrix, x, and in float64 the weights that the integers stand for."""
    rng = np.random.default_rng(bits + inputs + outputs + rows)
    size = group_size or inputs
    groups = -(-inputs // size)
    q = rng.integers(0, 2**bits, (inputs, outputs))
    q[0], q[-1] = 2**bits - 1, 0
    scale = rng.uniform(0.5, 1.5, (groups, outputs)).astype(np.float16)
    zero = rng.integers(0, 2**bits, (groups, outputs)).astype(np.float16)
    group = np.arange(inputs) // size
    if sort:
        group = rng.permutation(group)
    weights = scale[group].astype(float) * (q - zero[group].astype(float))
    matrix = kernels.quantized_matrix(
        jnp.asarray(q.astype(np.uint8)),
        jnp.asarray(scale),
        jnp.asarray(zero),
        bits=bits,
        group=jnp.asarray(group) if sort else None,
        group_size=group_size,
    )
    return matrix, jnp.asarray(rng.standard_normal((rows, inputs)), dtype), weights


def error(y, x, weights):
    x = np.asarray(x, np.float64)
    norms = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=0)
    return (np.abs(np.asarray(y, np.float64) - x @ weights) / norms).max()


@pytest.mark.parametrize("bits", BITS)
def test_pairs_take_every_value_once_from_equal_places_of_both_halves(bits):
    found = layout.pairs(bits)
    values = [value for pair in found for value in (pair.first, pair.second)]
    assert sorted(values) == list(range(32))
    for pair in found:
        bit = pair.start + pair.shift + pair.place
        assert (pair.first * bits, pair.second * bits) == (
            bit,
            bit + layout.apart(bits),
        )
        # Within the half, and below the least normal float16.
        assert pair.shift + pair.place + bits <= 16
        assert pair.place + bits <= 10


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize(("inputs", "group_size"), [(96, None), (100, 64), (96, 24)])
def test_the_reference_and_its_weights_equal_numpy(bits, sort, inputs, group_size):
    matrix, x, weights = problem(bits, inputs, 7, group_size, rows=3, sort=sort)
    assert (matrix.shape, matrix.ndim) == ((inputs, 7), 2)
    assert (matrix.order is not None) == (sort and group_size is not None)
    np.testing.assert_allclose(matrix.dequantize(), weights, rtol=1e-6)
    y = kernels.quantized_matmul(x, matrix, implementation="reference")
    assert error(y, x, weights) < 1e-6


@pytest.mark.quick(
    "3-96-33-None-float32-4", "3-96-33-None-float32-3", "3-100-40-64-float16-4"
)
@needs_triton
@pytest.mark.acceptance("gptq", 8)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "group_size", "dtype"),
    [
        (1, 96, 33, None, "float16"),
        (1, 100, 40, 64, "float32"),
        (1, 288, 64, 160, "bfloat16"),
        (3, 96, 33, None, "float32"),
        (3, 100, 40, 64, "float16"),
        (17, 288, 130, 128, "bfloat16"),
    ],
)
def test_the_kernel_equals_float64(bits, rows, inputs, outputs, group_size, dtype):
    matrix, x, weights = problem(
        bits, inputs, outputs, group_size, rows=rows, dtype=dtype
    )
    y = interpreted(x, matrix, output="float32")
    assert y.shape == (rows, outputs)
    assert error(y, x, weights) < BOUND[dtype]


@pytest.mark.quick("64-20", "None-20")
@needs_triton
@pytest.mark.acceptance("gptq", 8)
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("group_size", [None, 64])
def test_programs_that_take_several_chunks(monkeypatch, rows, group_size):
    # On small matrices every program would have one.
    monkeypatch.setattr(tiles, "PROGRAMS", 2)
    tile = tiles.choose_tile(rows, 40)
    split = tiles.choose_split(tile, rows, 1060, 40, group_size)
    assert split.share > 1
    assert split.chunks % split.share
    assert split.parts == 2
    matrix, x, weights = problem(3, 1060, 40, group_size, rows=rows)
    assert error(interpreted(x, matrix), x, weights) < BOUND["float32"]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("rows", [1, 2])
def test_low_precision_results_and_orders_of_inputs(rows):
    matrix, x, weights = problem(4, 128, 16, 64, rows=rows, dtype="bfloat16", sort=True)
    y = interpreted(x, matrix)
    assert y.dtype == jnp.bfloat16
    assert error(y, x, weights) < BOUND["bfloat16"]
    y = interpreted(x[0], matrix, output="float32")
    assert (y.shape, y.dtype) == ((16,), jnp.float32)
    assert interpreted(x[:0], matrix).shape == (0, 16)


@needs_triton
def test_numbers_far_from_one_and_zeros():
    matrix, x, weights = problem(4, 128, 16, 64, dtype="float32")
    for factor in (1e-30, 1e30):
        assert error(interpreted(factor * x, matrix), factor * x, weights) < 1e-5
    low = (1e30 * x).astype("bfloat16")
    assert error(interpreted(low, matrix), low, weights) < BOUND["bfloat16"]
    assert not np.any(interpreted(0 * x, matrix))
    assert np.all(np.isnan(interpreted(x.at[0, 3].set(jnp.nan), matrix)))


@needs_triton
def test_one_matrix_multiplies_the_rows_of_a_batch_at_once(monkeypatch):
    matrix, x, weights = problem(4, 96, 40, 32, rows=3)
    several = jax.vmap(interpreted, in_axes=(0, None))
    assert error(several(x, matrix), x, weights) < BOUND["float32"]
    text = str(jax.make_jaxpr(several)(x, matrix))
    assert text.count("pure_callback[") == 1
    assert "scan[" not in text
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), matrix)
    y = jax.vmap(interpreted)(x[:2], both)
    assert error(y, x[:2], weights) < BOUND["float32"]


@pytest.mark.quick("2-float32-True")
@needs_triton
@pytest.mark.parametrize(
    ("rows", "dtype", "sort"),
    [(1, "float32", False), (2, "float32", True), (1, "bfloat16", True)],
)
def test_gradients_are_those_of_the_reference(rows, dtype, sort):
    matrix, x, _ = problem(3, 100, 9, 32, rows=rows, dtype=dtype, sort=sort)
    matrix = dataclasses.replace(matrix, scale=matrix.scale.astype("float32"))
    matrix = dataclasses.replace(matrix, zero=matrix.zero.astype("float32"))
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 9)), "float32")

    def loss(x, matrix, product):
        return jnp.sum(product(x, matrix, output="float32") * weight)

    def gradients(product):
        return jax.grad(loss, argnums=(0, 1), allow_int=True)(x, matrix, product)

    found, own = gradients(interpreted)
    expected, of_reference = gradients(
        functools.partial(kernels.quantized_matmul, implementation="reference")
    )
    assert found.dtype == x.dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    for pair in [
        (found, expected),
        (own.scale, of_reference.scale),
        (own.zero, of_reference.zero),
    ]:
        a, b = (np.asarray(each, float) for each in pair)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def test_a_scan_over_stacked_layers_and_their_dequantization():
    layers = [problem(3, 64, 64, 32, rows=rows, sort=True) for rows in (1, 2, 3)]
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *(m for m, *_ in layers))
    assert stacked.shape == (3, 64, 64)
    weights = np.stack([w for *_, w in layers])
    np.testing.assert_allclose(stacked.dequantize(), weights, rtol=1e-6)
    x = jnp.ones(64) / 8

    def layer(x, matrix):
        return kernels.quantized_matmul(x, matrix) / 8, None

    found = jax.jit(lambda x: jax.lax.scan(layer, x, stacked)[0])(x)
    expected = np.ones(64) / 8
    for each in weights:
        expected = expected @ each / 8
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * scale)
    with pytest.raises(ConfigError, match=r"one matrix.*\[3, 6, 64\]"):
        kernels.quantized_matmul(x, stacked)


@pytest.mark.parametrize("bits", BITS)
def test_inputs_that_fill_up_a_run_have_the_zero_point(bits):
    matrix, _, _ = problem(bits, 33, 5)
    filled = kernels.unpack(matrix.words, bits, 64)
    expected = np.broadcast_to(np.asarray(matrix.zero), (31, 5))
    np.testing.assert_array_equal(filled[33:], expected)


@pytest.mark.quick("1")
@pytest.mark.parametrize("rows", [1, 40])
def test_the_kernels_are_in_programs_for_cuda(lowering, rows):
    matrix, x, _ = problem(4, 200, 96, 64, rows=rows, dtype="bfloat16", sort=True)
    product = functools.partial(kernels.quantized_matmul, implementation="triton")
    name = "one_row" if rows == 1 else "several_rows"
    assert lowering.kernels(product, x, matrix) == [name]


def compiled(machine_code, rows, bits):
    """A product of 49152×12288 weights, as large language models have them."""
    scale = jax.ShapeDtypeStruct((96, 49152), "float16")
    words = jax.ShapeDtypeStruct((384 * bits, 49152), "uint32")
    matrix = kernels.QuantizedMatrix(
        words=words, scale=scale, zero=scale, bits=bits, inputs=12288, group_size=128
    )
    x = jax.ShapeDtypeStruct((rows, 12288), "bfloat16")
    product = functools.partial(kernels.quantized_matmul, implementation="triton")
    (found,) = machine_code(product, x, matrix)
    return found


# Instructions for each value of the matrix, of the loop over a group's runs.
@pytest.mark.quick("4-1.6")
@pytest.mark.parametrize(("bits", "most"), [(2, 1.5), (3, 1.9), (4, 1.6), (8, 1.9)])
def test_two_values_are_multiplied_by_one_instruction(machine_code, bits, most):
    found = compiled(machine_code, 1, bits)
    assert not found.spilled
    (loop,) = found.inner_loops
    values = 32 * found.constants["TILE"] // found.threads
    assert sum(name.startswith("HFMA2") for name in loop) == values / 2
    assert len(loop) / values <= most
    # Words come in fours.
    assert sum(name == "LDG.E.128" for name in loop) == values * bits / 128


@pytest.mark.quick("4")
@pytest.mark.parametrize("bits", [3, 4])
def test_several_rows_are_multiplied_by_tensor_cores(machine_code, bits):
    found = compiled(machine_code, 16, bits)
    product = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"
    assert found.tensor_core_products == (product,)
    assert not found.spilled


def test_what_no_kernel_takes_is_said_by_name():
    other, x, _ = problem(4, 96, 4, 24)
    with pytest.raises(UnsupportedOp, match="multiple of 32: got 24"):
        interpreted(x, other)
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        kernels.quantized_matmul(x, other, implementation="tritom")


def test_bad_matrices_and_inputs_are_refused():
    matrix, x, _ = problem(4, 64, 4)
    q, one = jnp.zeros((64, 4), jnp.uint8), jnp.ones((1, 4))
    make = functools.partial(kernels.quantized_matrix, bits=4)
    with pytest.raises(ConfigError, match=r"x must be \[..., 64\].*got \[1, 63\]"):
        kernels.quantized_matmul(x[:, 1:], matrix)
    with pytest.raises(ConfigError, match="got int32"):
        api._check(x.astype("int32"), matrix)
    with pytest.raises(ConfigError, match="64 inputs of 8 bits are 16 words: got 8"):
        kernels.quantized_matmul(x, dataclasses.replace(matrix, bits=8))
    with pytest.raises(ConfigError, match="group_size=32 are 2 groups: got 1"):
        kernels.quantized_matmul(x, dataclasses.replace(matrix, group_size=32))
    words = jax.lax.bitcast_convert_type(matrix.words, "int32")
    with pytest.raises(ConfigError, match=r"words must be uint32.*got int32"):
        kernels.quantized_matmul(x, dataclasses.replace(matrix, words=words))
    with pytest.raises(ConfigError, match=r"group must be \[32\].*got \[20\]"):
        _sort_rows(np.arange(20) // 16, 32, 16)
    with pytest.raises(ConfigError, match=r"order must be \[64\]"):
        kernels.quantized_matmul(x, dataclasses.replace(matrix, order=jnp.arange(3)))
    with pytest.raises(ConfigError, match=r"alike: got \[1, 4\] and \[2, 4\]"):
        kernels.quantized_matmul(x, dataclasses.replace(matrix, zero=jnp.ones((2, 4))))
    with pytest.raises(ConfigError, match="3 groups do not divide 64 inputs"):
        make(q, jnp.ones((3, 4)), jnp.ones((3, 4)))
    with pytest.raises(ConfigError, match="zero must hold integers"):
        make(q, one, -0.3 * one)
    with pytest.raises(ConfigError, match=r"got 2 groups, of \[1, 63\] inputs"):
        make(
            q, jnp.ones((2, 4)), jnp.ones((2, 4)), group=jnp.minimum(jnp.arange(64), 1)
        )
