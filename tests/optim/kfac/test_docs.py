"""The examples of docs/kfac.md run and train."""

import jax
import numpy as np
import pytest

from tests import guides


@pytest.mark.slow
def test_the_examples_of_the_documentation_run():
    assert float(guides.run("kfac.md", "On one device")["value"]) < 1.0
    names = guides.run("kfac.md", "On one device", "On many devices")
    state = names["opt_state"][1]
    assert state.count == 5
    assert len(state.decompositions.value["made"]) == 8
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(names["params"]))


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Plain functions", "Flax Linen", "Flax NNX"])
def test_a_model_of_ones_own_trains_by_its_page_alone(title):
    (code,) = guides.blocks("kfac.md", title)
    assert code.count("\n") < 60
    names = guides.run("kfac.md", title)
    x = jax.random.normal(jax.random.key(1), (32, 64))
    y = jax.random.randint(jax.random.key(2), (32,), 0, 10)
    params, state, values = names["params"], names["opt_state"], []
    for _ in range(10):
        params, state, value = names["step"](params, state, x, y)
        values.append(float(value))
    assert values[-1] < 0.95 * values[0]  # The default kl-clip makes short steps.
    # A of the first layer: running averages, from the identity, of inputs and a one.
    (first,) = (block.path for block in names["plan"].blocks if block.a == 65)
    rows = np.concatenate([np.asarray(x), np.ones((32, 1))], axis=1)
    old = 0.95**10
    np.testing.assert_allclose(
        state[0].factors[first]["a"][0],
        old * np.eye(65) + (1 - old) * rows.T @ rows / 32,
        atol=1e-4,
    )
