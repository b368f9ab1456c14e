"""What every transform of the room must do, over the registry."""

import functools
import inspect as python_inspect
import random

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import core, optim
from hpcjax.core import per_device
from hpcjax.optim import contract, kfac, sparsify, tree_assertions
from hpcjax.optim.contract import Subject
from tests.optim import registry
from tests.optim.registry import REGISTRY

pytestmark = pytest.mark.smoke

# These give updates without a learning rate; the others are optimizers.
LINKS = {
    *(
        "add_weight_decay",
        "all_reduce_mean",
        "clip_global_norm",
        "graft",
        "graft_global",
    ),
    *("in_full_precision", "scale_by_jorge", "scale_by_momentum", "scale_by_shampoo"),
    *(
        "scale_by_smoothed_norm",
        "contributor_mean",
        "freeze_at_random",
        "scale_blocks",
        "scale_by_kfac",
        "scale_by_pipefisher",
    ),
    "scale_by_trust_ratio",
}
every_transform = pytest.mark.parametrize("name", sorted(REGISTRY))


@functools.cache
def _subject(name):
    return registry.subject(name)


def test_every_factory_of_transforms_is_registered():
    factories = set()
    rooms = optim, kfac, sparsify
    for value in [getattr(room, name) for room in rooms for name in room.__all__]:
        if not python_inspect.isfunction(value):
            continue
        returned = str(python_inspect.signature(value).return_annotation)
        if "GradientTransformation" in returned or "FromSgd" in returned:
            factories.add(value.__name__)
    assert {"sgd", "jorge", "graft", "jorge_from_sgd"} <= factories
    assert factories <= set(REGISTRY)


def _loss(kind, params):
    """A parabola, or Rosenbrock's valley, over a matrix and a vector."""
    x = jnp.concatenate([params["w"].ravel(), params["b"]])
    if kind == "parabola":
        target = jnp.linspace(-1.0, 2.0, x.size)
        return jnp.sum(jnp.square(x - target))
    return jnp.sum(100 * (x[1::2] - x[::2] ** 2) ** 2 + (1 - x[::2]) ** 2)


@pytest.mark.parametrize(
    ("kind", "rates", "steps"),
    [
        ("parabola", {"adamw": 0.05, "default": 0.02}, 1500),
        ("rosenbrock", {"adamw": 0.01, "lamb": 0.01, "default": 3e-4}, 20_000),
    ],
)
@pytest.mark.parametrize(
    "name",
    ["sgd", "adamw", "lamb", "jorge", "shampoo", "shampoo_newton", "jorge_grad_init"],
)
def test_optimizers_converge(name, kind, rates, steps):
    rate = rates.get(name, rates["default"])
    make = {
        "sgd": optim.sgd,
        "adamw": functools.partial(optim.adamw, weight_decay=0.0),
        "lamb": functools.partial(optim.lamb, weight_decay=0.0),
        "jorge": functools.partial(optim.jorge, update_every=5),
        "jorge_grad_init": functools.partial(optim.jorge, update_every=5, init="grad"),
        "shampoo": functools.partial(optim.shampoo, roots_every=10),
        "shampoo_newton": functools.partial(
            optim.shampoo, roots_every=10, root="newton"
        ),
    }[name]
    tx = make(optax.linear_schedule(rate, 0.01 * rate, steps))
    params = {"w": jnp.full((3, 2), -0.5), "b": jnp.zeros(2)}
    grad = jax.grad(functools.partial(_loss, kind))

    def body(carry, _):
        params, state = carry
        updates, state = tx.update(grad(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda c: jax.lax.scan(body, c, None, steps)[0])
    params, _ = run((params, tx.init(params)))
    found = np.concatenate([np.ravel(params["w"]), params["b"]])
    target = np.linspace(-1, 2, 8) if kind == "parabola" else np.ones(8)
    np.testing.assert_allclose(found, target, atol=3e-2)


# Finiteness has a test of its own; these transforms take parameters of any type.
OTHER_CHECKS = sorted(set(contract.CHECKS) - {"stays_finite"})
TAKES_ALL = {"add_weight_decay", "all_reduce_mean", "clip_global_norm"}
TAKES_ALL |= {"contributor_mean", "freeze_at_random", "keep_versions", "scale_blocks"}


# Each check holds quickly for a factory's plain form and one, drawn, of its variants.
VARIANTS = [
    [name for name in sorted(REGISTRY) if name.startswith(f"{factory}_")]
    for factory in ("jorge", "shampoo", "sgd")
]


def marks(check, name):
    others = [
        each
        for group in VARIANTS
        for each in {*group} - {random.Random(check).choice(group)}
    ]
    return [pytest.mark.slow] if name in others else []


@pytest.mark.parametrize(
    ("check", "name"),
    [
        pytest.param(check, name, marks=marks(check, name))
        for name in sorted(REGISTRY)
        for check in OTHER_CHECKS
        if not (check == "refuses_types" and name in TAKES_ALL)
        and check in contract.checks_of(_subject(name))
    ],
)
def test_the_contract_is_kept(check, name):
    contract.CHECKS[check](_subject(name))


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - LINKS))
def test_the_state_of_an_optimizer_has_what_is_like_the_parameters(name):
    assert contract.parameter_leaves(_subject(name)) > 0


