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


class Flax(nnx.Module):
    """A network of flax's own layers, in a list too."""

    def __init__(self, rngs, padding="SAME"):
        self.conv = nnx.Conv(2, 3, (3, 3), strides=2, padding=padding, rngs=rngs)
        self.list = nnx.List([nnx.Linear(12, 4, use_bias=False, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x, *, train, key):
        x = nnx.relu(self.conv(x)).reshape(len(x), -1)
        x = self.norm(self.list[0](x), use_running_average=not train)
        return self.head(x)


def test_layers_of_flax_compute_what_flax_computes():
    model, x = models.from_nnx(Flax), jnp.arange(96.0).reshape(3, 4, 4, 2) / 96
    key = jax.random.key(0)
    params, state = model.init(key)
    peer = Flax(nnx.Rngs(keys.derive(key, "rngs")))
    expected = peer(x, train=True, key=None)
    found, new = model.apply(params, state, x, train=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(new["norm"]["mean"], peer.norm.mean[...], rtol=1e-6)
    assert trees.flatten(params)["list/0/kernel"].shape == (12, 4)
    shapes, _ = jax.eval_shape(model.init, key)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    other, _ = model.init(jax.random.key(1))
    assert (other["head"]["kernel"] != params["head"]["kernel"]).any()


@pytest.mark.slow
def test_layers_of_flax_are_observed_as_ours_are():
    """A tap's sum of xᵀ g is the gradient of the kernel, by autodiff."""
    model, x = models.from_nnx(Flax), jnp.arange(96.0).reshape(3, 4, 4, 2) / 96
    params, state = model.init(jax.random.key(0))
    specs = {spec.path: spec for spec in model.layers}
    assert set(specs) == {"conv", "list/0", "head"}
    assert specs["conv"].options == {
        "inputs": 2, "outputs": 3, "use_bias": True, "depth": None, "groups": 1,
        "kernel_size": (3, 3), "strides": (2, 2), "padding": "SAME",
        "dilation": (1, 1),
    }  # fmt: skip
    dense = ("list/0", "head")
    taps = core.make_slots(model, dict.fromkeys(dense, moment), params, state, x)

    def loss(params, taps):
        return jnp.sin(model.apply(params, state, x, train=True, taps=taps)[0]).sum()

    grads, seen = jax.grad(loss, argnums=(0, 1))(params, taps)
    for path in dense:
        expected = trees.flatten(grads)[f"{path}/kernel"]
        np.testing.assert_allclose(seen[path].slot, expected, rtol=1e-5, atol=1e-7)


def moment(x, g):
    return x.T @ g


@pytest.mark.parametrize(
    ("padding", "listed"),
    [("VALID", "VALID"), (1, ((1, 1),) * 2), ((0, 1), ((0, 0), (1, 1)))],
)
def test_padding_of_flax_is_ours(padding, listed):
    model = models.from_nnx(lambda rngs: Flax(rngs, padding))
    found = {spec.path: spec.options for spec in model.layers}
    assert found["conv"]["padding"] == listed


def test_what_the_statistics_do_not_know_is_not_listed():
    model = models.from_nnx(lambda rngs: Flax(rngs, "CIRCULAR"))
    assert {spec.path for spec in model.layers} == {"list/0", "head"}


class Twice(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x, *, train, key):
        return self.layer(self.layer(x))


def test_a_layer_of_flax_that_is_used_twice_is_named():
    model = models.from_nnx(Twice)
    params, state = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match="'layer' is used again"):
        core.make_slots(model, {"layer": moment}, params, state, jnp.ones((2, 3)))
