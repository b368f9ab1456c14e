"""Sparse products of column vectors: numpy, the kernels interpreted and compiled."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hpcjax import kernels
from hpcjax.core import ConfigError, UnsupportedOp
from hpcjax.kernels._triton.launch import find_problem

spmm_launch = importlib.import_module("hpcjax.kernels._spmm.launch")
sddmm_launch = importlib.import_module("hpcjax.kernels._sddmm.launch")
exact = importlib.import_module("hpcjax.kernels._sr_bcrs.exact")
nibbles = importlib.import_module("hpcjax.kernels._sr_bcrs.nibbles")
PAIRS = importlib.import_module("hpcjax.kernels._spmm.api").PAIRS
needs_triton = pytest.mark.skipif(
    find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)
IMPLEMENTATIONS = ["reference", pytest.param("interpreted", marks=needs_triton)]


def integers(rng, bits, shape):
    """Of the whole range, both ends among them."""
    made = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape)
    made.flat[-4:] = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] * 2
    return made


def dense_operand(made, bits):
    if bits == 4:
        return kernels.pack_nibbles(jnp.asarray(made))
    return jnp.asarray(made, f"int{bits}")


def sparse_problem(seed, vector, bits, *, width=70, share=0.3):
    """A matrix with an empty row of vectors, a sparse one and a full one."""
    rng = np.random.default_rng(seed)
    kept = rng.random((3, width)) < np.array([[0.0], [share], [1.0]])
    made = integers(rng, bits, (3 * vector, width)) * np.repeat(kept, vector, axis=0)
    return rng, kept, made


def wrapped(product):
    return product.astype(np.int64).astype(np.int32)


@pytest.mark.acceptance("magicube", 1)
def test_the_example_of_the_format():
    dense, t = np.zeros((6, 12), int), 0
    for row, columns in enumerate([[1, 3, 6, 8], [1, 2, 5, 7, 8, 11], [0, 4, 9]]):
        for column in columns:
            for v in range(2):
                t += 1
                dense[2 * row + v, column] = (-1) ** t * t
    matrix = kernels.sr_bcrs(dense, vector=2, stride=4)
    assert matrix.pointers.tolist() == [0, 4, 4, 10, 12, 15]
    columns = [1, 3, 6, 8, 1, 2, 5, 7, 8, 11, -1, -1, 0, 4, 9, -1]
    assert matrix.columns.tolist() == columns
    assert np.asarray(matrix.values).view(np.int8).reshape(4, 8).tolist() == [
        [-1, -3, -5, -7, 2, 4, 6, 8],
        [-9, -11, -13, -15, 10, 12, 14, 16],
        [-17, -19, 0, 0, 18, 20, 0, 0],
        [-21, -23, -25, 0, 22, 24, 26, 0],
    ]
    halves = kernels.sr_bcrs(dense, vector=2, stride=4, limb=4)
    assert np.asarray(halves.values[0]).tobytes().hex() == "df9b4286ffff0000"
    assert kernels.count_padding(matrix) == 3
    assert kernels.storage_bytes(matrix) == 4 * 16 + 2 * 16 + 8 * 3


@pytest.mark.quick("4-16-8-16", "8-16-8-32", "2-16-8-16")
@pytest.mark.acceptance("magicube", 1)
@pytest.mark.parametrize("stride", [16, 32])
@pytest.mark.parametrize(("bits", "limb"), [(8, 8), (8, 4), (12, 4), (16, 8), (4, 4)])
@pytest.mark.parametrize("vector", [2, 4, 8])
def test_a_compressed_matrix_is_the_dense_one(vector, bits, limb, stride):
    _, kept, dense = sparse_problem(vector, vector, bits)
    matrix = kernels.sr_bcrs(dense, vector=vector, stride=stride, bits=bits, limb=limb)
    np.testing.assert_array_equal(matrix.to_dense(), dense)
    padded = sum(-(-count // stride) * stride for count in kept.sum(axis=1))
    # No byte holds less than eight bits of values.
    wanted = 4 * padded + vector * padded * bits // 8 + 8 * 3
    assert kernels.storage_bytes(matrix) == wanted
    assert kernels.count_padding(matrix) == padded - kept.sum()


def test_a_mask_keeps_zeros_and_drops_the_rest():
    dense = np.arange(32.0).reshape(4, 8)
    mask = np.zeros((2, 8), bool)
    mask[0, [0, 3]] = mask[1, 7] = True
    matrix = kernels.sr_bcrs(dense, vector=2, mask=mask)
    assert matrix.columns.tolist()[:2] == [0, 3]
    np.testing.assert_array_equal(matrix.to_dense(), dense * np.repeat(mask, 2, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize(("left", "right"), [(8, 8), (8, 4)])
def test_nothing_times_anything_is_zero(left, right):
    b = dense_operand(np.ones((6, 4), int), right)
    limb = min(8, right)
    matrix = kernels.sr_bcrs(np.zeros((4, 6), int), vector=2, bits=left, limb=limb)
    assert not matrix.groups
    assert not np.any(matrix.to_dense())
    np.testing.assert_array_equal(kernels.spmm(matrix, b), np.zeros((4, 4)))
    # Of no products at all: a sum over nothing, and the gradients of no columns.
    pattern = kernels.sr_bcrs(np.ones((4, 6), np.float32), vector=2)
    empty = kernels.sddmm(jnp.ones((4, 0)), jnp.ones((6, 0)), pattern)
    np.testing.assert_array_equal(empty.to_dense(), np.zeros((4, 6)))
    found = jax.grad(lambda b: kernels.spmm(pattern, b).sum())(jnp.ones((6, 0)))
    assert found.shape == (6, 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_no_number_stays_out_where_nothing_is_kept(implementation):
    matrix = kernels.sr_bcrs(np.array([[1, 0], [2, 0]], np.float32), vector=2)
    b = jnp.array([[1.0, 3.0], [jnp.nan, jnp.inf]])
    y = kernels.spmm(matrix, b, implementation=implementation)
    np.testing.assert_array_equal(y, [[1, 3], [2, 6]])


@pytest.mark.acceptance("magicube", 8)
def test_two_nibbles_are_a_byte():
    every = np.arange(-8, 8)
    pairs = np.stack(np.meshgrid(every, every, indexing="ij"), axis=-1).reshape(-1)
    packed = kernels.pack_nibbles(jnp.asarray(pairs, jnp.int8))
    assert packed.nbytes == len(pairs) // 2
    low, high = pairs[::2] & 15, pairs[1::2] & 15
    np.testing.assert_array_equal(packed, low | high << 4)
    np.testing.assert_array_equal(kernels.unpack_nibbles(packed), pairs)
    # JAX's own integers of four bits are no floats.
    matrix = kernels.sr_bcrs(jnp.asarray(pairs, jnp.int4)[:32, None], bits=4)
    np.testing.assert_array_equal(matrix.to_dense()[:, 0], pairs[:32])
    of_jax = jnp.asarray(pairs, jnp.int4)
    np.testing.assert_array_equal(kernels.pack_nibbles(of_jax), packed)
    again = kernels.unpack_nibbles(packed).astype(jnp.int4)
    np.testing.assert_array_equal(again.astype(int), pairs)
    with pytest.raises(ConfigError, match="count=3"):
        kernels.pack_nibbles(jnp.ones(3, jnp.int8))


@pytest.mark.acceptance("magicube", 2, 4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize(("vector", "seed"), [(2, 0), (4, 1), (8, 2)])
def test_products_are_exact_modulo_2_to_32(vector, seed, left, right, implementation):
    rng, _, dense = sparse_problem(seed, vector, left)
    limb = min(8, right)
    matrix = kernels.sr_bcrs(dense, vector=vector, bits=left, limb=limb)
    b = integers(rng, right, (70, 66))
    y = kernels.spmm(matrix, dense_operand(b, right), implementation=implementation)
    assert y.dtype == jnp.int32
    np.testing.assert_array_equal(y, wrapped(dense @ b))


@pytest.mark.quick("4-1-8-reference", "8-2-8-reference", "2-0-8-reference")
@pytest.mark.acceptance("magicube", 2, 4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("vector", "seed"), [(2, 0), (4, 1), (8, 2)])
def test_products_at_a_pattern_are_exact(vector, seed, bits, implementation):
    rng, kept, dense = sparse_problem(seed, vector, 8)
    pattern = kernels.sr_bcrs(dense, vector=vector)
    x, y = integers(rng, bits, (3 * vector, 74)), integers(rng, bits, (70, 74))
    found = kernels.sddmm(
        dense_operand(x, bits),
        dense_operand(y, bits),
        pattern,
        implementation=implementation,
    )
    kept = np.repeat(np.any(dense.reshape(3, vector, 70), axis=1), vector, axis=0)
    np.testing.assert_array_equal(found.to_dense(), wrapped(x @ y.T) * kept)


@pytest.mark.quick("most-16-8-reference", "most-8-8-reference", "most-16-4-reference")
@pytest.mark.acceptance("magicube", 2, 3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("left", "right"), PAIRS)
@pytest.mark.parametrize("extreme", ["least", "most"])
def test_sums_that_leave_int32_wrap(left, right, extreme, implementation):
    """600 entries of one end of the range, on both sides."""

    def end(bits):
        return -(2 ** (bits - 1)) if extreme == "least" else 2 ** (bits - 1) - 1

    dense, b = np.full((2, 600), end(left)), np.full((600, 64), end(right))
    matrix = kernels.sr_bcrs(dense, vector=2, bits=left, limb=min(8, right))
    y = kernels.spmm(matrix, dense_operand(b, right), implementation=implementation)
    product = dense @ b
    np.testing.assert_array_equal(y, wrapped(product))
    left_range = np.abs(product).max() >= 2**31
    assert left_range == ((left, right) in {(16, 16), (16, 8)})
    if left == right:
        operands = dense_operand(dense, left), dense_operand(b.T[:2], left)
        pattern = kernels.sr_bcrs(np.ones((2, 2)), vector=2)
        found = kernels.sddmm(*operands, pattern, implementation=implementation)
        np.testing.assert_array_equal(found.to_dense(), wrapped(product)[:, :2])


@pytest.mark.quick("16-8")
@needs_triton
@pytest.mark.acceptance("magicube", 2)
@pytest.mark.parametrize(("left", "right"), [(16, 16), (16, 8), (8, 8)])
def test_float32_sums_end_before_they_are_inexact(left, right):
    """Long rows of large limbs, no two sums alike."""
    rng = np.random.default_rng(left + right)
    dense, b = (
        2 ** (bits - 1)
        - 1
        - 256 * rng.integers(0, 2, shape) * (bits > 8)
        - rng.integers(0, 9, shape)
        for bits, shape in ((left, (2, 2100)), (right, (2100, 64)))
    )
    matrix = kernels.sr_bcrs(dense, vector=2, bits=left)
    run = functools.partial(kernels.spmm, implementation="interpreted")
    y = run(matrix, dense_operand(b, right))
    np.testing.assert_array_equal(y, wrapped(dense @ b))
    if left == right:
        pattern = kernels.sr_bcrs(np.ones((2, 64)), vector=2)
        operands = dense_operand(dense, left), dense_operand(b.T, left)
        found = kernels.sddmm(*operands, pattern, implementation="interpreted")
        np.testing.assert_array_equal(found.to_dense(), wrapped(dense @ b))


@pytest.mark.acceptance("magicube", 3)
def test_two_nibbles_multiply_as_the_byte_they_are():
    _, _, dense = sparse_problem(3, 8, 8)
    b = np.random.default_rng(0).integers(-8, 8, (70, 64))
    halves = kernels.sr_bcrs(dense, bits=8, limb=4)
    whole = kernels.sr_bcrs(dense, bits=8, limb=8)
    np.testing.assert_array_equal(
        kernels.spmm(halves, dense_operand(b, 4)),
        kernels.spmm(whole, dense_operand(b, 8)),
    )


@pytest.mark.parametrize("limb", [4, 8])
def test_limbs_are_a_number_again(limb):
    every = jnp.arange(-(2**15), 2**15)
    split = nibbles.split_limbs(every, 16, limb)
    assert len(split) == 16 // limb
    np.testing.assert_array_equal(nibbles.join_limbs(split, limb), every)


@pytest.mark.parametrize(("left", "right"), [(8, 8), (8, 4), (4, 4), (16, 16)])
def test_float32_holds_as_many_products_as_it_is_trusted_with(left, right):
    unsigned = left == 16
    limbs = min(left, right, 8), min(right, 8)
    count = exact.count_exact(*limbs, unsigned=unsigned)
    largest = np.prod([2**b - 1 if unsigned else 2 ** (b - 1) for b in limbs])
    assert count * largest <= 2**24 < (count + 1) * largest


@needs_triton
@pytest.mark.acceptance("magicube", 5)
@pytest.mark.parametrize("vector", [2, 8])
def test_the_kernel_reads_the_bytes_of_the_formula(monkeypatch, vector):
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    load, read = builder.create_masked_load, []

    def counted(self, ptrs, mask, *others):
        result = load(self, ptrs, mask, *others)
        if ptrs.data.size > 1:  # not the row's pointers
            seen = np.unique(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
            read.append(seen.size * result.data.itemsize)
        return result

    monkeypatch.setattr(builder, "create_masked_load", counted)
    rng, columns, operands = np.random.default_rng(0), 128, {}
    for bits in (8, 4):
        dense = integers(rng, bits, (vector, 50))
        dense[dense == 0] = 1
        matrix = kernels.sr_bcrs(dense, vector=vector, bits=bits)
        b = dense_operand(integers(rng, bits, (50, columns)), bits)
        read.clear()
        kernels.spmm(matrix, b, implementation="interpreted").block_until_ready()
        counts = kernels.operand_bytes(matrix, columns, bits)
        # Padding is read, and the rows of b that are not there are not.
        assert counts["padding"] == 14 * (4 + vector * bits // 8)
        assert sum(read) == counts["operands"] + counts["padding"]
        assert counts["operands"] == 50 * (4 + (vector + columns) * bits // 8)
        assert counts["output"] == 4 * vector * columns
        operands[bits] = counts["operands"]
    assert operands[4] <= 0.53 * operands[8]


def test_padding_is_counted_apart():
    _, _, dense = sparse_problem(0, 8, 8)
    matrix = kernels.sr_bcrs(dense)
    counts = kernels.operand_bytes(matrix, 64, 8)
    vectors = np.any(dense.reshape(3, 8, 70), axis=1).sum()
    assert counts["operands"] == vectors * (4 + 8 + 64)
    assert counts["padding"] == kernels.count_padding(matrix) * (4 + 8)


@pytest.mark.quick("interpreted")
@pytest.mark.acceptance("magicube", 9)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_finite_differences(implementation):
    rng, kept, _ = sparse_problem(5, 2, 8, width=6)
    dense = rng.normal(size=(6, 6)).astype(np.float32)
    matrix = kernels.sr_bcrs(dense, vector=2, mask=kept)
    b, x, y, weight = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((6, 5), (6, 4), (6, 4), (6, 5))
    )
    places, wide = np.repeat(kept, 2, axis=0), np.asarray(weight, np.float64)

    def loss(dense_values, b, x, y):
        """Of the whole matrix: its numbers go into the tiles by their places."""
        line = matrix.rows[:, None] * 2 + np.arange(2)
        columns = matrix.columns.reshape(-1, 1, 32)
        tiles = jnp.where(columns < 0, 0, dense_values[line[:, :, None], columns])
        sparse = spmm_launch.SRBCRS(**{**vars(matrix), "values": tiles[:, None]})
        run = functools.partial(kernels.spmm, implementation=implementation)
        products = kernels.sddmm(x, y, matrix, implementation=implementation)
        return jnp.sum(run(sparse, b) * weight) + jnp.sum(jnp.sin(products.values))

    def by_hand(dense_values, b, x, y):
        product = (dense_values * places) @ b
        return np.sum(product * wide) + np.sum(np.sin(x @ y.T) * places)

    given = [np.asarray(each, np.float64) for each in (dense, b, x, y)]
    found = jax.grad(loss, argnums=(0, 1, 2, 3))(jnp.asarray(dense), b, x, y)
    for number, gradient in enumerate(found):
        step = np.zeros_like(given[number])
        expected = np.zeros_like(step)
        for at in np.ndindex(step.shape):
            step[at] = 1e-6
            up, down = (
                by_hand(
                    *[e + s * step if i == number else e for i, e in enumerate(given)]
                )
                for s in (1, -1)
            )
            expected[at], step[at] = (up - down) / 2e-6, 0
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-4)


@pytest.mark.acceptance("magicube", 9)
def test_integers_have_no_gradient():
    matrix = kernels.sr_bcrs(np.ones((2, 2), int), vector=2)
    with pytest.raises(TypeError, match="real- or complex-valued"):
        jax.grad(lambda b: kernels.spmm(matrix, b).sum())(jnp.ones((2, 2), jnp.int8))


@needs_triton
def test_batches_and_devices():
    rng, _, dense = sparse_problem(0, 2, 8)
    matrix = kernels.sr_bcrs(dense, vector=2)
    run = functools.partial(kernels.spmm, matrix, implementation="interpreted")
    several = jnp.asarray(integers(rng, 8, (2, 70, 4)), jnp.int8)
    found = jax.vmap(run)(several)
    np.testing.assert_array_equal(found, wrapped(dense @ np.asarray(several, int)))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(run, mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"))
    np.testing.assert_array_equal(jax.jit(split)(several[0]), found[0])


DTYPES = {16: "int16", 8: "int8", 4: "uint8", 0: "bfloat16"}


@pytest.mark.quick("0-0-8")
@pytest.mark.acceptance("magicube", 4)
@pytest.mark.parametrize(
    ("left", "right", "vector"),
    [(8, 8, 8), (8, 8, 2), (16, 16, 8), (12, 4, 8), (4, 4, 8), (0, 0, 8)],
)
def test_machine_code_of_spmm(machine_code, left, right, vector):
    sizes = spmm_launch.Sizes(4096, 2048, vector, left, min(8, right), right)
    names = ("uint8" if left else "bfloat16", "int32", "int32", DTYPES[right])
    arrays = [jax.ShapeDtypeStruct((1,), name) for name in names]
    call = functools.partial(kernels.run, spmm_launch.plan(sizes))
    (found,) = machine_code(call, *arrays)
    assert found.tensor_core_products
    for product in found.tensor_core_products:
        assert product.startswith("wgmma.mma_async.sync.aligned.m64n")
        assert product.endswith("k16.f32.bf16.bf16")
    assert "satfinite" not in found.ptx
    assert not found.spilled


@pytest.mark.quick("0")
@pytest.mark.parametrize("bits", [16, 4, 0])
def test_machine_code_of_sddmm(machine_code, bits):
    names = (DTYPES[bits], DTYPES[bits], "int32", "int32")
    arrays = [jax.ShapeDtypeStruct((1,), name) for name in names]
    plan = sddmm_launch.plan(sddmm_launch.Sizes(512, 256, 8, 32, bits))
    (found,) = machine_code(functools.partial(kernels.run, plan), *arrays)
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    assert found.tensor_core_products == (product,)
    assert "satfinite" not in found.ptx
    assert not found.spilled


def test_bad_input_is_refused():
    make, ones = kernels.sr_bcrs, np.ones((8, 4), int)
    with pytest.raises(ConfigError, match=r"vector must be one of \(2, 4, 8\).*=3"):
        make(ones, vector=3)
    with pytest.raises(ConfigError, match=r"multiple of 8, columns.*\(6, 4\)"):
        make(ones[:6])
    with pytest.raises(ConfigError, match=r"must be in \[-8, 7\].*most=8"):
        make(8 * ones, bits=4)
    with pytest.raises(ConfigError, match="divide bits: got limb=8, bits=12"):
        make(ones, bits=12, limb=8)
    with pytest.raises(ConfigError, match=r"mask must be \(1, 4\)"):
        make(ones, mask=np.ones((2, 4), bool))
    with pytest.raises(ConfigError, match="floats have no bits: got bits=8"):
        make(1.0 * ones, bits=8)
    with pytest.raises(ConfigError, match="integers or floats: got dtype='bool'"):
        make(ones.astype(bool))
    with pytest.raises(ConfigError, match="integers or floats: got dtype='complex128'"):
        make(ones.astype(complex))
    matrix, b = make(ones), jnp.ones((4, 64), jnp.int8)
    tiles, place = matrix.tiles(), kernels.with_values
    with pytest.raises(ConfigError, match=r"tiles must be \[1, 8, 32\].*\[1, 8, 16\]"):
        place(matrix, tiles[..., :16])
    with pytest.raises(ConfigError, match=r"bits must be one of .*got bits=5"):
        place(matrix, tiles, bits=5)
    with pytest.raises(ConfigError, match="have no limbs: got limb=8"):
        place(matrix, tiles, limb=8)
    with pytest.raises(ConfigError, match="floats have no bits: got dtype='float32'"):
        place(matrix, 1.5 * tiles, bits=8)
    assert place(matrix, tiles, bits=4).limb == 4
    with pytest.raises(ConfigError, match=r"b must be \[4, N\].*got \[3, 64\]"):
        kernels.spmm(matrix, b[:3])
    with pytest.raises(
        ConfigError, match=r"\(16, 16\), \(16, 8\).*matrix=8, b='int16'"
    ):
        kernels.spmm(matrix, b.astype(jnp.int16))
    with pytest.raises(ConfigError, match=r"must have 4 bits: .*got limb=8"):
        kernels.spmm(matrix, kernels.pack_nibbles(b))
    with pytest.raises(ConfigError, match=r"one dtype .*matrix='float32', b='float16'"):
        kernels.spmm(make(1.0 * ones.astype("float32")), b.astype("float16"))
    with pytest.raises(ConfigError, match=r"y \[4, K\] for a pattern of \[8, 4\]"):
        kernels.sddmm(jnp.ones((8, 2)), jnp.ones((3, 2)), matrix)
    with pytest.raises(ConfigError, match="x='int8', y='float32'"):
        kernels.sddmm(b[:2], jnp.ones((4, 64)), matrix)
    with pytest.raises(UnsupportedOp, match="stride=32: got 16"):
        kernels.spmm(make(ones, stride=16), b, implementation="triton")