def test_tree_map_params_with_rules_over_paths():
    tx, params = optim.scale_by_jorge(stacked=("conv",)), contract.parameters()
    state = tx.init(params)
    doubled = optax.tree_map_params(tx, lambda leaf: leaf + 1, state)
    np.testing.assert_array_equal(doubled.momentum["dense"]["kernel"], 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.5}),
        ("adamw", {}),
        ("lamb", {"weight_decay": 0.1, "clip_norm": 0.5}),
        ("jorge", {"weight_decay": 0.1, "update_every": 2}),
        ("shampoo", {"clip_norm": 0.5, "roots_every": 2}),
    ],
)
def test_hyperparameters_can_be_injected(name, options):
    params = {"kernel": jnp.ones((8, 3)), "bias": jnp.ones(3)}
    factory = getattr(optim, name)
    plain = factory(0.25, **options)
    injected = optax.inject_hyperparams(factory)(learning_rate=0.25, **options)
    expected, _ = jax.jit(plain.update)(params, plain.init(params), params)
    updates, state = jax.jit(injected.update)(params, injected.init(params), params)
    tree_assertions.assert_close(updates, expected, "updates")
    found = optim.inspect(state)
    assert float(found["learning_rate"]) == 0.25
    live = {key for key, value in options.items() if isinstance(value, float)}
    assert live <= set(found)


def _mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "jorge", "shampoo"])
def test_sharding_of_state_is_kept(name):
    tx = _subject(name).tx
    everywhere = NamedSharding(_mesh(), P())
    params = jax.device_put(contract.parameters(), everywhere)
    state = jax.device_put(tx.init(params), everywhere)
    _, after = jax.jit(tx.update)(params, state, params)
    tree_assertions.assert_same_shardings(state, after)


SQUARING = (
    *("adamw", "lamb", "lamb_stacked", "adagrad", "row_adagrad"),
    *("scale_by_adagrad", "scale_by_row_adagrad"),
)


@pytest.mark.faults(12)
@every_transform
def test_updates_are_finite_for_hard_gradients(name):
    contract.stays_finite(_subject(name))
    # Squares of gradients, which these keep sums of, are infinite from 1e19 on.
    if name not in SQUARING:
        assert tree_assertions.is_finite(contract.after_three(_subject(name), 1e20))


@pytest.mark.faults(12)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks("gradients that vanish", name))
        for name in sorted(REGISTRY)
    ],
)
@hypothesis.settings(max_examples=8)
@hypothesis.given(st.lists(st.sets(st.integers(0, 4), min_size=1), max_size=4))
def test_gradients_that_vanish_in_any_leaves_and_steps_do_no_harm(name, vanished):
    subject = _subject(name)
    params = subject.parameters()
    leaves, form = jax.tree.flatten(params)
    state = subject.tx.init(params)
    for places in vanished:
        given = [0 * leaf if i in places else leaf for i, leaf in enumerate(leaves)]
        gradients = jax.tree.unflatten(form, given)
        updates, state = subject.jitted(gradients, state, params)
        assert tree_assertions.is_finite((updates, state))


@pytest.mark.parametrize("name", sorted(LINKS - {"add_weight_decay"}))
def test_without_gradients_there_are_no_updates(name):
    updates, _ = contract.after_three(_subject(name), 0.0)
    assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["scale_by_jorge", "scale_by_momentum", "graft"])
def test_no_implicit_promotion_in_our_own_transforms(name):
    params = contract.parameters()
    tx = _subject(name).tx
    if name == "graft":
        jorge = optim.scale_by_jorge(update_every=2)
        tx = optim.graft(jorge, optax.identity())
    with jax.numpy_dtype_promotion("strict"):
        jax.jit(tx.update)(params, tx.init(params), params)


def test_same_path_twice_is_refused():
    leaf = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="paths of parameters must differ"):
        optim.scale_by_jorge().init({"a/b": leaf, "a": {"b": leaf}})


