"""The state before the first step: compiled quickly, the same numbers."""

import jax
import numpy as np
import pytest

from hpcjax import sharding, train
from hpcjax.core import compat
from tests.train import tiny

LEVEL = "xla_backend_optimization_level"


@pytest.mark.parametrize(
    ("platform", "flags", "options"),
    [
        ("cpu", "", {LEVEL: 1}),
        ("cpu", f"--{LEVEL}=0", {}),
        ("cuda", "", {}),
    ],
)
def test_a_level_that_the_user_chose_stays(monkeypatch, platform, flags, options):
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert compat.single_use_compilation(platform) == options


def test_draws_are_those_of_the_highest_level():
    kernel = jax.nn.initializers.he_normal()

    def draw(level):
        made = jax.jit(
            lambda key: kernel(key, (3, 3, 2, 5)), compiler_options={LEVEL: level}
        )
        return jax.device_get(made(jax.random.key(3)))

    np.testing.assert_array_equal(draw(1), draw(3))


def test_the_state_is_compiled_with_these_options(monkeypatch):
    seen = []
    monkeypatch.setattr(
        compat, "single_use_compilation", lambda platform: seen.append(platform) or {}
    )
    state = train.init_state(tiny.task(), 0, sharding.data_mesh(1))
    assert seen == ["cpu"]
    assert int(state.step) == 0
