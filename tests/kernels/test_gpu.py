"""Every kernel on a real GPU against numpy or the reference, at sizes that are used.

`hpcjax bench --tier gpu` runs these before it measures anything.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import kernels
from tests.kernels.test_quantized_matmul import BITS, BOUND, error, problem

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def _on_a_gpu():
    assert jax.default_backend() == "gpu", "no GPU here"


@pytest.mark.parametrize("dtype", list(BOUND))
@pytest.mark.parametrize("rows", [1, 5, 16, 64])
@pytest.mark.parametrize("bits", BITS)
def test_quantized_products(bits, rows, dtype):
    for inputs, outputs, group in ((4096, 4096, 128), (1024, 1000, None)):
        matrix, x, weights = problem(
            bits, inputs, outputs, group, rows=rows, dtype=dtype
        )
        y = jax.jit(
            lambda x, matrix: kernels.quantized_matmul(
                x, matrix, implementation="triton", output="float32"
            )
        )(x, matrix)
        assert error(y, x, weights) <= BOUND[dtype]


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
@pytest.mark.parametrize("size", [1000, 1_000_003])
def test_selection_above_a_threshold(size, share):
    x = np.random.default_rng(size).normal(size=size).astype(np.float32)
    x[:: size // 10] = 0
    count = int(share * size)
    k = max(1, count)
    threshold = kernels.kth_magnitude(kernels.magnitudes(jnp.asarray(x)), k)
    made, wanted = (
        kernels.select_above(jnp.asarray(x), threshold, k, implementation=name)
        for name in ("triton", "reference")
    )
    for ours, theirs in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("heads", "clusters"), [(32, 4), (32, 32), (12, 5)])
def test_clustered_attention_of_one_token(heads, clusters, dtype):
    rng = np.random.default_rng(heads + clusters)
    batch, time, size = 2, 1111, 128

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    assign = np.concatenate(
        [np.arange(clusters), rng.integers(0, clusters, heads - clusters)]
    )
    given = (
        draw(batch, 1, clusters, size),
        draw(batch, time, clusters, size),
        draw(batch, time, heads, size),
        jnp.asarray(np.tile(assign, (batch, 1)), jnp.int32),
        jnp.asarray([[time - 1], [time // 3]], jnp.int32),
    )
    made, wanted = (
        kernels.clustered_attention(*given, implementation=name, dtype="float32")
        for name in ("triton", "reference")
    )
    np.testing.assert_allclose(made, wanted, atol=2e-5 if dtype == "float32" else 5e-3)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 1.0])
def test_masks_are_counted_and_listed(share):
    mask = np.random.default_rng(0).random(1_000_003) < share
    indices, total = kernels.nonzero(jnp.asarray(mask), 1000)
    (wanted,) = np.nonzero(mask)
    assert int(total) == int(kernels.count(jnp.asarray(mask))) == len(wanted)
    held = min(1000, len(wanted))
    np.testing.assert_array_equal(indices[:held], wanted[:1000])
    assert (np.asarray(indices[held:]) == mask.size).all()


@pytest.mark.parametrize("time", [1, 100])
def test_attention_with_a_cache(time):
    rng = np.random.default_rng(time)
    heads, kv_heads, size, room = 8, 2, 64, 3000
    query = rng.standard_normal((2, time, heads, size), np.float32)
    keys, values = rng.standard_normal((2, 2, room, kv_heads, size), np.float32)
    positions = np.stack([np.arange(time) + 900, np.arange(time) + 40])
    made = kernels.cached_attention(*map(jnp.asarray, (query, keys, values, positions)))
    wide = np.repeat(keys.astype(np.float64), heads // kv_heads, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", query, wide) / np.sqrt(size)
    seen = np.arange(room) <= positions[:, None, :, None]
    weights = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    wanted = np.einsum(
        "bhqk,bkhd->bqhd", weights, np.repeat(values, heads // kv_heads, axis=2)
    )
    np.testing.assert_allclose(made, wanted, atol=2e-3)
