"""Dense gradients in buckets: the same means, and the collectives of the formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import collectives, optim, perf, sharding
from hpcjax.collectives import DenseConfig
from hpcjax.core import ConfigError, per_device
from tests.collectives.exchanges import on_hosts

DEVICES = 8
SHAPES = {
    "blocks": {"bias": (3, 4), "kernel": (3, 4, 4)},
    "empty": (0, 2),
    "head": {"bias": (5,), "kernel": (4, 5)},
    "scale": (),
}
# Words from the last array to the first: 1, 20, 5, 48, 12.
IN_BUCKETS = {1: 5, 100: 4, 104: 3, 240: 2, 10**6: 1}


def gradients(dtype=jnp.float32):
    """A gradient of each device, one above the other."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=(DEVICES, *shape)), dtype),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def compiled(tx, given):
    """The mean over devices, compiled, and the state that it begins with."""
    mesh = sharding.data_mesh(DEVICES)
    state = per_device.expand(tx.init(jax.tree.map(lambda g: g[0], given)), mesh)
    specs = per_device.specs(state)

    def body(given, state):
        mine = jax.tree.map(lambda g: 2 * g[0], given)
        mean, state = tx.update(mine, per_device.enter(state))
        return mean, per_device.leave(state)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    return jax.jit(mapped).lower(given, state).compile(), state


def all_reduces(program):
    return [c for c in perf.collectives(program) if c.kind == "all-reduce"]


def by_hand(words, limit):
    """How many buckets next-fit needs for arrays of so many float32 words."""
    count, free = 0, -1
    for size in words:
        if 4 * size > free:
            count, free = count + 1, limit
        free -= 4 * size
    return count


@functools.cache
def whole():
    program, state = compiled(optim.all_reduce_mean("data"), gradients())
    assert len(all_reduces(program)) == 1
    return program(gradients(), state)[0]


@pytest.mark.quick("1000000", "104", "240")
@pytest.mark.parametrize("limit", IN_BUCKETS)
def test_a_bucket_is_an_all_reduce_and_the_mean_is_the_same(limit):
    tx = optim.all_reduce_mean("data", bucket_bytes=limit)
    program, state = compiled(tx, gradients())
    found = all_reduces(program)
    assert len(found) == IN_BUCKETS[limit] == by_hand((1, 20, 5, 48, 12), limit)
    assert sum(c.total for c in found) == 4 * 86
    mean = program(gradients(), state)[0]
    for one, other in zip(jax.tree.leaves(mean), jax.tree.leaves(whole()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        assert one.dtype == other.dtype


def test_a_bucket_has_one_dtype_and_numbers_that_are_not_finite_stay_in_theirs():
    given = gradients()
    given["head"] = gradients(jnp.float16)["head"]
    given["scale"] = jnp.full((DEVICES,), jnp.inf)
    tx = optim.all_reduce_mean("data", bucket_bytes=4 * 48)
    program, state = compiled(tx, given)
    # Of float16 the head, of float32 the scale, the kernel and the bias of blocks.
    found = {c.total for c in all_reduces(program)}
    assert found == {2 * 25, 4 * 1, 4 * 48, 4 * 12}
    mean = program(given, state)[0]
    assert mean["head"]["kernel"].dtype == jnp.float16
    assert np.isinf(mean["scale"])
    for name in ("blocks", "head"):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(mean[name]))


@pytest.mark.parametrize("limit", [100, 240])
def test_the_dense_exchange_sends_what_it_says(limit):
    config = DenseConfig(bucket_bytes=limit)
    program, state = compiled(optim.exchange_gradients(config, "data"), gradients())
    transfers = config.make().transfers(whole(), DEVICES)
    assert len(transfers) == IN_BUCKETS[limit]
    # Two more: whether all is finite, and the counts.
    found = all_reduces(program)
    sizes = sorted(c.total for c in found if c.total > 12)
    stated = sorted(4 * t.words * DEVICES / (2 * (DEVICES - 1)) for t in transfers)
    np.testing.assert_allclose(sizes, [size for size in stated if size > 12])
    mean, state = program(gradients(), state)
    for one, other in zip(jax.tree.leaves(mean), jax.tree.leaves(whole()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert float(state.metrics["sent_words"]) == int(2 * 86 * 7 / 8)


def test_processes_send_buckets_too():
    given = np.random.default_rng(0).normal(size=(2, 3, 40)).astype(np.float32)
    for step, vectors in zip(
        on_hosts(DenseConfig(bucket_bytes=8), given), given, strict=True
    ):
        np.testing.assert_allclose(step.mean, vectors.mean(0), rtol=1e-5, atol=1e-6)


def test_impossible_options_are_refused():
    for wrong in (0, -1, 2.5):
        with pytest.raises((ConfigError, TypeError), match="bucket_bytes"):
            optim.all_reduce_mean("data", bucket_bytes=wrong)
    with pytest.raises(ConfigError, match="bucket_bytes"):
        DenseConfig(bucket_bytes=0)
    with pytest.raises(ConfigError, match="each by itself"):
        DenseConfig(bucket_bytes=8, by_leaf=True)
    tx = optim.all_reduce_mean("data")
    with pytest.raises(ConfigError, match="all_reduce_mean communicates over"):
        tx.update(whole(), optax.EmptyState())


def test_the_last_layers_are_sent_first():
    leaves = jax.tree.leaves(whole())
    assert collectives.fill_buckets(leaves, 100) == [[5, 4], [3], [1], [0]]
