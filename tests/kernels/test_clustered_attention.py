"""Clustered attention: loops in numpy, the kernel interpreted, and lowered for CUDA."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import kernels
from hpcjax.core import ConfigError, UnsupportedOp
from hpcjax.kernels._triton.launch import find_problem

blocked = importlib.import_module("hpcjax.kernels._clustered_attention.blocked")
launch = importlib.import_module("hpcjax.kernels._clustered_attention.launch")
reference = importlib.import_module("hpcjax.kernels._clustered_attention.reference")
interpreted = functools.partial(launch.clustered_attention, interpreted=True)
needs_triton = pytest.mark.skipif(
    find_problem(interpreted=True) is not None,
    reason="`make kernels` has not been called",
)


def by_hand(query, keys, values, assign, positions, key_heads):
    """Per request, query and head, row by row, in float64."""
    batch, q_time, _, head_dim = query.shape
    heads = assign.shape[1]
    y = np.zeros((batch, q_time, heads, head_dim))
    for b, i, h in np.ndindex(batch, q_time, heads):
        cluster = assign[b, h]
        rows = range(min(positions[b, i] + 1, keys.shape[1]))
        weights = [
            np.exp(
                query[b, i, cluster] @ keys[b, t, key_heads[b, cluster]] / head_dim**0.5
            )
            for t in rows
        ]
        kv_head = h * values.shape[2] // heads
        for t in rows:
            y[b, i, h] += weights[t] / sum(weights) * values[b, t, kv_head]
    return y


def case(
    heads, clusters, time, *, q_time=1, batch=3, head_dim=16, kv=None, shared=None
):
    """Arrays of unit variance, another membership for each request, ragged lengths."""
    rng = np.random.default_rng(heads + clusters + time)
    assign = np.concatenate(
        [
            np.tile(np.arange(clusters), (batch, 1)),
            rng.integers(0, clusters, (batch, heads - clusters)),
        ],
        axis=1,
    )
    assign = rng.permuted(assign, axis=1)
    positions = rng.integers(0, time, (batch, q_time))
    # A query at each end of the cache.
    positions[0, 0], positions[-1, -1] = time - 1, 0
    key_heads = np.tile(np.arange(clusters), (batch, 1))
    if shared:
        key_heads = rng.integers(0, shared, (batch, clusters))
    return (
        rng.normal(size=(batch, q_time, clusters, head_dim)),
        rng.normal(size=(batch, time, shared or clusters, head_dim)),
        rng.normal(size=(batch, time, kv or heads, head_dim)),
        assign,
        positions,
        key_heads,
    )


def arrays(arguments, dtype="float32"):
    *floats, assign, positions, key_heads = arguments
    floats = [jnp.asarray(each, dtype) for each in floats]
    integers = [jnp.asarray(each, jnp.int32) for each in (assign, positions)]
    return (*floats, *integers), jnp.asarray(key_heads, jnp.int32)


@pytest.mark.quick("9-9-options1")
@pytest.mark.acceptance("chai", 2)
@pytest.mark.parametrize(
    ("heads", "clusters", "options"),
    [
        (9, 4, {}),
        (9, 9, {"q_time": 5}),
        (6, 1, {"q_time": 3}),
        (6, 4, {"kv": 3, "q_time": 2}),
        (6, 5, {"kv": 2, "shared": 2}),
    ],
)
def test_the_reference_is_the_loop(heads, clusters, options):
    given = case(heads, clusters, 11, **options)
    found, key_heads = arrays(given)
    shared = {"key_heads": key_heads} if "shared" in options else {}
    y = kernels.clustered_attention(*found, **shared)
    np.testing.assert_allclose(y, by_hand(*given), rtol=0, atol=1e-5)


BLOCKS = [
    (9, 4, 11, {}),
    (9, 9, 12, {"q_time": 5}),
    (6, 1, 13, {"q_time": 3}),
    (6, 4, 4, {"kv": 3, "q_time": 2}),
    (6, 5, 3, {"kv": 2, "shared": 2}),
    (6, 5, 17, {"kv": 2, "shared": 2, "q_time": 7}),
]


@pytest.mark.quick("9-4-11-options0")
@pytest.mark.acceptance("chai", 2)
@pytest.mark.parametrize(("heads", "clusters", "time", "options"), BLOCKS)
def test_blocks_are_the_loop(heads, clusters, time, options):
    """Rooms that are no multiple of the block, one block, and less than one."""
    given = case(heads, clusters, time, **options)
    found, key_heads = arrays(given)
    y = blocked.clustered_attention(*found, key_heads=key_heads, blocks=(2, 4))
    np.testing.assert_allclose(y, by_hand(*given), rtol=0, atol=1e-5)


def test_blocks_that_no_query_sees_are_not_read():
    (query, keys, values, assign, _), _ = arrays(case(6, 4, 16, q_time=3))
    positions = jnp.array([[0, 5, 2], [1, 1, 1], [3, -1, 0]])
    # Behind the longest text, at position 5, two blocks of four are there, and no more.
    hidden = jnp.arange(16)[:, None, None] >= 8
    poisoned = jnp.where(hidden, jnp.nan, keys), jnp.where(hidden, jnp.nan, values)
    options = {"blocks": (2, 4)}
    y = blocked.clustered_attention(query, *poisoned, assign, positions, **options)
    expected = reference.clustered_attention(query, keys, values, assign, positions)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
    assert not np.any(np.asarray(y[2, 1])), "a query in front of all keys sees none"


@pytest.mark.quick("reference")
@pytest.mark.parametrize("implementation", ["blocked", "reference"])
def test_one_of_several_layers(implementation):
    (query, keys, values, assign, positions), _ = arrays(case(6, 4, 9))
    stacks = (jnp.stack([0 * keys, keys]), jnp.stack([0 * values, values]))
    y = kernels.clustered_attention(
        query,
        *stacks,
        assign,
        positions,
        layer=jnp.int32(1),
        implementation=implementation,
    )
    expected = reference.clustered_attention(query, keys, values, assign, positions)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.quick("blocks1")
@pytest.mark.parametrize("blocks", [(2, 4), (256, 128)])
def test_scores_that_fall_with_the_distance(blocks):
    """Against JAX's own attention with a bias, over one block and over several."""
    rng = np.random.default_rng(0)
    query, keys, values = (
        jnp.asarray(rng.normal(size=(2, 11, heads, 8)), jnp.float32)
        for heads in (6, 2, 2)
    )
    slopes = jnp.asarray(rng.uniform(size=6), jnp.float32)
    # The last five queries, at other places in each request.
    at = jnp.array([[6], [2]]) + jnp.arange(5)
    new = jnp.take_along_axis(query, at[..., None, None], axis=1)
    y = blocked.clustered_attention(
        new, keys, values, None, at, slopes=slopes, blocks=blocks
    )
    places = jnp.arange(11)
    bias = slopes[:, None, None] * (places - places[:, None])
    whole = jax.nn.dot_product_attention(
        query, keys, values, bias[None], is_causal=True
    )
    expected = jnp.take_along_axis(whole, at[..., None, None], axis=1)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.quick("6-2-bfloat16", "4-1-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (4, 1)])
def test_attention_of_all_heads_to_a_cache(heads, kv_heads, dtype):
    """Against JAX's own, over more than one block of keys and of queries."""
    rng = np.random.default_rng(heads)
    time = 300
    query, keys, values = (
        jnp.asarray(rng.normal(size=(2, time, count, 8)), dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    positions = jnp.broadcast_to(jnp.arange(time), (2, time))
    y = kernels.cached_attention(query, keys, values, positions)
    plain = jax.nn.dot_product_attention(
        *(each.astype(jnp.float32) for each in (query, keys, values)), is_causal=True
    )
    assert y.dtype == dtype
    bar = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    np.testing.assert_allclose(y.astype(jnp.float32), plain, rtol=0, atol=bar)
    with pytest.raises(ConfigError, match="kv_heads must divide heads: got kv_heads=5"):
        kernels.cached_attention(query, *2 * [jnp.ones((2, 5, 5, 8))], positions)


@pytest.mark.slow
def test_clusters_of_one_head_are_plain_attention():
    (query, keys, values, *_), _ = arrays(case(6, 6, 8, q_time=8))
    assign = jnp.broadcast_to(jnp.arange(6), (3, 6))
    positions = jnp.broadcast_to(jnp.arange(8), (3, 8))
    y = kernels.clustered_attention(query, keys, values, assign, positions)
    plain = jax.nn.dot_product_attention(query, keys, values, is_causal=True)
    np.testing.assert_allclose(y, plain, rtol=0, atol=1e-5)


TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}


@pytest.mark.quick("1-9-bfloat16")
@needs_triton
@pytest.mark.acceptance("chai", 7)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [9, 32])
@pytest.mark.parametrize("clusters", [1, 4, "all"])
def test_the_kernel_is_the_reference(monkeypatch, heads, clusters, dtype):
    monkeypatch.setattr(launch, "BLOCK", 16)
    clusters = heads if clusters == "all" else clusters
    given, _ = arrays(case(heads, clusters, 45), dtype)
    expected = reference.clustered_attention(*given, dtype="float32")
    y = interpreted(*given, dtype="float32")
    assert y.shape == (3, 1, heads, 16)
    np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.quick("16")
@needs_triton
@pytest.mark.parametrize("time", [1, 16, 17])
def test_the_kernel_with_shared_heads_and_odd_widths(monkeypatch, time):
    monkeypatch.setattr(launch, "BLOCK", 16)
    given, key_heads = arrays(case(6, 4, time, kv=2, shared=2, head_dim=24))
    options = {"key_heads": key_heads, "dtype": "float32"}
    expected = reference.clustered_attention(*given, **options)
    y = interpreted(*given, **options)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.quick("reference")
@pytest.mark.parametrize(
    "attend",
    [
        reference.clustered_attention,
        pytest.param(interpreted, marks=needs_triton),
    ],
    ids=["reference", "interpreted"],
)
def test_what_is_not_seen_does_not_count(monkeypatch, attend):
    monkeypatch.setattr(launch, "BLOCK", 4)
    (query, keys, values, assign, _), _ = arrays(case(5, 2, 12))
    positions = jnp.array([[-1], [5], [40]])
    y = attend(query, keys, values, assign, positions)
    np.testing.assert_array_equal(y[0], 0)
    unseen = jnp.arange(12)[None, :, None, None] > positions[:, :, None, None]
    keys, values = (jnp.where(unseen, 1e30, each) for each in (keys, values))
    again = attend(query, keys, values, assign, positions)
    np.testing.assert_array_equal(again, y)
    # A position behind the cache sees all of it.
    whole = attend(query, keys, values, assign, jnp.full((3, 1), 11))
    np.testing.assert_allclose(y[2], whole[2], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_result_has_the_dtype_asked_for():
    given, _ = arrays(case(4, 2, 5), "bfloat16")
    assert kernels.clustered_attention(*given).dtype == jnp.bfloat16
    y = kernels.clustered_attention(*given, dtype=jnp.float32)
    assert y.dtype == jnp.float32


def test_the_kernel_is_in_a_program_for_cuda(lowering):
    given, _ = arrays(case(9, 9, 300, head_dim=80), "bfloat16")
    attend = functools.partial(kernels.clustered_attention, implementation="triton")
    assert lowering.kernels(attend, *given) == ["attend"]


@pytest.mark.slow
def test_the_next_heads_values_are_loaded_while_one_is_added(machine_code):
    sizes = launch.Sizes(16, 8192, 4, 32, 4, 32, 128)
    arrays = [jax.ShapeDtypeStruct((1,), dtype) for dtype in ["int32"] * 4]
    arrays += [jax.ShapeDtypeStruct((1,), "bfloat16")] * 3
    (found,) = machine_code(functools.partial(kernels.run, launch.plan(sizes)), *arrays)
    assert not found.spilled
    (loop,) = found.inner_loops
    # Copies to shared memory that nothing waits for, a tile's in each turn.
    size = launch.BLOCK * sizes.head_dim * 2 // (16 * found.threads)
    assert loop.count("LDGSTS.E.BYPASS.128") == size


def test_bad_input_is_refused():
    given, _ = arrays(case(6, 4, 8, q_time=2))
    query, keys, values, assign, positions = given
    with pytest.raises(UnsupportedOp, match="one query: got 2"):
        kernels.clustered_attention(*given, implementation="triton")
    with pytest.raises(ConfigError, match="did you mean 'triton'"):
        kernels.clustered_attention(*given, implementation="tritom")
    with pytest.raises(ConfigError, match="kv_heads=5, heads=6"):
        kernels.clustered_attention(query, keys, values[:, :, :5], assign, positions)
    with pytest.raises(ConfigError, match="3 heads, 4 clusters"):
        kernels.clustered_attention(query, keys[:, :, :3], values, assign, positions)
