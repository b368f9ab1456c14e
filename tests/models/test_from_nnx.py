import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hpcjax import core, models
from hpcjax.core import keys, trees
from hpcjax.models import modules


def test_draws_are_keyed_by_path():
    model = models.mlp((3,), 2, widths=(4,))
    key = jax.random.key(3)
    params, _ = model.init(key)
    expected = modules.LECUN(keys.derive(key, "dense_0/kernel"), (3, 4), "float32")
    np.testing.assert_array_equal(params["dense_0"]["kernel"], expected)


def test_another_layer_changes_no_other_draw():
    key = jax.random.key(0)
    few, many = models.mlp((3,), 2, widths=(4,)), models.mlp((3,), 2, widths=(4, 4))
    small, large = (trees.flatten(m.init(key)[0]) for m in (few, many))
    assert len(large) > len(small)
    for path, leaf in small.items():
        np.testing.assert_array_equal(leaf, large[path], err_msg=path)


def test_a_deeper_stack_starts_with_the_same_blocks():
    key = jax.random.key(0)
    options = models.OPT  # no scaling by depth
    make = [
        models.causal_lm((4,), 5, depth=depth, width=4, heads=2, options=options)
        for depth in (2, 3)
    ]
    shallow, deep = (trees.flatten(m.init(key)[0]) for m in make)
    for path, leaf in shallow.items():
        other = deep[path][:2] if path.startswith("blocks/") else deep[path]
        np.testing.assert_array_equal(leaf, other, err_msg=path)
    kernel = deep["blocks/mlp/up/kernel"]
    assert (kernel[0] != kernel[1]).any()


def test_a_tree_of_another_model_is_refused_by_path():
    model, other = models.mlp((3,), 2, widths=(4,)), models.mlp((3,), 2, widths=())
    params, state = other.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"missing \['dense_0/bias', 'dense_0/kernel'"):
        model.apply(params, state, jnp.ones((1, 3)), train=False)


class Foreign(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x, *, train, key):
        return self.dropout(self.linear(x))


def test_undeclared_variables_are_refused_by_path():
    with pytest.raises(ValueError, match=r"dropout/rngs/.*'linear/kernel'"):
        models.from_nnx(Foreign)


class Counting(nnx.Module):
    """A stack whose blocks hold running statistics."""

    def __init__(self, depth):
        self.blocks = models.stack(models.BatchNorm(2, policy=core.Policy()), depth)

    def __call__(self, x, *, train, key):
        return models.scan_blocks(
            self.blocks, x, lambda block, x: block(x + 1, train=train)
        )


def test_running_statistics_pass_through_the_scan():
    model = models.from_nnx(lambda: Counting(3))
    params, state = model.init(jax.random.key(0))
    assert trees.flatten(state)["blocks/mean"].shape == (3, 2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)
    _, new = model.apply(params, state, x, train=True)
    # Every block sees inputs whose mean is one above zero, the first one above x's.
    expected = 0.1 * np.stack([1 + np.asarray(x).mean(0), np.ones(2), np.ones(2)])
    np.testing.assert_allclose(new["blocks"]["mean"], expected, atol=1e-6)
    _, same = model.apply(params, new, x, train=False)
    jax.tree.map(np.testing.assert_array_equal, same, new)
