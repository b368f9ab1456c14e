"""Dropping and growing against numpy, and the recovery of a teacher's support."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hpcjax.core import ConfigError
from hpcjax.optim import sparsify
from hpcjax.optim.sparsify import Uniform
from hpcjax.optim.sparsify._rewiring import share_out
from tests.optim.sparsify.test_prune import gradients, train

dynamic = importlib.import_module("hpcjax.optim.sparsify._dynamic")
HALF = Uniform(sparsity=0.5)
DUE = (3, 6, 9)  # of 16 steps, until three quarters of them
SET = {"grow": "random", "regrow": False, "decay": "constant"}
RULES = {
    "rigl": {},
    "set": SET,
    "set_by_sign": SET | {"by_sign": True},
    "snfs": {"grow": "momentum", "redistribute": "momentum"},
    "dsr": {"grow": "random", "compare": "all", "redistribute": "survivors"},
}


@functools.cache
def run(name):
    times = {"steps": 16, "every": 3, "fraction": 0.6}
    tx = sparsify.dynamic(optax.adam(0.1), distribution=HALF, **times, **RULES[name])
    traced, history = train(tx, 12)
    assert traced == 1
    return history


def masks_of(history):
    return [
        {k: np.asarray(v) for k, v in sparsify.get_masks(s, p).items() if v is not None}
        for p, s in history
    ]


@pytest.mark.quick("snfs", "rigl")
@pytest.mark.acceptance("sparsity", 7)
@pytest.mark.parametrize("name", sorted(RULES))
def test_as_many_weights_are_active_and_masks_change_in_due_steps_alone(name):
    history = run(name)
    found = masks_of(history)
    for number, (before, after) in enumerate(itertools.pairwise(found)):
        same = all(np.array_equal(before[path], after[path]) for path in ("a", "b"))
        if number not in DUE:
            assert same, number
        elif number == DUE[0]:
            assert not same
        totals = [
            {k: int(v.sum()) for k, v in each.items()} for each in (before, after)
        ]
        if "redistribute" in RULES[name]:
            assert sum(totals[0].values()) == sum(totals[1].values()) == 64
        else:
            assert totals[0] == totals[1] == {"a": 48, "b": 16}
    assert any(
        found[-1][path].sum() != found[0][path].sum() for path in ("a", "b")
    ) == ("redistribute" in RULES[name])
    for (params, _), kept in zip(history[1:], found[1:], strict=True):
        assert not np.any(np.asarray(params["a"])[~kept["a"]])


@pytest.mark.parametrize(
    ("until", "every", "expected"),
    [(0.55, 11, [11, 22, 33, 44]), (0.07, 7, []), (0.57, 19, [19, 38])],
)
def test_no_mask_changes_at_the_end_of_the_changes_or_later(until, every, expected):
    options = sparsify.DynamicOptions(steps=100, every=every, until=until)
    times, shares = dynamic.change_table(options)
    assert times.tolist() == expected
    wanted = 0.15 * (1 + np.cos(np.pi * np.array(expected) / (100 * until)))
    np.testing.assert_allclose(shares, wanted, rtol=1e-6)


def test_no_more_is_dropped_by_sign_than_there_is_room_to_grow():
    tx = sparsify.dynamic(
        optax.sgd(0.1),
        distribution=Uniform(sparsity=0.2),
        **{"steps": 20, "every": 2, "fraction": 0.9, **SET, "by_sign": True},
    )
    for found in masks_of(train(tx, 6)[1]):
        assert {k: v.sum() for k, v in found.items()} == {"a": 77, "b": 26}


def dropped(number, count, fraction=0.6):
    return int(fraction / 2 * (1 + np.cos(np.pi * number / 12)) * count)


@pytest.mark.acceptance("sparsity", 7)
@pytest.mark.parametrize("path", ["a", "b"])
def test_rigl_drops_the_least_weights_and_grows_the_largest_gradients(path):
    history, found = run("rigl"), masks_of(run("rigl"))
    for number in DUE:
        weights = np.asarray(history[number][0][path])
        grads = np.asarray(gradients(number)[path])
        active = found[number][path]
        count = dropped(number, active.sum())
        assert count > 0
        size = np.where(active, np.abs(weights), -1)
        left = size >= np.sort(size, axis=None)[-(active.sum() - count)]
        slope = np.where(left, -1, np.abs(grads))
        grown = slope >= np.sort(slope, axis=None)[-count]
        np.testing.assert_array_equal(found[number + 1][path], left | grown)
        params, state = history[number + 1]
        expected = np.where(active & (left | grown), weights, 0)
        np.testing.assert_array_equal(params[path], expected)
        for moment in ("mu", "nu"):
            tree = optax.tree_utils.tree_get(state, moment)
            old = optax.tree_utils.tree_get(history[number][1], moment)
            np.testing.assert_array_equal(tree[path], np.where(left, old[path], 0))
            assert np.all(np.asarray(tree[path])[left] != 0)


@pytest.mark.acceptance("sparsity", 7)
def test_set_drops_the_least_weights_and_grows_none_of_them_again():
    history, found = run("set"), masks_of(run("set"))
    for number in DUE:
        size = np.abs(np.asarray(history[number][0]["a"]))
        active, after = found[number]["a"], found[number + 1]["a"]
        least = np.sort(size[active])[:28]  # 0.6 of 48
        assert sorted(size[active & ~after]) == sorted(least)
    grown = [found[n + 1]["a"] & ~found[n]["a"] for n in DUE]
    assert not np.array_equal(grown[0], grown[1])


def test_what_becomes_active_begins_with_the_weights_asked_for():
    tx = sparsify.dynamic(
        optax.sgd(0.1),
        fresh=lambda key, shape, dtype: jnp.full(shape, 7, dtype),
        **{"distribution": HALF, "steps": 4, "every": 1, "fraction": 0.6, **SET},
    )
    _, history = train(tx, 2)
    before, after = masks_of(history)[1:]
    old, new = (np.asarray(params["a"]) for params, _ in history[1:])
    kept, born = before["a"] & after["a"], after["a"] & ~before["a"]
    np.testing.assert_array_equal(new, np.where(kept, old, np.where(born, 7, 0)))
    assert born.any()


def test_by_sign_the_least_of_the_positive_and_of_the_negative_weights_go():
    history, found = run("set_by_sign"), masks_of(run("set_by_sign"))
    for number in DUE:
        weights, active = np.asarray(history[number][0]["a"]), found[number]["a"]
        gone = active & ~found[number + 1]["a"]
        for side in (active & (weights > 0), active & (weights <= 0)):
            least = np.sort(np.abs(weights[side]))[: int(0.6 * side.sum())]
            assert sorted(np.abs(weights[side & gone])) == sorted(least)


def test_snfs_gives_layers_what_their_momentum_is_worth():
    history, found = run("snfs"), masks_of(run("snfs"))
    number = DUE[0]
    momentum = optax.tree_utils.tree_get(history[number][1], "mu")
    lost = {path: dropped(number, found[number][path].sum()) for path in ("a", "b")}
    worth = {
        path: np.abs(np.asarray(momentum[path]))[found[number][path]].mean()
        for path in ("a", "b")
    }
    share = sum(lost.values()) * worth["a"] / sum(worth.values())
    got = int(found[number + 1]["a"].sum()) - (48 - lost["a"])
    assert abs(got - share) <= 1


def test_dsr_compares_weights_of_all_layers():
    history, found = run("dsr"), masks_of(run("dsr"))
    number = DUE[0]
    both = [np.abs(np.asarray(history[number][0][path])) for path in ("a", "b")]
    active = [found[number][path] for path in ("a", "b")]
    sizes = np.concatenate([b[a] for b, a in zip(both, active, strict=True)])
    lost = dropped(number, 64)
    edge = np.sort(sizes)[lost]
    for size, was, path in zip(both, active, ("a", "b"), strict=True):
        gone = was & ~found[number + 1][path]
        assert np.all(size[gone] < edge)


@pytest.mark.parametrize(
    ("total", "weights", "room", "expected"),
    [
        (9, [1, 1, 1], [1, 9, 9], [1, 4, 4]),
        (10, [3, 1, 0], [9, 9, 9], [8, 2, 0]),
        (10, [1, 0, 0], [4, 4, 4], [4, 4, 2]),
        (0, [1, 1, 1], [4, 4, 4], [0, 0, 0]),
        (12, [1e-30, 1, 5], [4, 4, 4], [4, 4, 4]),
    ],
)
def test_numbers_are_shared_out_in_proportion_as_far_as_there_is_room(
    total, weights, room, expected
):
    found = share_out(
        jnp.int32(total), jnp.asarray(weights, jnp.float32), jnp.asarray(room)
    )
    assert found.tolist() == expected


def test_what_cannot_be_done_is_refused():
    with pytest.raises(ConfigError, match="must be no sums over steps"):
        sparsify.dynamic(optax.sgd(0.1), drop="movement")
    with pytest.raises(ConfigError, match="steps must be an integer"):
        sparsify.dynamic(optax.sgd(0.1), steps=0)


@functools.cache
def batches():
    """Inputs and noise of every step."""
    rng = np.random.default_rng(1)
    shapes = (3000, 64, 200), (3000, 64, 10)
    return [jnp.asarray(rng.standard_normal(s, np.float32)) for s in shapes]


def share_of_the_true_support(inner, **options):
    """Learns a sparse teacher; returns the share of true ones among active weights."""
    rng = np.random.default_rng(0)
    true = np.zeros(2000, bool)
    true[rng.permutation(2000)[:200]] = True
    true = true.reshape(200, 10)
    signs = rng.choice([-1.0, 1.0], true.shape)
    size = rng.uniform(0.5, 1.5, true.shape)
    teacher = jnp.asarray(np.where(true, signs * size, 0), jnp.float32)
    tx = sparsify.dynamic(
        inner, distribution=Uniform(sparsity=0.9), steps=3000, every=50, **options
    )

    def step(carry, batch):
        params, state = carry
        inputs, noise = batch
        targets = inputs @ teacher + 0.05 * noise

        def loss(params):
            return jnp.mean(jnp.square(inputs @ params["w"] - targets))

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def learn(params, batches):
        return jax.lax.scan(step, (params, tx.init(params)), batches)[0]

    start = jnp.asarray(rng.normal(size=(200, 10)) / 14, jnp.float32)
    params, state = learn({"w": start}, batches())
    kept = np.asarray(sparsify.get_masks(state, params)["w"])
    assert kept.sum() == 200
    return (kept & true).sum() / 200


@pytest.mark.slow
@pytest.mark.acceptance("sparsity", 12)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_sparse_teacher_is_found_by_gradients_less_by_chance_not_by_staying(
    optimizer,
):
    inner = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2)}[optimizer]
    rigl = share_of_the_true_support(inner)
    at_random = share_of_the_true_support(inner, grow="random", regrow=False)
    static = share_of_the_true_support(inner, grow=None)
    assert rigl >= 0.95
    assert 0.4 <= at_random <= 0.8
    assert at_random <= rigl - 0.2
    assert abs(static - 0.1) <= 0.06
