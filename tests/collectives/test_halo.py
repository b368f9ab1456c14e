"""Halos against numpy: the rule without a device, and what arrives on eight of them."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import sharding
from hpcjax.collectives import halo
from hpcjax.core import ConfigError

RNG = np.random.default_rng(0)


def test_a_block_with_its_halo_gives_the_outputs_of_the_whole():
    seen = dict.fromkeys(("strided", "even", "negative", "hops", "uneven"), 0)
    for _ in range(800):
        size, blocks, kernel = RNG.integers((1, 1, 1), (30, 9, 8))
        stride, apart, low, high = RNG.integers((1, 1, 0, 0), (4, 3, *[kernel + 1] * 2))
        x, w = RNG.integers(-9, 9, size), RNG.integers(-9, 9, kernel)
        padded, reach = np.pad(x, (low, high)), (kernel - 1) * apart + 1
        starts = range(0, len(padded) - reach + 1, stride)
        whole = [padded[s : s + reach : apart] @ w for s in starts]
        inside = -(-size // blocks)
        widths = halo.halo_widths(size, blocks, kernel, stride, (low, high), apart)
        found, far = [], np.pad(x, 99)
        for rank, (lo, hi) in enumerate(widths):
            own = far[99 + rank * inside - lo : 99 + (rank + 1) * inside + hi]
            starts = range(0, len(own) - reach + 1, stride)
            found += [own[s : s + reach : apart] @ w for s in starts]
        assert found == whole
        seen["strided"] += stride > 1
        seen["even"] += kernel % 2 == 0
        seen["negative"] += min(map(min, widths)) < 0
        seen["hops"] += max(map(max, widths)) > inside
        seen["uneven"] += bool(size % blocks or len(whole) % blocks)
    assert min(seen.values()) > 40


def widen(x, widths, boundary, fill):
    """Blocks of eight, two along each axis, with what is around them."""
    mode = {"mode": "wrap"} if boundary == "periodic" else {"constant_values": fill}
    far, blocks = np.pad(x, [(0, 0), *[(20, 20)] * 3, (0, 0)], **mode), []
    for place in np.ndindex(2, 2, 2):
        cut = [
            slice(20 + at * size // 2 - lo, 20 + (at + 1) * size // 2 + hi)
            for at, size, (lo, hi) in zip(place, x.shape[1:4], widths, strict=True)
        ]
        blocks.append(far[(slice(None), *cut)])
    return blocks


@pytest.mark.acceptance("hybrid3dcnn", 2)
def test_corners_and_far_blocks_arrive():
    x = RNG.normal(size=(1, 6, 4, 2, 1)).astype("f4")
    cases = [
        ([(1, 1), (1, 1), (1, 1)], "zero", 0),
        ([(2, 0), (0, 2), (1, 0)], "zero", -np.inf),
        ([(5, -1), (-1, 3), (3, 3)], "zero", 7.0),
        ([(1, 2), (2, 1), (1, 1)], "periodic", 0),
        ([(-2, 5), (7, 0), (4, 3)], "periodic", 0),
        ([(-4, 6), (6, -4), (3, -2)], "zero", 7.0),
    ]
    cut = P(None, *sharding.SPACE_AXES)

    def exchange(x):
        return [
            halo.exchange_halos(x, widths, sharding.SPACE_AXES, boundary, fill)
            for widths, boundary, fill in cases
        ]

    # A mesh whose axes are in another order numbers its devices by that.
    mesh = sharding.make_mesh({"space_w": 2, "space_d": 2, "space_h": 2})
    mapped = jax.shard_map(exchange, mesh=mesh, in_specs=cut, out_specs=[cut] * 6)
    for found, case in zip(jax.jit(mapped)(x), cases, strict=True):
        blocks = [
            each
            for half in np.split(np.asarray(found), 2, 1)
            for quarter in np.split(half, 2, 2)
            for each in np.split(quarter, 2, 3)
        ]
        for own, wanted in zip(blocks, widen(x, *case), strict=True):
            np.testing.assert_array_equal(own, wanted)


def test_what_is_not_cut_is_padded_and_an_unknown_boundary_is_refused():
    x = np.arange(3.0).reshape(1, 3, 1)
    around = halo.exchange_halos(x, [(1, 4)], (None,), "periodic")
    assert around[0, :, 0].tolist() == [2, 0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ConfigError, match="boundary must be one of"):
        halo.exchange_halos(x, [(1, 1)], (None,), "zeros")
    with pytest.raises(ConfigError, match="must leave points"):
        halo.exchange_halos(x, [(0, -4)], (None,))
    with pytest.raises(ConfigError, match="call it inside"):
        halo.exchange_halos(x, [(1, 1)], ("space_d",))
