"""Clustered attention: loops in numpy, the kernel interpreted, and lowered for CUDA."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import kernels
from hpcjax.core import ConfigError, UnsupportedOp
from tests.kernels import cuda_export

pallas = importlib.import_module("hpcjax.kernels._clustered_attention.pallas")
reference = importlib.import_module("hpcjax.kernels._clustered_attention.reference")


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


def test_clusters_of_one_head_are_plain_attention():
    (query, keys, values, *_), _ = arrays(case(6, 6, 8, q_time=8))
    assign = jnp.broadcast_to(jnp.arange(6), (3, 6))
    positions = jnp.broadcast_to(jnp.arange(8), (3, 8))
    y = kernels.clustered_attention(query, keys, values, assign, positions)
    plain = jax.nn.dot_product_attention(query, keys, values, is_causal=True)
    np.testing.assert_allclose(y, plain, rtol=0, atol=1e-5)


TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3}


@pytest.mark.acceptance("chai", 7)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [9, 32])
@pytest.mark.parametrize("clusters", [1, 4, "all"])
def test_the_kernel_is_the_reference(heads, clusters, dtype):
    clusters = heads if clusters == "all" else clusters
    given, _ = arrays(case(heads, clusters, 45), dtype)
    expected = reference.clustered_attention(*given, dtype="float32")
    y = pallas.clustered_attention(*given, dtype="float32", block=16, interpret=True)
    assert y.shape == (3, 1, heads, 16)
    np.testing.assert_allclose(y, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("time", [1, 16, 17])
def test_the_kernel_with_shared_heads_and_odd_widths(time):
    given, key_heads = arrays(case(6, 4, time, kv=2, shared=2, head_dim=24))
    options = {"key_heads": key_heads, "dtype": "float32"}
    expected = reference.clustered_attention(*given, **options)
    y = pallas.clustered_attention(*given, **options, block=16, interpret=True)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "attend",
    [
        reference.clustered_attention,
        functools.partial(pallas.clustered_attention, block=4, interpret=True),
    ],
    ids=["reference", "pallas"],
)
def test_what_is_not_seen_does_not_count(attend):
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


def test_the_result_has_the_dtype_asked_for():
    given, _ = arrays(case(4, 2, 5), "bfloat16")
    assert kernels.clustered_attention(*given).dtype == jnp.bfloat16
    y = kernels.clustered_attention(*given, dtype=jnp.float32)
    assert y.dtype == jnp.float32


@pytest.mark.parametrize(("heads", "clusters", "head_dim"), [(32, 4, 128), (9, 9, 80)])
def test_the_kernel_lowers_for_cuda(heads, clusters, head_dim):
    given, _ = arrays(case(heads, clusters, 300, head_dim=head_dim), "bfloat16")
    text = cuda_export.lowered(
        functools.partial(kernels.clustered_attention, implementation="pallas"), *given
    )
    assert cuda_export.kernels(text) == ["clustered_attention"]


def test_bad_input_is_refused():
    given, _ = arrays(case(6, 4, 8, q_time=2))
    query, keys, values, assign, positions = given
    with pytest.raises(UnsupportedOp, match="one query: got 2"):
        kernels.clustered_attention(*given, implementation="pallas")
    with pytest.raises(ConfigError, match="did you mean 'pallas'"):
        kernels.clustered_attention(*given, implementation="palas")
    with pytest.raises(ConfigError, match="kv_heads=5, heads=6"):
        kernels.clustered_attention(query, keys, values[:, :, :5], assign, positions)
    with pytest.raises(ConfigError, match="3 heads, 4 clusters"):
        kernels.clustered_attention(query, keys[:, :, :3], values, assign, positions)
    with pytest.raises(ValueError, match="block=12"):
        pallas.clustered_attention(
            query[:, :1], *given[1:4], positions[:, :1], block=12
        )
