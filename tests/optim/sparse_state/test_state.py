"""The compressed state of training, against training of masked dense parameters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax import core, optim, train
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.optim import sparse_state

STEPS = 50
DECAYED = (("bias", False), (".*", True))
TX = optim.adamw(0.01, weight_decay=0.1, clip_norm=1.0, decay_rules=DECAYED)


def draw(seed=0, share=0.2):
    """Parameters of a perceptron, masks of its kernels, and batches."""
    rng = np.random.default_rng(seed)
    shapes = {"in": (6, 16), "out": (16, 3)}
    params = {
        name: {"kernel": rng.normal(size=shape) / 2, "bias": np.zeros(shape[1])}
        for name, shape in shapes.items()
    }
    masks = {
        name: {"kernel": rng.random(shape) < share, "bias": None}
        for name, shape in shapes.items()
    }
    x = rng.normal(size=(STEPS, 8, 6))
    batches = x, np.tanh(x[..., :3] - x[..., 3:])
    cast = functools.partial(jax.tree.map, lambda x: jnp.asarray(x, jnp.float32))
    return cast(params), masks, cast(batches)


def loss(params, batch):
    x, y = batch
    params = core.realize(params)
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - y) ** 2)


def mask_tree(tree, masks):
    return jax.tree.map(
        lambda leaf, mask: leaf if mask is None else leaf * mask,
        tree,
        masks,
        is_leaf=lambda node: node is None,
    )


@functools.cache
def trained_dense():
    """The losses and parameters of masked dense training."""
    params, masks, batches = draw()
    params = mask_tree(params, masks)

    def step(carry, batch):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = TX.update(mask_tree(grads, masks), state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, TX.init(params)), batches
    )
    return losses, params


def make(dtype="float32", tx=TX, loss_scale=None, **options):
    params, masks, batches = draw()
    optimizer = sparse_state.wrap(tx, loss_scale=loss_scale)
    made = sparse_state.compress(params, masks, dtype=dtype, **options)
    return optimizer, optimizer.init(made), masks, batches


@pytest.mark.quick("remat")
@pytest.mark.acceptance("samo", 3)
@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "rematerialize", "index": "bitmap"}],
    ids=["dense", "remat"],
)
def test_float32_training_is_that_of_masked_dense_parameters(options):
    optimizer, state, masks, batches = make(**options)

    def step(state, batch):
        value, grads = sparse_state.value_and_grad(loss)(state.params, batch)
        return optimizer.step(state, grads), value

    state, losses = jax.jit(functools.partial(jax.lax.scan, step))(state, batches)
    expected, params = trained_dense()
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    for path, leaf in trees.flatten(sparse_state.to_dense(state)).items():
        np.testing.assert_allclose(leaf, trees.flatten(params)[path], atol=1e-6)
    assert losses[-1] < 0.9 * losses[0]
    sparse_state.check_masks(state.params, masks)


@pytest.fixture(scope="module")
def low_precision():
    """Three steps in bfloat16, and the gradients of each."""
    optimizer, state, masks, batches = make("bfloat16")
    take = jax.jit(sparse_state.value_and_grad(loss))
    step = jax.jit(optimizer.step)
    states, grads = [state], []
    for number in range(3):
        batch = jax.tree.map(lambda rows, n=number: rows[n], batches)
        grads.append(take(states[-1].params, batch)[1])
        states.append(step(states[-1], grads[-1]))
    return states, grads, masks


@pytest.mark.acceptance("samo", 3)
def test_the_same_gradients_give_the_same_bits_in_bfloat16(low_precision):
    states, grads, masks = low_precision
    start, _, _ = draw()
    master = mask_tree(start, masks)
    inner = TX.init(master)
    update = jax.jit(TX.update)
    for state, each in zip(states[1:], grads, strict=True):
        dense = jax.tree.map(
            lambda g, m, p: (
                g if m is None else jnp.zeros(p.shape, g.dtype).at[m].set(g)
            ),
            each,
            masks,
            start,
            is_leaf=lambda node: node is None,
        )
        assert {g.dtype.name for g in jax.tree.leaves(each)} == {"bfloat16"}
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), dense)
        updates, inner = update(wide, inner, master)
        master = optax.apply_updates(master, updates)
        for path, leaf in trees.flatten(core.realize(state.params)).items():
            expected = trees.flatten(master)[path].astype(jnp.bfloat16)
            np.testing.assert_array_equal(leaf, expected)


@pytest.mark.acceptance("samo", 4)
def test_pruned_weights_are_zero_and_kept_ones_the_rounded_master(low_precision):
    states, _, masks = low_precision
    for state in states:
        for name, mask in masks.items():
            weights = np.asarray(state.params[name]["kernel"].weights)
            at = mask["kernel"]
            assert (weights[~at] == 0).all()
            assert (weights[at] != 0).all()
            master = state.master[name]["kernel"].astype(jnp.bfloat16)
            np.testing.assert_array_equal(weights[at], master)
    assert (states[0].master["in"]["kernel"] != states[3].master["in"]["kernel"]).all()


@pytest.mark.acceptance("samo", 2)
@pytest.mark.parametrize(
    ("options", "per_value", "per_element"),
    [
        ({}, 16, 2),
        ({"index": "bitmap"}, 12, 2 + 1 / 8),
        ({"mode": "rematerialize"}, 18, 0),
    ],
    ids=["int32", "bitmap", "rematerialize"],
)
@pytest.mark.parametrize("sparsity", [0.8, 0.9, 0.95])
def test_the_state_has_the_bytes_of_the_formula(
    options, per_value, per_element, sparsity
):
    rng = np.random.default_rng(0)
    size = 2**20
    mask = rng.permutation(size).reshape(1024, 1024) >= sparsity * size
    made = jax.eval_shape(
        lambda leaf: sparse_state.wrap(optax.adam(1e-3)).init(
            sparse_state.compress({"w": leaf}, {"w": mask}, **options)
        ),
        jax.ShapeDtypeStruct((1024, 1024), "float32"),
    )
    kept = mask.sum()
    expected = per_element * size + per_value * kept
    assert trees.num_bytes(made) == pytest.approx(expected, rel=1e-3)
    grads = jax.eval_shape(
        sparse_state.value_and_grad(lambda p: core.realize(p)["w"].sum()), made.params
    )[1]
    assert trees.num_bytes(grads) == 2 * kept


def parts(state):
    return state.params, state.master


SCALE = sparse_state.LossScale(start=1024.0, every=2)


@pytest.mark.slow
@pytest.mark.acceptance("samo", 9)
def test_an_overflow_changes_nothing_but_halves_the_scale():
    optimizer, state, _, batches = make("float16", loss_scale=SCALE)
    step = jax.jit(optimizer.step)
    scaled = jax.jit(
        lambda params, scaling, batch: sparse_state.value_and_grad(
            loss, scaling=scaling
        )(params, batch)
    )
    batch = jax.tree.map(lambda rows: rows[0], batches)
    value, grads = scaled(state.params, state.scaling, batch)
    plain = jax.jit(sparse_state.value_and_grad(loss))(state.params, batch)
    np.testing.assert_allclose(value, plain[0], rtol=1e-6)
    np.testing.assert_allclose(
        grads["in"]["kernel"].astype("float32") / 1024,
        plain[1]["in"]["kernel"].astype("float32"),
        rtol=3e-3,
        atol=1e-6,
    )
    sgd = sparse_state.wrap(optax.sgd(0.5), loss_scale=SCALE)
    moved = jax.jit(sgd.step)(sgd.init(sparse_state.Compressed(*parts(state))), grads)
    np.testing.assert_allclose(
        moved.master["in"]["kernel"],
        state.master["in"]["kernel"]
        - 0.5 * grads["in"]["kernel"].astype("float32") / 1024,
        rtol=1e-6,
    )
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.inf), grads)
    after = step(state, bad)
    assert float(after.scaling.scale) == 512
    unscaled = [dataclasses.replace(s, scaling=None) for s in (state, after)]
    jax.tree.map(np.testing.assert_array_equal, *unscaled)
    # It grows again after the good steps that the config asks for.
    scales = []
    for _ in range(4):
        after = step(after, grads)
        scales.append(float(after.scaling.scale))
    assert scales == [512, 1024, 1024, 2048]
    assert (after.master["in"]["kernel"] != state.master["in"]["kernel"]).any()
    # Gradients of another device, or of a part that is not seen here, count too.
    elsewhere = step(state, grads, overflow=jnp.bool_(True))
    assert float(elsewhere.scaling.scale) == 512
    unscaled = [dataclasses.replace(s, scaling=None) for s in (state, elsewhere)]
    jax.tree.map(np.testing.assert_array_equal, *unscaled)
    # And never falls below the smallest.
    small = sparse_state.LossScale(start=4.0, least=3.0)
    sgd = sparse_state.wrap(optax.sgd(0.5), loss_scale=small)
    fallen = sgd.step(sgd.init(sparse_state.Compressed(*parts(state))), bad)
    assert float(fallen.scaling.scale) == 3


@pytest.mark.acceptance("samo", 10)
def test_a_restored_run_goes_on_with_the_same_bits(low_precision, tmp_path):
    states, grads, masks = low_precision
    optimizer, fresh, _, _ = make("bfloat16")
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, states[2], {})
        restored = checkpoints.restore(fresh).state
        smaller = {"in": masks["in"], "out": {"kernel": masks["out"]["kernel"].copy()}}
        smaller["out"]["bias"] = None
        kept = np.argwhere(smaller["out"]["kernel"])[0]
        smaller["out"]["kernel"][tuple(kept)] = False
        params, _, _ = draw()
        other = optimizer.init(sparse_state.compress(params, smaller))
        with pytest.raises(ConfigError, match="out/kernel"):
            checkpoints.restore(other)
    sparse_state.check_masks(restored.params, masks)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(optimizer.step)(restored, grads[2]),
        states[3],
    )
    # Another mask of as many values has arrays of the same shapes.
    moved = {
        **masks,
        "out": {"kernel": np.roll(masks["out"]["kernel"], 1), "bias": None},
    }
    with pytest.raises(ConfigError, match="out/kernel"):
        sparse_state.check_masks(restored.params, moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kernel": np.ones((6, 3), bool)},
            r"mask of in/kernel must be bool \[6, 16\]",
        ),
        ({"kernel": np.ones((6, 16))}, "mask of in/kernel must be bool"),
        ({"kernel": None, "other": None}, "masks must be a tree like the parameters"),
    ],
)
def test_masks_that_do_not_fit_are_named(change, message):
    params, masks, _ = draw()
    wrong = {**masks, "in": {"bias": None, **change}}
    with pytest.raises(ConfigError, match=message):
        sparse_state.compress(params, wrong)


def test_more_bytes_than_dense_training_are_told():
    params, _, _ = draw()
    keep_all = jax.tree.map(lambda p: np.ones(p.shape, bool), params)
    made = sparse_state.compress(params, keep_all)
    with pytest.warns(UserWarning, match=r"\d+ bytes.* \d+ without"):
        sparse_state.wrap(optax.adam(0.1)).init(made)


REFUSED = {
    "jorge": optim.jorge(0.1),
    "shampoo": optim.shampoo(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1),
}
ACCEPTED = {
    "sgd": optim.sgd(0.1, nesterov=True),
    "adam, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "lion": optax.lion(0.1),
    "lamb": optim.lamb(0.1, stacked=("blocks",)),
}


def stacked_parameters():
    rng = np.random.default_rng(3)
    params = {"blocks": jnp.asarray(rng.normal(size=(2, 6, 5)), jnp.float32)}
    masks = {"blocks": rng.random((2, 6, 5)) < 0.4}
    return sparse_state.compress(params, masks, stacked=("blocks",))


@pytest.mark.parametrize("name", REFUSED)
def test_transforms_that_need_matrices_are_refused(name):
    with pytest.raises(ConfigError, match="elementwise"):
        sparse_state.check_elementwise(REFUSED[name], stacked_parameters().params)


@pytest.mark.parametrize("name", ACCEPTED)
def test_elementwise_transforms_with_norms_are_taken(name):
    sparse_state.check_elementwise(ACCEPTED[name], stacked_parameters().params)


def test_good_steps_are_counted_from_an_overflow_on():
    made = sparse_state.compress({"w": jnp.eye(16)}, {"w": np.eye(16) > 0})
    rule = sparse_state.LossScale(start=8.0, every=3, growth=2.0, backoff=0.5)
    optimizer = sparse_state.wrap(optax.sgd(0.1), loss_scale=rule)
    state, scales = optimizer.init(made), []
    for gradient in (1, 1, np.inf, 1, 1, 1, 1):
        grads = {"w": jnp.full(16, gradient, jnp.float16)}
        state = optimizer.step(state, grads)
        scales.append(float(state.scaling.scale))
    assert scales == [8, 8, 4, 4, 4, 8, 8]
