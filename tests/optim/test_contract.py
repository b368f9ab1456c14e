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
}
every_transform = pytest.mark.parametrize("name", sorted(REGISTRY))


def _params(dtype=jnp.float32):
    """Few shapes, for compiling takes the time; both kernels are 8×3 matrices."""
    shapes = {
        "conv": {"kernel": (2, 2, 2, 3), "bias": (3,)},
        "dense": {"kernel": (8, 3)},
        "empty": (0, 3),
        "scale": (),
    }
    count = iter(range(100))

    def make(shape):
        rng = np.random.default_rng(next(count))
        return jnp.asarray(rng.normal(size=shape), dtype)

    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def _tx(name):
    return REGISTRY[name]()


@functools.cache
def _jitted(name):
    """The update under jit, with extra arguments that nobody asked for."""
    tx = _tx(name)
    return jax.jit(lambda g, s, p: tx.update(g, s, p, value=1.0, unknown=g))


def _assert_close(tree, other):
    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=0) + 1e-30
        np.testing.assert_allclose(a / scale, b / scale, rtol=2e-4, atol=2e-5)

    jax.tree.map(check, tree, other)


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
        ("rosenbrock", {"adamw": 0.01, "default": 3e-4}, 20_000),
    ],
)
@pytest.mark.parametrize(
    "name", ["sgd", "adamw", "jorge", "shampoo", "shampoo_newton", "jorge_grad_init"]
)
def test_optimizers_converge(name, kind, rates, steps):
    rate = rates.get(name, rates["default"])
    make = {
        "sgd": optim.sgd,
        "adamw": functools.partial(optim.adamw, weight_decay=0.0),
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


def _signature(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]


@every_transform
def test_second_call_does_not_compile_and_extra_arguments_are_accepted(name):
    params, update = _params(), _jitted(name)
    _, state = update(params, _tx(name).init(params), params)
    before = update._cache_size()
    update(params, state, params)
    assert update._cache_size() == before


@every_transform
def test_jit_equals_no_jit(name):
    tx = _tx(name)
    params = {"kernel": jnp.asarray([[1.0, 2.0], [3.0, 5.0]])}
    state = tx.init(params)
    plain, next_plain = tx.update(params, state, params)
    jitted, next_jitted = jax.jit(tx.update)(params, state, params)
    _assert_close(plain, jitted)
    assert _signature(next_plain) == _signature(next_jitted)


@every_transform
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_and_structure_of_updates_and_state_are_kept(name, dtype):
    tx, params = _tx(name), _params(dtype)
    state = tx.init(params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert _signature(updates) == _signature(params)
    assert _signature(after) == _signature(state)


@every_transform
def test_init_from_shapes_gives_the_same_structure(name):
    tx, params = _tx(name), _params()
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    expected = _signature(tx.init(params))
    assert _signature(jax.eval_shape(tx.init, shapes)) == expected
    assert _signature(tx.init(shapes)) == expected


@every_transform
def test_tree_map_params_reaches_what_is_like_the_parameters(name):
    tx, params = _tx(name), _params()
    state = tx.init(params)
    names = jax.tree.map(lambda p: "parameter", params)
    marked = optax.tree_map_params(
        tx, lambda _, name: name, state, names, transform_non_params=lambda _: "other"
    )
    found = jax.tree.leaves(marked).count("parameter")
    assert found % len(jax.tree.leaves(params)) == 0
    if name not in LINKS:
        assert found > 0


def test_tree_map_params_with_rules_over_paths():
    tx, params = optim.scale_by_jorge(stacked=("conv",)), _params()
    state = tx.init(params)
    doubled = optax.tree_map_params(tx, lambda leaf: leaf + 1, state)
    np.testing.assert_array_equal(doubled.momentum["dense"]["kernel"], 1)


@every_transform
def test_works_under_masked_partition_and_chain(name):
    params = _params()
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    labels = jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)
    tx = optax.chain(
        optax.masked(_tx(name), mask),
        optax.partition({"a": _tx(name), "b": optax.identity()}, labels),
    )
    state = tx.init(params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert _signature(updates) == _signature(params)
    assert _signature(after) == _signature(state)
    assert all(np.ndim(value) == 0 for value in optim.inspect(state).values())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.5}),
        ("adamw", {}),
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
    _assert_close(updates, expected)
    found = optim.inspect(state)
    assert float(found["learning_rate"]) == 0.25
    live = {key for key, value in options.items() if isinstance(value, float)}
    assert live <= set(found)


