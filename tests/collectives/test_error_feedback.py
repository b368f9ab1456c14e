"""What residuals are for: quadratics converge with them alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.collectives import (
    MeshGroup,
    OkTopkConfig,
    PowerSgdConfig,
    TopKConfig,
)


def quadratic(config, steps, *, shape=(400,), decay=1000.0, members=4, lr=0.01):
    """How far f_i = |x − a_i|²/2 still is, from its start; lr inside the memory.

    The members are `vmap`'s: thousands of steps of small devices would take minutes.
    """
    a = np.random.default_rng(14).normal(size=(members, *shape)).astype(np.float32)
    exchange, x = config.make(), jnp.zeros(shape)

    def body(a):
        state = jax.tree.map(jnp.asarray, exchange.init(x))

        def step(carry, t):
            x, state = carry
            given = (x - a) * lr / (1 + t / decay)
            mean, state = exchange.average(MeshGroup("members"), given, state)
            return (x - mean, state), None

        times = jnp.arange(steps, dtype=jnp.float32)
        return jax.lax.scan(step, (x, state), times)[0][0]

    ends = np.asarray(jax.jit(jax.vmap(body, axis_name="members"))(a), np.float64)
    np.testing.assert_array_equal(ends, np.broadcast_to(ends[0], ends.shape))
    best = a.mean(0)
    return float(np.sum((ends[0] - best) ** 2) / np.sum(best**2))


@pytest.mark.slow
@pytest.mark.acceptance("gradcomp-utility", 2)
def test_error_feedback_is_what_makes_top_k_converge():
    config = TopKConfig(density=0.01)
    assert quadratic(config, 20_000) <= 1e-3
    without = TopKConfig(density=0.01, error_feedback=False)
    assert quadratic(without, 20_000) >= 0.3


@pytest.mark.acceptance("gradcomp-utility", 2)
def test_error_feedback_is_what_makes_rank_one_fast():
    options = {"shape": (20, 20), "decay": 1e30}
    assert quadratic(PowerSgdConfig(rank=1), 3000, **options) < 1e-6
    without = PowerSgdConfig(rank=1, error_feedback=False)
    assert quadratic(without, 3000, **options) > 1e-3


@pytest.mark.slow
@pytest.mark.acceptance("oktopk", 6)
def test_residuals_are_what_makes_ok_topk_converge():
    exact = {"density": 0.01, "tau": 1, "tau_prime": 1, "capacity_factor": 8.0}
    assert quadratic(OkTopkConfig(**exact), 20_000, members=8) <= 2e-2
    without = OkTopkConfig(**exact, error_feedback=False)
    assert quadratic(without, 20_000, members=8) >= 0.5
