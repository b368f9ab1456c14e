"""PowerSGD: exact at full rank, and nothing is lost below it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import optim, sharding
from hpcjax.collectives import (
    HostGroup,
    PowerSgdConfig,
)
from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.hostcomm import connected
from hpcjax.perf import ring_bytes
from tests.hostcomm.threads import in_threads


@pytest.mark.acceptance("gradcomp-utility", 3)
def test_low_rank_programs_send_what_the_formula_says():
    config, members, (a, b) = PowerSgdConfig(rank=4), 4, (300, 200)
    mesh, tx = sharding.data_mesh(members), optim.exchange_gradients(config, "data")
    params = {"kernel": jnp.zeros((a, b)), "bias": jnp.zeros(b)}
    state = per_device.expand(tx.init(params), mesh)
    specs = per_device.specs(state)

    def body(tree, state):
        mean, new = tx.update(tree, per_device.enter(state))
        return mean, per_device.leave(new)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)
    )
    compiled = jax.jit(mapped).lower(params, state).compile()
    expected = 8 * (4 * (a + b) + b) * (members - 1) / members
    assert 4 * config.make().words(params, members) == expected
    assert abs(ring_bytes(compiled, members) / expected - 1) <= 0.01


def matrices(seed, steps, members, shape):
    """Gaussian gradients of one matrix and a bias."""
    draws = np.random.default_rng(seed)
    return [
        {
            "kernel": draws.normal(size=(members, *shape)).astype(np.float32),
            "bias": draws.normal(size=(members, shape[-1])).astype(np.float32),
        }
        for _ in range(steps)
    ]


def averaged(config, given, members):
    """Means, and the last residuals, by host ranks."""

    def rank(transport):
        exchange, group, means = config.make(), HostGroup(transport), []
        state = exchange.init(jax.tree.map(lambda x: x[0], given[0]))
        for tree in given:
            own = jax.tree.map(lambda x: x[transport.rank], tree)
            mean, state = exchange.average(group, own, state)
            means.append(mean)
        return means, state.residual

    ranks = in_threads(rank, connected(members))
    return ranks[0][0], [residual for _, residual in ranks]


@pytest.mark.acceptance("gradcomp-utility", 1)
@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (5, 12), (3, 3, 4, 6)])
def test_full_rank_is_the_exact_mean(shape):
    given = matrices(11, 2, 4, shape)
    config = PowerSgdConfig(rank=1000, error_feedback=False)
    for tree, mean in zip(given, averaged(config, given, 4)[0], strict=True):
        for name in tree:
            exact = tree[name].mean(0)
            assert np.abs(mean[name] - exact).max() <= 1e-4 * np.abs(exact).max()


@pytest.mark.acceptance("gradcomp-utility", 2)
def test_low_rank_updates_and_residuals_add_up():
    given, total = matrices(12, 100, 3, (20, 12)), 0.0
    means, residuals = averaged(PowerSgdConfig(rank=2), given, 3)
    done = sum(mean["kernel"].astype(np.float64) for mean in means)
    done += np.mean([residual["kernel"] for residual in residuals], axis=0)
    total = sum(tree["kernel"].mean(0).astype(np.float64) for tree in given)
    assert np.abs(done - total).max() <= 1e-4 * np.abs(total).max()
    for tree, mean in zip(given, means, strict=True):
        np.testing.assert_allclose(mean["bias"], tree["bias"].mean(0), atol=1e-6)


@pytest.mark.parametrize("warm_start", [True, False])
def test_low_rank_on_devices_and_hosts(warm_start):
    config = PowerSgdConfig(rank=2, warm_start=warm_start)
    given = matrices(13, 3, 4, (6, 5))
    means, residuals = averaged(config, given, 4)
    params = jax.tree.map(lambda x: jnp.asarray(x[0]), given[0])
    mesh, tx = sharding.data_mesh(4), optim.exchange_gradients(config, "data")
    state = per_device.expand(tx.init(params), mesh)
    state = jax.device_put(state, sharding.state_shardings(state, mesh))
    specs = per_device.specs(state)

    def body(tree, state):
        own = jax.tree.map(lambda x: x[0], tree)
        mean, new = tx.update(own, per_device.enter(state))
        return mean, per_device.leave(new)

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    step = jax.jit(mapped)
    for tree, expected in zip(given, means, strict=True):
        mean, state = step(tree, state)
        for name in mean:
            np.testing.assert_allclose(mean[name], expected[name], atol=2e-5)
    expected = np.stack([residual["kernel"] for residual in residuals])
    np.testing.assert_allclose(state.residual.value["kernel"], expected, atol=1e-4)


def test_each_layer_of_a_stack_is_a_matrix():
    """Against numpy, layer by layer; the layers' biases are no matrix."""
    draws = np.random.default_rng(23)
    tree = {
        "blocks": {
            "bias": draws.normal(size=(3, 5)),
            "kernel": draws.normal(size=(3, 6, 5)),
        },
        "head": draws.normal(size=(3, 5)),
    }
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    tx = optim.exchange_gradients(PowerSgdConfig(rank=2, stacked=("^blocks/",)))
    state = tx.init(tree)
    right = state.shared[0]
    assert {path: factor.shape for path, factor in right.items()} == {
        "blocks/kernel": (3, 5, 2),
        "head": (5, 2),
    }
    mean, state = tx.update(tree, state)
    for made, given, factor in zip(
        mean["blocks"]["kernel"],
        tree["blocks"]["kernel"],
        right["blocks/kernel"],
        strict=True,
    ):
        basis, _ = np.linalg.qr(np.asarray(given, np.float64) @ factor)
        np.testing.assert_allclose(made, basis @ (basis.T @ given), atol=1e-5)
    np.testing.assert_array_equal(mean["blocks"]["bias"], tree["blocks"]["bias"])
    with pytest.raises(ConfigError, match=r"stacked must match parameters.*layers"):
        optim.exchange_gradients(PowerSgdConfig(stacked=("^layers/",))).init(tree)


def test_low_rank_recovers_from_a_step_of_zeros():
    """The first rows are always zero: the basis of a zero matrix sees only them."""
    tx = optim.exchange_gradients(PowerSgdConfig(rank=2))
    k = np.random.default_rng(21).normal(size=(10, 6)).astype(np.float32)
    k[:2] = 0
    state = tx.init({"k": k})
    _, state = tx.update({"k": jnp.zeros_like(k)}, state)
    for _ in range(3):
        mean, state = tx.update({"k": jnp.asarray(k)}, state)
    assert np.abs(mean["k"]).max() > 0.5
    assert np.abs(state.residual["k"]).max() < 5
