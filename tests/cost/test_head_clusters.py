"""Bytes and operations of clustered heads: published lists, and by counting arrays."""

import numpy as np
import pytest

from hpcjax import cost
from hpcjax.core import ConfigError

SEVEN = (32,) * 18 + (4,) * 14
DEFAULT = (28,) * 3 + (18,) * 12 + (8,) * 2 + (4,) * 15
THIRTY_THREE = (48,) * 18 + (36,) * 8 + (24,) * 6 + (8,) * 2 + (6,) * 26


def counted(batch, tokens, head_dim, pairs):
    """Bytes of float16 arrays of (key, value) heads."""
    return sum(
        np.empty((batch, tokens, heads, head_dim), np.float16).nbytes
        for pair in pairs
        for heads in pair
    )


@pytest.mark.parametrize(
    ("clusters", "heads", "total", "percent"),
    [
        (SEVEN, 32, 632, 19.14),
        (THIRTY_THREE, 52, 1468, 26.47),
        (DEFAULT, 32, 376, 31.64),
    ],
)
def test_the_published_lists(clusters, heads, total, percent):
    assert sum(clusters) == total
    layers = cost.ClusteredHeads(clusters=clusters, heads=heads, head_dim=8)
    assert 100 * layers.saving() == pytest.approx(percent, abs=0.005)
    found = layers.kv_cache_bytes(batch=2, tokens=16, itemsize=2)
    assert found == counted(2, 16, 8, [(k, heads) for k in clusters])
    dense = layers.dense_cache_bytes(batch=2, tokens=16, itemsize=2)
    assert dense == counted(2, 16, 8, [(heads, heads) for _ in clusters])
    assert 1 - found / dense == pytest.approx(layers.saving(), rel=1e-12)


def test_a_model_of_known_size():
    layers = cost.ClusteredHeads(clusters=(32,) * 32, heads=32, head_dim=128)
    assert layers.kv_cache_bytes(1, 2048, 2) == 2 * 32 * 4096 * 2048 * 2
    assert layers.saving() == 0


MODES = {
    # Key and value heads of layers of 9, 6 and 3 clusters; 9 heads share 3.
    "within_group": [(3, 3)] * 3,
    "cross_group": [(3, 3), (3, 3), (3, 3)],
    "expand": [(9, 9), (6, 9), (3, 9)],
}


@pytest.mark.parametrize("mode", MODES)
def test_shared_keys(mode):
    layers = cost.ClusteredHeads(
        clusters=(9, 6, 3), heads=9, head_dim=4, kv_heads=3, mode=mode
    )
    assert layers.kv_cache_bytes(2, 5, 2) == counted(2, 5, 4, MODES[mode])
    repeated = 9 if mode == "expand" else 3
    assert layers.dense_cache_bytes(2, 5, 2) == counted(2, 5, 4, [(repeated,) * 2] * 3)
    # Operations shrink in every mode: a row for each cluster, values for each head.
    assert layers.attention_flops(10) == sum(2 * 10 * 4 * (k + 9) for k in (9, 6, 3))
    assert layers.dense_attention_flops(10) == 3 * 4 * 10 * 4 * 9


def test_key_heads_of_a_request():
    layers = cost.ClusteredHeads(
        clusters=(6, 2), heads=9, head_dim=4, kv_heads=3, mode="cross_group"
    )
    assert layers.key_heads() == (3, 2)
    assert layers.kv_cache_bytes(2, 5, 2) == counted(2, 5, 4, [(3, 3), (2, 3)])
    assert layers.kv_cache_bytes(2, 5, 2, (2, 1)) == counted(2, 5, 4, [(2, 3), (1, 3)])
    assert layers.saving((2, 1)) == pytest.approx((1 - 3 / 6) / 2)
    with pytest.raises(ConfigError, match=r"layer 1: used must be in \[1, 2\]: got 3"):
        layers.saving((2, 3))
    with pytest.raises(ConfigError, match="1 for 2 layers"):
        layers.saving((2,))


def test_operations_with_and_without_clusters():
    layers = cost.ClusteredHeads(clusters=(4, 4), heads=32, head_dim=128)
    flops = layers.dense_attention_flops(8192) / layers.attention_flops(8192)
    assert flops == pytest.approx(2 * 32 / 36)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"clusters": (4, 0)}, "layer 1: clusters must be in"),
        ({"clusters": (10, 4)}, "layer 0: clusters must be in"),
        ({"clusters": ()}, "at least one layer"),
        ({"kv_heads": 4, "mode": "expand"}, "kv_heads=4, heads=9"),
        ({"kv_heads": 3}, "mode=None, kv_heads=3"),
        ({"mode": "expand"}, "mode='expand', kv_heads=9"),
        ({"kv_heads": 3, "mode": "expnd"}, "did you mean 'expand'"),
        ({"kv_heads": 3, "mode": "within_group"}, "layer 0: .* multiple of 3"),
    ],
)
def test_what_does_not_fit_is_refused(changed, message):
    given = {"clusters": (4, 5), "heads": 9, "head_dim": 4} | changed
    with pytest.raises(ConfigError, match=message):
        cost.ClusteredHeads(**given)
