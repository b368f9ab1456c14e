"""What single methods select, pack and round, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import optim
from hpcjax.collectives import (
    GaussianKConfig,
    HalfConfig,
    MeshGroup,
    MsTopKConfig,
    signs,
)
from tests.collectives.exchanges import on_hosts

pytestmark = pytest.mark.smoke

LENGTH = 300


def test_gaussian_thresholds_come_near_k():
    given = np.random.default_rng(6).normal(size=(3, 4, 20_000))
    config = GaussianKConfig(density=0.01)
    for step in on_hosts(config, given.astype(np.float32)):
        assert (np.abs(step.stats.selected / 200 - 1) <= 0.25).all()


MS_INPUTS = {
    "normal": np.random.default_rng(7).normal(size=LENGTH),
    "ties": np.random.default_rng(8).integers(-2, 3, LENGTH),
    "constant": np.ones(LENGTH),
    "one_hot": np.eye(1, LENGTH, 17)[0],
    "zeros": np.zeros(LENGTH),
}


@pytest.mark.acceptance("gradcomp-utility", 1)
@pytest.mark.parametrize("kind", MS_INPUTS)
@pytest.mark.parametrize("density", [0.01, 0.05, 0.7, 1.0])
def test_sampled_thresholds_take_exactly_k(kind, density):
    x = MS_INPUTS[kind].astype(np.float32)
    method = MsTopKConfig(density=density).make().method.method
    group = MeshGroup(None)
    found = method.select(group, jnp.asarray(x), jnp.int32(0))
    k, size = int(density * LENGTH), np.abs(x)
    indices = np.asarray(found.indices)
    assert len(set(indices.tolist())) == int(found.count) == k
    assert indices.max() < LENGTH
    np.testing.assert_array_equal(found.values, x[indices])
    outside = np.delete(size, indices)
    if kind == "normal" and k <= np.sum(size > size.mean()):
        # So many halvings tell any two of these apart: no run is needed.
        assert outside.max() < size[indices].min()
    assert outside.size == 0 or size[indices].max() >= outside.max()


@pytest.mark.acceptance("gradcomp-utility", 1)
@pytest.mark.parametrize("length", range(1, 101))
def test_signs_survive_packing(length):
    x = np.random.default_rng(length).integers(-1, 2, length).astype(np.float32)
    words = signs.pack_signs(np, x)
    assert words.dtype == np.uint32
    assert len(words) == -(-length // 32)
    np.testing.assert_array_equal(
        signs.unpack_signs(np, words, length), np.where(x >= 0, 1, -1)
    )
    if length % 33 == 1:
        np.testing.assert_array_equal(signs.pack_signs(jnp, jnp.asarray(x)), words)


def test_half_precision_is_cut_off_and_comes_later():
    tx = optim.exchange_gradients(HalfConfig())
    tree = {"w": jnp.asarray([1e6, 1.0])}
    mean, state = tx.update(tree, tx.init(tree))
    assert mean["w"].tolist() == [65504.0, 1.0]
    assert state.residual["w"].tolist() == [1e6 - 65504.0, 0.0]
