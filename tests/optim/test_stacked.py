import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax import optim
from hpcjax.core import ConfigError

TRANSFORMS = {
    "jorge": lambda **options: optim.scale_by_jorge(
        update_every=2, init="grad", **options
    ),
    "grafted jorge": lambda **options: optim.jorge(
        0.1, update_every=2, init="grad", **options
    ),
    "shampoo": lambda **options: optim.scale_by_shampoo(roots_every=2, **options),
}


def gradients(step: int) -> dict[str, dict[str, jax.Array]]:
    rng = np.random.Generator(np.random.Philox(step))
    shapes = {"conv": (3, 2, 2, 4, 5), "kernel": (3, 6, 4), "scale": (3, 6)}
    return {
        "blocks": {
            # Layers of very different size: their norms must not be taken together.
            name: jnp.asarray(
                rng.normal(size=shape)
                * np.array([1, 10, 100]).reshape(3, *[1] * (len(shape) - 1)),
                jnp.float32,
            )
            for name, shape in shapes.items()
        }
    }


@pytest.mark.quick("shampoo")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_stack_of_layers_is_preconditioned_layer_by_layer(name):
    stacked = TRANSFORMS[name](stacked=("^blocks/",))
    alone = TRANSFORMS[name]()
    state = stacked.init(gradients(0))
    states = [
        alone.init(jax.tree.map(lambda g, i=i: g[i], gradients(0))) for i in range(3)
    ]
    update_stack, update_layer = jax.jit(stacked.update), jax.jit(alone.update)
    for step in range(5):
        together, state = update_stack(gradients(step), state, gradients(step))
        for i in range(3):
            own = jax.tree.map(lambda g, i=i: g[i], gradients(step))
            update, states[i] = update_layer(own, states[i], own)
            layer = jax.tree.map(lambda u, i=i: u[i], together)
            chex.assert_trees_all_close(layer, update, rtol=2e-4, atol=1e-5)


def test_without_the_rule_a_stack_is_merged():
    merged = optim.factors_of(optim.scale_by_jorge().init(gradients(0)))
    split = optim.factors_of(
        optim.scale_by_jorge(stacked=("^blocks/",)).init(gradients(0))
    )
    assert len([name for name in split if "kernel" in name]) == 6
    assert len([name for name in merged if "kernel" in name]) == 2
    assert not [name for name in split if "scale" in name]


def test_a_rule_that_matches_nothing_is_an_error():
    tx = optim.scale_by_jorge(stacked=("^layers/",))
    with pytest.raises(ConfigError, match=r"stacked must match.*\^layers/"):
        tx.init(gradients(0))
