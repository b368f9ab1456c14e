"""Compressed values and the dense parameters they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import perf, sharding
from hpcjax.core.errors import ConfigError
from hpcjax.optim import sparse_state

SHAPES = {1: (11,), 2: (4, 6), 3: (3, 4, 5), 4: (2, 3, 4, 2)}


def draw(shape, share=0.4, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < share
    mask.flat[0] = True
    return rng.normal(size=shape).astype(np.float32), mask


@pytest.mark.quick("1-int32", "2-int32", "3-int32")
@pytest.mark.acceptance("samo", 7)
@pytest.mark.parametrize("index", ["int32", "bitmap"])
@pytest.mark.parametrize("axes", SHAPES)
def test_values_come_back_where_they_were(axes, index):
    dense, mask = draw(SHAPES[axes])
    at = sparse_state.locate("w", mask, index=index)
    values = at.gather(jnp.asarray(dense))
    np.testing.assert_array_equal(values, dense[mask])
    np.testing.assert_array_equal(at.expand(values), dense * mask)
    assert at.places.dtype == ("uint8" if index == "bitmap" else "int32")


@pytest.mark.acceptance("samo", 7)
@pytest.mark.parametrize("index", ["int32", "bitmap"])
def test_empty_and_full_masks(index):
    dense, _ = draw((4, 6))
    masks = {"empty": np.zeros((4, 6), bool), "full": np.ones((4, 6), bool)}
    params = dict.fromkeys(masks, jnp.asarray(dense))
    with pytest.raises(ConfigError, match="mask of empty must keep a value"):
        sparse_state.compress(params, masks, index=index)
    made = sparse_state.compress(params, masks, index=index, allow_empty=True)
    back = sparse_state.to_dense(made)
    assert made.master["empty"].shape == (0,)
    np.testing.assert_array_equal(back["empty"], 0)
    np.testing.assert_array_equal(back["full"], dense)


@pytest.mark.parametrize("index", ["int32", "bitmap"])
def test_layers_of_a_stack_may_keep_different_numbers(index):
    dense, mask = draw((3, 4, 5))
    mask[1] = False
    mask[1, 2, 3] = True
    at = sparse_state.locate("w", mask, index=index, stacked=True)
    values = at.gather(jnp.asarray(dense))
    most = mask.sum((1, 2)).max()
    assert values.shape == (3, most)
    for layer in range(3):
        kept = dense[layer][mask[layer]]
        np.testing.assert_array_equal(values[layer, : kept.size], kept)
        np.testing.assert_array_equal(values[layer, kept.size :], 0)
    np.testing.assert_array_equal(at.expand(values), dense * mask)
    # What is in the places behind the end is never seen.
    np.testing.assert_array_equal(
        at.expand(jnp.where(values == 0, 7, values)), dense * mask
    )
    # In the body of a scan over the stack the same object stands for one layer.
    _, each = jax.lax.scan(lambda c, p: (c, p[0].expand(p[1])), 0, (at, values))
    np.testing.assert_array_equal(each, dense * mask)


@pytest.mark.acceptance("samo", 7)
def test_shards_that_are_not_contiguous_stay_where_they_are():
    mesh = sharding.make_mesh({"x": 2, "y": 4})
    dense, mask = draw((3, 4, 8))
    placed = jax.device_put(dense, NamedSharding(mesh, P(None, "x", "y")))
    made = sparse_state.compress({"w": placed}, {"w": mask}, stacked=("w",))
    node = made.params["w"]
    assert node.positions.lead == (3, 8)
    assert node.positions.block == (2, 2)
    np.testing.assert_array_equal(sparse_state.to_dense(made)["w"], dense * mask)
    # Each device holds the values of its own shard: here of the second along x, the
    # third along y.
    sixth = next(
        s for s in made.master["w"].addressable_shards if s.index[1].start == 6
    )
    own = mask[:, 2:4, 4:6].reshape(3, -1)
    for layer in range(3):
        expected = dense[layer, 2:4, 4:6].reshape(-1)[own[layer]]
        np.testing.assert_array_equal(sixth.data[layer, 0, : expected.size], expected)

    def step(node, values):
        return node.positions.expand(values), node.positions.gather(node.weights)

    compiled = jax.jit(step).lower(node, made.master["w"]).compile()
    assert not perf.collectives(compiled)
    assert compiled.output_shardings[0].shard_shape((3, 4, 8)) == (3, 2, 2)


def test_a_part_that_int32_cannot_number_is_refused_before_it_is_read():
    huge = np.broadcast_to(np.True_, (2**16, 2**15))
    with pytest.raises(ConfigError, match=r"experts/kernel.*2\*\*31"):
        sparse_state.locate("experts/kernel", huge)


@pytest.mark.parametrize("index", ["int32", "bitmap"])
def test_positions_behind_the_end_of_a_part_are_all_different(index):
    mask = np.arange(12).reshape(3, 4) > [[9], [2], [8]]  # 0, 4 and 3 are kept
    at = sparse_state.locate("w", mask, index=index, stacked=True)
    # Scatters are told that no position occurs twice, and that they rise.
    found = np.asarray(at.indices())
    assert found[1].tolist() == [0, 1, 2, 3]
    assert found[2, :3].tolist() == [1, 2, 3]
    assert np.all(np.diff(found) > 0)
    assert found[0].min() >= 4 <= found[2, 3]


def test_a_mask_of_numbers_or_of_an_unknown_count_is_refused():
    with pytest.raises(
        ConfigError, match="the mask of w must be bool: got dtype='int32'"
    ):
        sparse_state.locate("w", np.array([2, 0, 2]))
    with pytest.raises(ConfigError, match="w: a traced mask needs the number"):
        jax.jit(lambda mask: sparse_state.locate("w", mask).places)(np.array([True]))
