"""Updates of parts of parameters, in a loop of one's own, and who may make them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import optim, sharding
from hpcjax.core import ConfigError, shards
from hpcjax.optim.admission import check_cuttable

RNG = np.random.default_rng(0)
PARAMS = {
    "blocks": {"kernel": RNG.normal(size=(2, 8, 16)).astype(np.float32)},
    "bias": RNG.normal(size=8).astype(np.float32),
    "scale": np.float32(0.5),
}
SHAPES = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, PARAMS))
# Another mean of the gradient than that of each device, and larger than the clip.
NOISE = jax.tree.map(
    lambda p: RNG.normal(size=(3, 8, *p.shape)).astype(np.float32), PARAMS
)
CUTS = {
    "one axis": (
        {"data": 8},
        {"blocks/kernel": P(None, None, "data"), "bias": P("data")},
    ),
    "two axes": (
        {"data": 4, "depth": 2},
        {"blocks/kernel": P(None, "depth", "data"), "bias": P(("data", "depth"))},
    ),
}
TX = {
    "sgd": lambda: optim.sgd(0.1, weight_decay=0.01),
    "clipped": lambda: optim.sgd(0.1, clip_norm=1.0),
    "adamw": lambda: optax.adamw(0.1),
    "lamb": lambda: optim.lamb(0.1, clip_norm=1.0, stacked=("^blocks/",)),
}


def loop(tx, mesh, specs, held):
    """Takes three steps with gradients of each device; returns the parameters."""
    axes = tuple(mesh.axis_names)
    state = jax.eval_shape(tx.init, PARAMS)
    of_state = shards.state_specs(tx, PARAMS, state, specs)
    of_params = shards.spec_tree(held, PARAMS)

    def step(params, state, noise):
        mine = jax.tree.map(lambda g: g[0], noise)
        for path in held:  # as the gather's transpose leaves them
            cuts = shards.list_cuts(specs, path, np.ndim(leaf(mine, path)))
            mine = put(mine, path, shards.sum_parts(leaf(mine, path), cuts))
        updates, state = tx.update(mine, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(of_params, of_state, P(axes)),
        out_specs=(of_params, of_state),
    )
    run = jax.jit(mapped, donate_argnums=(0, 1))
    places = jax.tree.map(lambda s: NamedSharding(mesh, s), (of_params, of_state))
    params, state = jax.device_put((PARAMS, tx.init(PARAMS)), places)
    for row in range(3):
        params, state = run(params, state, of_row(row))
    assert jax.tree.map(lambda x: x.sharding, (params, state)) == places
    return jax.device_get(params)


def of_row(row):
    """The gradients of each device in one step."""
    return jax.tree.map(lambda g: g[row], NOISE)


def leaf(tree, path):
    return tree["blocks"]["kernel"] if "/" in path else tree[path]


def put(tree, path, value):
    if "/" in path:
        return {**tree, "blocks": {"kernel": value}}
    return {**tree, path: value}


def alone(tx):
    params, state = PARAMS, tx.init(PARAMS)
    for row in range(3):
        mean = jax.tree.map(lambda g: g.mean(axis=0), of_row(row))
        updates, state = tx.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", TX)
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.quick("two axes-False-sgd", "one axis-True-lamb", "two axes-True-adamw")
def test_parts_are_updated_as_the_whole_is_on_one_device(cut, holds, name):
    sizes, specs = CUTS[cut]
    held = specs if holds else {}
    mesh = sharding.make_mesh(sizes)
    tx = optim.update_shards(TX[name](), specs, held=held, axes=mesh.axis_names)
    for ours, theirs in zip(
        jax.tree.leaves(loop(tx, mesh, specs, held)),
        jax.tree.leaves(alone(TX[name]())),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


def test_parts_along_another_axis_than_gradients_are_refused():
    with pytest.raises(ConfigError, match=r"bias must be cut along the axes.*'data'"):
        optim.update_shards(optax.sgd(0.1), {"bias": P("model")}, axes="data")


def test_an_update_outside_of_shard_map_is_told():
    tx = optim.update_shards(optax.sgd(0.1), {})
    with pytest.raises(ConfigError, match="update_shards communicates over"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_losses_of_whole_parameters_are_not_handed_on():
    def update(updates, state, params=None, **extra_args):
        assert "value_fn" not in extra_args
        assert extra_args["cut"] == {}
        return updates, state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    tx = optim.update_shards(inner, {}, axes=None)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, value_fn=lambda params: 0.0)


CLIP = optax.clip_by_global_norm(1e6)
LABELS = {"blocks": {"kernel": "a"}, "bias": "b", "scale": "a"}
MASK = {"blocks": {"kernel": True}, "bias": False, "scale": True}


def labels_of(params):
    """Walks the tree, as it cannot that of a placeholder."""
    return {name: LABELS[name] for name in params}


CUTTABLE = {
    "sgd": optim.sgd(0.1, clip_norm=1.0, weight_decay=0.1, momentum=0.9),
    "lamb": optim.lamb(0.1, clip_norm=1.0, stacked=("^blocks/",)),
    "adam": optax.adam(0.1),
    "masked": optax.masked(optax.adam(0.1), MASK),
    "partition": optax.partition({"a": optax.adam(0.1), "b": optim.sgd(0.1)}, LABELS),
    "labels": optax.partition({"a": optax.adam(0.1), "b": optim.sgd(0.1)}, labels_of),
    "schedule": optax.sgd(optax.linear_schedule(0.0, 0.1, 10), momentum=0.9),
    "several": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
}


def largest_of_blocks(updates, params=None):
    """Divides by the larger of every two elements in a row."""
    del params

    def scale(leaf):
        if leaf.size % 2:
            return leaf
        blocks = leaf.reshape(-1, 2)
        return (blocks / abs(blocks).max(1, keepdims=True)).reshape(leaf.shape)

    return jax.tree.map(scale, updates)


REFUSED = {
    "blocks": (optax.stateless(largest_of_blocks), "by the size"),
    "clip": (optax.chain(CLIP, optax.sgd(0.1)), "depend on sums"),
    "after moments": (optax.chain(optax.scale_by_adam(), CLIP), "depend on sums"),
    "of some": (optax.masked(CLIP, MASK), "depend on sums"),
    "of later": (
        optax.conditionally_transform(CLIP, lambda step, **_: step > 9),
        "depend on sums",
    ),
    "in several": (
        # It hands no `cut` on.
        optax.MultiSteps(optim.sgd(0.1, clip_norm=1.0), 3).gradient_transformation(),
        "depend on sums",
    ),
    "trust": (optax.lamb(0.1), "depend on sums"),
    "finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "depend on sums"),
    "noise": (optax.noisy_sgd(0.1, key=0), "neither"),
    "adafactor": (optax.adafactor(0.1), "neither"),
    "adafactor by labels": (
        optax.partition({"a": optax.adafactor(0.1), "b": optax.sgd(0.1)}, labels_of),
        "neither",
    ),
    "muon": (optax.contrib.muon(0.1), ""),
    "jorge": (optim.jorge(0.1), "neither"),
    "shampoo": (optim.shampoo(0.1), "neither"),
    "lbfgs": (optax.lbfgs(), "neither"),
}
SPECS = CUTS["one axis"][1]


@pytest.mark.parametrize("name", CUTTABLE)
def test_elementwise_transforms_and_our_norms_may_be_cut(name):
    check_cuttable(CUTTABLE[name], SHAPES, SPECS)
    state = jax.eval_shape(CUTTABLE[name].init, SHAPES)
    found = shards.state_specs(CUTTABLE[name], SHAPES, state, SPECS)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
    for like, spec in pairs:
        assert (spec == P()) is (like.ndim == 0), (like, spec)


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_need_the_whole_are_refused(name):
    tx, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=f"such as sgd, adamw or lamb: .*{reason}"):
        check_cuttable(tx, SHAPES, SPECS)