# Each check finds what it is for.


def per_leaf(update, init=lambda params: ()):
    def apply(updates, state, params=None):
        return jax.tree.map(update, updates), state

    return optax.GradientTransformation(init, apply)


def all_devices(gradient):
    try:
        return gradient * jax.lax.axis_size("data")
    except NameError:
        return gradient


def counting(updates, state, params=None):
    return updates, state + (1 if isinstance(state, float) else 1.0)


def twice(params):
    """A state that has one array in two places."""
    zero = jnp.zeros(())
    return {"sum": zero, "mean": zero}


def summing(updates, state, params=None):
    return updates, jax.tree.map(lambda total: total + 1, state)


def every(steps):
    """A factory that looks at a number which may be traced."""
    return optax.identity() if steps > 1 else optax.set_to_zero()


def by_key(params):
    """A state by JAX's own keys, which tell a variable from its value."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): jnp.ones(()) for path, _ in leaves}


def scale_by_key(updates, state, params=None):
    def scaled(path, leaf):
        return leaf * state[jax.tree_util.keystr(path)].astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(scaled, updates), state


BROKEN = {
    "compiles_once": optax.GradientTransformation(lambda params: 0, counting),
    "can_be_donated": optax.GradientTransformation(twice, summing),
    "same_under_jit": per_leaf(lambda g: g * (1 + isinstance(g, jax.core.Tracer))),
    "keeps_types": per_leaf(lambda g: g.astype(jnp.float32)),
    "starts_from_shapes": per_leaf(jnp.negative, lambda params: params["scale"] + 0),
    "marks_parameters": per_leaf(
        jnp.negative, lambda params: {"kernel": params.get("dense")}
    ),
    "composes": per_leaf(jnp.negative, lambda params: params["conv"]["bias"].size),
    "accumulates": optax.GradientTransformation(lambda params: 0, counting),
    "injects": Subject(optax.identity(), factory=functools.partial(every, 2)),
    "works_in_nnx": optax.GradientTransformation(by_key, scale_by_key),
    "same_when_sharded": per_leaf(all_devices),
    "stays_finite": per_leaf(lambda g: g / jnp.linalg.norm(g)),
    "takes_unusual_shapes": per_leaf(lambda g: g[..., :3] if g.ndim < 5 else g.T),
    "refuses_types": optax.sgd(0.1),
}


@pytest.mark.parametrize("check", contract.CHECKS)
def test_a_transform_that_breaks_the_contract_is_found(check):
    errors = AssertionError, AttributeError, IndexError, KeyError, TypeError
    broken = BROKEN[check]
    with pytest.raises(errors):
        contract.CHECKS[check](
            broken if isinstance(broken, Subject) else Subject(broken)
        )


def test_checks_can_be_left_out_and_a_failure_names_its_check():
    made = optim.check_contract(optax.identity(), skip=["refuses_types"])
    assert set(made) == set(contract.CHECKS) - {"refuses_types", "injects"}
    rest = [name for name in contract.CHECKS if name not in ("injects", "composes")]
    trace = functools.partial(optax.trace, 0.9)
    options = {"params": {"w": jnp.ones(2)}, "factory": trace, "skip": rest}
    assert optim.check_contract(trace(), **options) == ("composes", "injects")
    with pytest.raises(AssertionError, match="not refused") as caught:
        optim.check_contract(optax.identity())
    assert "'refuses_types' does not hold" in caught.value.__notes__[0]


def worker(axis=None, rate=0.1, share=1.0):
    """SGD on a model of one's own, averaged after each step, as a transform.

    Its state, the gradients that it has seen, differs from device to device.
    """

    def init(params):
        return per_device.wrap(optax.tree.zeros_like(params), axis)

    def update(updates, state, params=None):
        moved = jax.tree.map(lambda p, g: p - rate * g, params, updates)
        seen = jax.tree.map(jnp.add, per_device.unwrap(state), updates)
        if axis is not None:
            moved = jax.lax.pmean(core.vary(moved, axis), axis)
        steps = jax.tree.map(lambda m, p: share * m - share * p, moved, params)
        return steps, per_device.wrap(seen, axis)

    return optax.GradientTransformation(init, update)


def test_a_worker_with_a_model_of_its_own_can_be_checked():
    subject = Subject(worker(), sharded=worker("data"))
    rest = set(contract.checks_of(subject)) - {"refuses_types"}
    for check in sorted(rest):
        contract.CHECKS[check](subject)
    with pytest.raises(AssertionError, match="several devices and on one"):
        contract.same_when_sharded(Subject(worker(), sharded=worker("data", share=0.5)))
