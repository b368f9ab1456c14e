"""Pruning while training: exact zeros, masks on schedule, any optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import optim
from hpcjax.core import ConfigError
from hpcjax.core.structures import NM, Block
from hpcjax.optim import sparsify
from hpcjax.optim.sparsify import Global, Lamp, Linear, OneShot, Uniform

STEPS = 9
DUE = (2, 4, 6)
SCHEDULE = Linear(begin=2, every=2, updates=2)
COUNTS = {"a": (96, 60, 24), "b": (32, 20, 8)}  # of 96 and 32, at 0, 3/8 and 3/4


def parameters():
    rng = np.random.default_rng(0)
    shapes = {"a": (12, 8), "b": (8, 4), "bias": (4,)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def gradients(step):
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), parameters()
    )


def train(tx, steps=STEPS):
    """Returns how often a step was traced, and (params, state) around each step."""
    params = parameters()
    state = tx.init(params)
    history, traced = [(params, state)], []

    @jax.jit
    def step(updates, state, params):
        traced.append(True)
        return tx.update(updates, state, params)

    for number in range(steps):
        updates, state = step(gradients(number), state, params)
        params = optax.apply_updates(params, updates)
        history.append((params, state))
    return len(traced), history


def largest(scores, k):
    """The k largest; there are no equal ones."""
    return scores >= np.sort(scores, axis=None)[-k]


INNER = {
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "jorge": lambda: optim.jorge(0.1, weight_decay=0.1, update_every=2),
}


@pytest.fixture(scope="module", params=sorted(INNER))
def run(request):
    tx = sparsify.prune(
        INNER[request.param](),
        distribution=Uniform(sparsity=0.75),
        schedule=SCHEDULE,
        packed=request.param == "sgd",
    )
    return train(tx)


@pytest.mark.quick("sgd", "adamw")
@pytest.mark.acceptance("sparsity", 6)
def test_pruned_weights_are_exactly_zero_after_every_step(run):
    _, history = run
    for params, state in history[1:]:
        kept = sparsify.get_masks(state, params)
        for name in ("a", "b"):
            assert not np.any(np.asarray(params[name])[~np.asarray(kept[name])])
        assert kept["bias"] is None
    assert np.all(history[-1][0]["bias"])


@pytest.mark.acceptance("sparsity", 2)
@pytest.mark.acceptance("sparsity", 5)
def test_masks_change_on_schedule_alone_to_exact_counts_in_one_program(run):
    traced, history = run
    assert traced == 1
    for name in ("a", "b"):
        kept = np.ones(history[0][0][name].shape, bool)
        for number in range(STEPS):
            if number in DUE:
                count = COUNTS[name][DUE.index(number)]
                kept = largest(np.abs(history[number][0][name]), count)
            params, state = history[number + 1]
            found = np.asarray(sparsify.get_masks(state, params)[name])
            np.testing.assert_array_equal(found, kept)
        assert kept.sum() == COUNTS[name][-1]


@pytest.mark.parametrize("packed", [False, True])
def test_masks_are_found_where_the_transform_has_a_part_of_the_parameters(packed):
    half = {"distribution": Uniform(sparsity=0.5), "schedule": OneShot()}
    tx = sparsify.prune(optax.sgd(0.1), packed=packed, **half)
    some = optax.masked(tx, {"a": True, "b": False, "bias": False})
    labels = {"a": "pruned", "b": "dense", "bias": "dense"}
    for whole in (some, optax.partition({"pruned": tx, "dense": optax.sgd(1)}, labels)):
        params, state = train(whole, 1)[1][-1]
        kept = sparsify.get_masks(state, params)
        assert int(kept["a"].sum()) == 48
        assert kept["b"] is kept["bias"] is None


def test_moments_of_what_is_pruned_are_zero_if_gradients_are_sparse():
    for sparse in (True, False):
        tx = sparsify.prune(
            optax.adam(0.1),
            distribution=Uniform(sparsity=0.75),
            schedule=SCHEDULE,
            sparse_grads=sparse,
        )
        params, state = train(tx)[1][-1]
        kept = sparsify.get_masks(state, params)
        for moment in ("mu", "nu"):
            tree = optax.tree_utils.tree_get(state, moment)
            off = np.asarray(tree["a"])[~np.asarray(kept["a"])]
            assert np.all(off == 0) == sparse
            assert np.all(np.asarray(tree["a"])[np.asarray(kept["a"])] != 0)


def test_updates_that_are_no_numbers_do_not_reach_what_is_pruned():
    broken = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: u * jnp.nan, updates)
    )
    tx = sparsify.prune(broken, schedule=OneShot(), sparse_grads=False)
    params = parameters()
    updates, state = tx.update(params, tx.init(params), params)
    kept = np.asarray(sparsify.get_masks(state, params)["a"])
    moved = np.asarray(optax.apply_updates(params, updates)["a"])
    assert np.all(moved[~kept] == 0)
    assert np.all(np.isnan(moved[kept]))


SCORES = {
    "taylor": lambda w, g: np.abs(w[-1] * g[-1]),
    "taylor_squared": lambda w, g: sum((a * b) ** 2 for a, b in zip(w, g, strict=True)),
    "movement": lambda w, g: -sum(a * b for a, b in zip(w, g, strict=True)),
    "gradient": lambda w, g: np.abs(g[-1]),
    # Before the third step: 0.5 · g₀ + g₁.
    "momentum": lambda w, g: np.abs(0.5 * g[0] + g[1]),
}


@pytest.mark.acceptance("sparsity", 1)
@pytest.mark.parametrize("score", sorted(SCORES))
def test_scores_are_those_of_numpy(score):
    tx = sparsify.prune(
        optax.sgd(0.1, momentum=0.5), score=score, schedule=OneShot(step=2)
    )
    _, history = train(tx, 5)
    w = [np.asarray(params["a"]) for params, _ in history[:3]]
    g = [np.asarray(gradients(number)["a"]) for number in range(3)]
    expected = largest(SCORES[score](w, g), 10)
    for params, state in history[3:]:
        np.testing.assert_array_equal(sparsify.get_masks(state, params)["a"], expected)


@pytest.mark.acceptance("sparsity", 1)
def test_a_random_score_is_of_the_path_alone():
    def masks_of(exclude):
        tx = sparsify.prune(
            optax.sgd(0.1), score="random", schedule=OneShot(), exclude=exclude
        )
        params = parameters()
        _, state = tx.update(params, tx.init(params), params)
        return sparsify.get_masks(state, params)

    both, one = masks_of(()), masks_of(("b$",))
    np.testing.assert_array_equal(both["a"], one["a"])
    assert both["a"].sum() == 10
    assert one["b"] is None


@pytest.mark.acceptance("sparsity", 2)
@pytest.mark.parametrize("shares", [Global(sparsity=0.8), Lamp(sparsity=0.8)])
def test_over_all_layers_the_total_is_exact(shares):
    params = parameters()
    tx = sparsify.prune(optax.sgd(0.1), distribution=shares, schedule=OneShot())
    _, state = jax.jit(tx.update)(params, tx.init(params), params)
    found = sparsify.get_masks(state, params)
    scores = {name: np.abs(np.asarray(params[name])) for name in ("a", "b")}
    if isinstance(shares, Lamp):
        for name, size in scores.items():
            square = size.ravel().astype(float) ** 2
            rest = [square[square >= one].sum() for one in square]
            scores[name] = (square / rest).reshape(size.shape)
    both = largest(np.concatenate([s.ravel() for s in scores.values()]), 26)
    np.testing.assert_array_equal(found["a"], both[:96].reshape(12, 8))
    np.testing.assert_array_equal(found["b"], both[96:].reshape(8, 4))


@pytest.mark.acceptance("sparsity", 4)
def test_structures_hold_while_training():
    gradual = Linear(begin=0, every=1, updates=2)
    tx = sparsify.prune(optax.adam(0.1), structure=NM(n=1, m=4), schedule=gradual)
    _, history = train(tx, 3)
    for (params, state), each in zip(history[1:], (4, 3, 1), strict=True):
        kept = np.asarray(sparsify.get_masks(state, params)["a"])
        assert (kept.reshape(3, 4, 8).sum(1) == each).all()
    tx = sparsify.prune(
        optax.adam(0.1),
        structure=Block(inputs=4, outputs=2),
        distribution=Uniform(sparsity=0.5),
        schedule=OneShot(),
    )
    params, state = train(tx, 1)[1][-1]
    blocks = np.asarray(sparsify.get_masks(state, params)["a"]).reshape(3, 4, 4, 2)
    assert set(blocks.sum((1, 3)).ravel()) == {0, 8}
    assert blocks.sum() == 48


def test_alternating_phases_make_the_network_dense_again():
    turns = sparsify.Alternating(begin=1, sparse=2, dense=2, rounds=1)
    tx = sparsify.prune(
        optax.sgd(0.1), distribution=Uniform(sparsity=0.75), schedule=turns
    )
    _, history = train(tx, 7)
    found = [int(sparsify.get_masks(s, p)["a"].sum()) for p, s in history]
    assert found == [96, 96, 24, 24, 96, 96, 24, 24]
    assert np.count_nonzero(history[5][0]["a"]) == 96


def test_what_cannot_be_done_is_refused():
    params = parameters()
    tx = sparsify.prune(optax.sgd(0.1))
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(params, tx.init(params))
    with pytest.raises(ConfigError, match=r"one of .*did you mean 'taylor'"):
        sparsify.prune(optax.sgd(0.1), score="tayler")
    momentum = sparsify.prune(optax.sgd(0.1), score="momentum", schedule=OneShot())
    with pytest.raises(ConfigError, match="an optimizer whose state has one of trace"):
        momentum.update(params, momentum.init(params), params)
    with pytest.raises(ConfigError, match="must have one transform that prunes: got 0"):
        sparsify.get_masks(optax.sgd(0.1).init(params), params)


@pytest.mark.quick("prune")
@pytest.mark.acceptance("sparsity", 8)
@pytest.mark.parametrize("kind", ["prune", "dynamic"])
def test_parameters_that_are_split_both_ways_are_pruned_as_on_one_device(kind):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split = NamedSharding(mesh, P("x", "y"))
    half = {"distribution": Uniform(sparsity=0.5), "include": ("a|b",)}
    tx = {
        "prune": sparsify.prune(optax.adam(0.1), schedule=OneShot(step=1), **half),
        "dynamic": sparsify.dynamic(optax.adam(0.1), steps=4, every=1, **half),
    }[kind]
    alone = {k: parameters()[k] for k in ("a", "b")}
    shared = jax.device_put(alone, split)
    step = jax.jit(tx.update)
    runs = [(params, tx.init(params)) for params in (alone, shared)]
    for number in range(3):
        slope = {k: gradients(number)[k] for k in alone}
        slopes = slope, jax.device_put(slope, split)
        made = [step(g, s, p) for g, (p, s) in zip(slopes, runs, strict=True)]
        runs = [
            (optax.apply_updates(params, updates), state)
            for (params, _), (updates, state) in zip(runs, made, strict=True)
        ]
    first, second = (sparsify.get_masks(state, params) for params, state in runs)
    for name in alone:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(runs[0][0][name], runs[1][0][name], rtol=1e-6)
    assert runs[1][0]["a"].sharding.is_equivalent_to(split, 2)


@pytest.mark.acceptance("sparsity", 2)
@pytest.mark.parametrize("kind", ["prune", "dynamic"])
def test_the_layers_of_a_stack_are_pruned_one_by_one(kind):
    rng = np.random.default_rng(0)
    shapes = {"kernel": (3, 8, 4), "bias": (3, 4)}
    blocks = {
        k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()
    }
    blocks["kernel"] *= jnp.array([1.0, 10.0, 100.0])[:, None, None]
    params = {"blocks": blocks}
    half = {"distribution": Uniform(sparsity=0.75), "stacked": ("^blocks/",)}
    tx = {
        "prune": sparsify.prune(optax.sgd(0.1), schedule=OneShot(), **half),
        "dynamic": sparsify.dynamic(optax.sgd(0.1), steps=9, every=1, **half),
    }[kind]
    state, step, found = tx.init(params), jax.jit(tx.update), []
    for _ in range(3):
        _, state = step(params, state, params)
        kept = sparsify.get_masks(state, params)["blocks"]
        assert kept["bias"] is None
        assert kept["kernel"].sum((1, 2)).tolist() == [8, 8, 8]
        found.append(np.asarray(kept["kernel"]))
    if kind == "prune":
        for layer, mask in zip(blocks["kernel"], found[0], strict=True):
            np.testing.assert_array_equal(mask, largest(np.abs(layer), 8))
    else:
        assert not np.array_equal(found[0], found[2])
    with pytest.raises(ConfigError, match="stacked must match parameters"):
        sparsify.prune(optax.sgd(0.1), stacked=("layers",)).init(params)