def _mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("name", ["sgd", "adamw", "jorge", "shampoo"])
def test_sharding_of_state_is_kept(name):
    tx = _tx(name)
    everywhere = NamedSharding(_mesh(), P())
    params = jax.device_put(_params(), everywhere)
    state = jax.device_put(tx.init(params), everywhere)
    _, after = jax.jit(tx.update)(params, state, params)
    _assert_same_shardings(state, after)


def _assert_same_shardings(old, new):
    def same(a, b):
        assert b.sharding.is_equivalent_to(a.sharding, a.ndim)

    jax.tree.map(same, old, new)


@every_transform
def test_inside_shard_map_equals_the_single_device_run(name):
    mesh, params = _mesh(), _params()
    # With jax 0.11.2 XLA's compiler for CPU crashes on any arithmetic with an empty
    # array in a program for several devices, with or without a collective.
    del params["empty"]
    noise = np.random.default_rng(0)
    local = jax.tree.map(
        lambda p: jnp.asarray(noise.normal(size=(8, *p.shape)), p.dtype), params
    )
    tx = optax.chain(optim.all_reduce_mean("data"), _tx(name))

    def step(gradients, state, params):
        mine = jax.tree.map(lambda g: g[0], gradients)
        return tx.update(mine, state, params)

    specs = (P("data"), P(), P())
    sharded = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    )
    mean = jax.tree.map(lambda g: g.mean(axis=0), local)
    everywhere = NamedSharding(mesh, P())
    local = jax.device_put(local, NamedSharding(mesh, P("data")))
    placed, first = jax.device_put((params, tx.init(params)), everywhere)
    state, alone = first, _tx(name).init(params)
    for _ in range(2):
        updates, state = sharded(local, state, placed)
        expected, alone = _jitted(name)(mean, alone, params)
    _assert_close(updates, expected)
    _assert_same_shardings(first, state)
    assert sharded._cache_size() == 1


def _gradients(kind):
    params = _params()
    if kind == "rank-deficient":
        return jax.tree.map(jnp.ones_like, params)
    return jax.tree.map(lambda p: float(kind) * p, params)


@every_transform
@pytest.mark.parametrize("kind", ["0", "1e-20", "1e20", "rank-deficient"])
def test_updates_are_finite_for_hard_gradients(name, kind):
    params = _params()
    state = _tx(name).init(params)
    for _ in range(3):
        updates, state = _jitted(name)(_gradients(kind), state, params)
    # Adam squares the gradients: its second moment is infinite from 1e19 on.
    trees = (updates,) if (name, kind) == ("adamw", "1e20") else (updates, state)
    for tree in trees:
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))
    if kind == "0" and name in LINKS - {"add_weight_decay"}:
        assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(updates))


@every_transform
def test_unusual_shapes_and_no_parameters_at_all(name):
    tx = _tx(name)
    shapes = ((0,), (3, 1), (1, 3), (2, 3, 4), (1, 2, 1, 2, 3), ())
    params = {str(shape): jnp.ones(shape) for shape in shapes}
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert _signature(updates) == _signature(params)
    assert tx.update({}, tx.init({}), {})[0] == {}


@pytest.mark.parametrize(
    "name",
    sorted(set(REGISTRY) - {"add_weight_decay", "all_reduce_mean", "clip_global_norm"}),
)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_complex_and_integer_parameters_are_refused(name, dtype):
    with pytest.raises(TypeError, match="dense/kernel"):
        _tx(name).init({"dense": {"kernel": jnp.ones((2, 2), dtype)}})


@pytest.mark.parametrize("name", ["scale_by_jorge", "scale_by_momentum", "graft"])
def test_no_implicit_promotion_in_our_own_transforms(name):
    params = _params()
    tx = optim.scale_by_jorge(update_every=2) if name == "graft" else _tx(name)
    if name == "graft":
        tx = optim.graft(tx, optax.identity())
    with jax.numpy_dtype_promotion("strict"):
        jax.jit(tx.update)(params, tx.init(params), params)


def test_same_path_twice_is_refused():
    leaf = jnp.ones((2, 2))
    with pytest.raises(ValueError, match="paths of parameters must differ"):
        optim.scale_by_jorge().init({"a/b": leaf, "a": {"b": leaf}})
