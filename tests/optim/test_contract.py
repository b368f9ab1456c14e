"""What every transform of the room must do, over the registry."""

import functools
import inspect as python_inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax import optim
from hpcjax.optim import contract
from hpcjax.optim.registry import REGISTRY

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
    "scale_by_trust_ratio",
}
every_transform = pytest.mark.parametrize("name", sorted(REGISTRY))


@functools.cache
def _tx(name):
    return REGISTRY[name]()


def test_every_factory_of_transforms_is_registered():
    factories = set()
    for public in optim.__all__:
        value = getattr(optim, public)
        if not python_inspect.isfunction(value):
            continue
        returned = str(python_inspect.signature(value).return_annotation)
        if "GradientTransformation" in returned or "FromSgd" in returned:
            factories.add(public)
    assert {"sgd", "jorge", "graft", "jorge_from_sgd"} <= factories
    # These are made for one tree of parameters; tests/optim/test_partial_backward.py.
    assert factories - {"contributor_mean", "scale_blocks"} <= set(REGISTRY)


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


@pytest.mark.parametrize(
    ("check", "name"),
    [
        (check, name)
        for name in sorted(REGISTRY)
        for check in OTHER_CHECKS
        if not (check == "refuses_types" and name in TAKES_ALL)
    ],
)
def test_the_contract_is_kept(check, name):
    contract.CHECKS[check](_tx(name))


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - LINKS))
def test_the_state_of_an_optimizer_has_what_is_like_the_parameters(name):
    assert contract.parameter_leaves(_tx(name)) > 0


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
    contract.assert_close(updates, expected, "updates")
    found = optim.inspect(state)
    assert float(found["learning_rate"]) == 0.25
    live = {key for key, value in options.items() if isinstance(value, float)}
    assert live <= set(found)


def _mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "jorge", "shampoo"])
def test_sharding_of_state_is_kept(name):
    tx = _tx(name)
    everywhere = NamedSharding(_mesh(), P())
    params = jax.device_put(contract.parameters(), everywhere)
    state = jax.device_put(tx.init(params), everywhere)
    _, after = jax.jit(tx.update)(params, state, params)
    contract.assert_same_shardings(state, after)


@pytest.mark.faults(12)
@every_transform
def test_updates_are_finite_for_hard_gradients(name):
    contract.stays_finite(_tx(name))
    # Adam squares the gradients: its second moment is infinite from 1e19 on.
    if name not in ("adamw", "lamb", "lamb_stacked"):
        assert contract.finite(contract.after_three(_tx(name), 1e20))


@pytest.mark.parametrize("name", sorted(LINKS - {"add_weight_decay"}))
def test_without_gradients_there_are_no_updates(name):
    updates, _ = contract.after_three(_tx(name), 0.0)
    assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["scale_by_jorge", "scale_by_momentum", "graft"])
def test_no_implicit_promotion_in_our_own_transforms(name):
    params = contract.parameters()
    tx = optim.scale_by_jorge(update_every=2) if name == "graft" else _tx(name)
    if name == "graft":
        tx = optim.graft(tx, optax.identity())
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


BROKEN = {
    "compiles_once": optax.GradientTransformation(lambda params: 0, counting),
    "same_under_jit": per_leaf(lambda g: g * (1 + isinstance(g, jax.core.Tracer))),
    "keeps_types": per_leaf(lambda g: g.astype(jnp.float32)),
    "starts_from_shapes": per_leaf(jnp.negative, lambda params: params["scale"] + 0),
    "marks_parameters": per_leaf(
        jnp.negative, lambda params: {"kernel": params.get("dense")}
    ),
    "composes": per_leaf(jnp.negative, lambda params: params["conv"]["bias"].size),
    "same_when_sharded": per_leaf(all_devices),
    "stays_finite": per_leaf(lambda g: g / jnp.linalg.norm(g)),
    "takes_unusual_shapes": per_leaf(lambda g: g[..., :3] if g.ndim < 5 else g.T),
    "refuses_types": optax.sgd(0.1),
}


@pytest.mark.parametrize("check", contract.CHECKS)
def test_a_transform_that_breaks_the_contract_is_found(check):
    with pytest.raises((AssertionError, AttributeError, IndexError, TypeError)):
        contract.CHECKS[check](BROKEN[check])


def test_checks_can_be_left_out_and_a_failure_names_its_check():
    made = optim.check_contract(optax.identity(), skip=["refuses_types"])
    assert set(made) == set(contract.CHECKS) - {"refuses_types"}
    with pytest.raises(AssertionError, match="not refused") as caught:
        optim.check_contract(optax.identity())
    assert "'refuses_types' does not hold" in caught.value.__notes__[0]
