"""What every transform must do: the suite checks the registry, and you may check yours.

Each check takes a transform, as optax has them, and raises AssertionError with the rule
that it breaks. Together they are what it takes to work in the training loop, on one
device or many, and with the rest of optax.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax.optim._inspect import inspect
from hpcjax.optim.all_reduce import all_reduce_mean

Transform = optax.GradientTransformation


def check_contract(tx: Transform, *, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Checks a transform against everything that this room's transforms must do.

    Args:
      tx: the transform, or optimizer, at any size of its settings.
      skip: names of checks that cannot hold for it.

    Returns:
      The names of the checks that were made.

    Raises:
      AssertionError: a rule is broken. What the transform itself raises comes through;
        a note names the check.

    Examples:
      >>> import optax
      >>> "same_under_jit" in check_contract(optax.sgd(0.1), skip=["refuses_types"])
      True
    """
    made = tuple(name for name in CHECKS if name not in skip)
    for name in made:
        try:
            CHECKS[name](tx)
        except Exception as error:
            error.add_note(f"the contract's check {name!r} does not hold")
            raise
    return made


def compiles_once(tx: Transform) -> None:
    """The program of one step takes the next; unknown extra arguments are taken."""
    params, first = parameters(), tx.init(parameters())
    update = jitted(tx).lower(params, first, params).compile()
    _, state = update(params, first, params)
    _run_again(update, params, state, params)
    _assert_alike(state, first, "states of two steps")


def same_under_jit(tx: Transform) -> None:
    """Updates and state are the same with jit as without."""
    params = {"kernel": jnp.asarray([[1.0, 2.0], [3.0, 5.0]])}
    state = tx.init(params)
    plain, next_plain = tx.update(params, state, params)
    compiled, next_compiled = jax.jit(tx.update)(params, state, params)
    assert_close(plain, compiled, "updates with and without jit")
    _assert_alike(next_plain, next_compiled, "states with and without jit")


def keeps_types(tx: Transform) -> None:
    """Updates are like the parameters, states like the state, in float32 and bfloat16.

    That is: in structure, shapes and dtypes.
    """
    for dtype in (jnp.float32, jnp.bfloat16):
        params = parameters(dtype)
        state = tx.init(params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
        _assert_alike(updates, params, f"updates and parameters in {dtype.__name__}")
        _assert_alike(after, state, f"states of two steps in {dtype.__name__}")


def starts_from_shapes(tx: Transform) -> None:
    """`init` takes shapes as well as arrays; the states are alike."""
    params = parameters()
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = tx.init(params)
    _assert_alike(jax.eval_shape(tx.init, shapes), state, "traced and real states")
    _assert_alike(tx.init(shapes), state, "states from shapes and from arrays")


def marks_parameters(tx: Transform) -> None:
    """`optax.tree_map_params` finds the state's trees that are like the parameters."""
    count = len(jax.tree.leaves(parameters()))
    found = parameter_leaves(tx)
    assert found % count == 0, f"{found} leaves of {count} parameters are marked"


def parameter_leaves(tx: Transform) -> int:
    """Returns how many leaves of the state are marked as like a parameter."""
    params = parameters()
    names = jax.tree.map(lambda _: "parameter", params)
    transform: Any = tx
    marked = optax.tree_map_params(
        transform,
        lambda _, name: name,
        tx.init(params),
        names,
        transform_non_params=lambda _: "other",
    )
    return jax.tree.leaves(marked).count("parameter")


def composes(tx: Transform) -> None:
    """It works within optax's `masked`, `partition` and `chain`; `inspect` reads it."""
    params = parameters()
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    labels = jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)
    both = optax.chain(
        optax.masked(tx, mask),
        optax.partition({"a": tx, "b": optax.identity()}, labels),
    )
    state = both.init(params)
    updates, after = jax.eval_shape(both.update, params, state, params)
    _assert_alike(updates, params, "composed updates and parameters")
    _assert_alike(after, state, "composed states of two steps")
    figures = inspect(state)
    wrong = [name for name, value in figures.items() if np.ndim(value)]
    assert not wrong, f"inspect must find scalars: got {wrong}"


def same_when_sharded(tx: Transform) -> None:
    """Within `shard_map` over all devices, gradients averaged, it is as on one."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    params = parameters()
    # With jax 0.11.2 XLA's compiler for CPU crashes on any arithmetic with an empty
    # array in a program for several devices, with or without a collective.
    del params["empty"]
    noise, count = np.random.default_rng(0), jax.device_count()
    local = jax.tree.map(
        lambda p: jnp.asarray(noise.normal(size=(count, *p.shape)), p.dtype), params
    )
    joint = optax.chain(all_reduce_mean("data"), tx)

    def step(gradients, state, params):
        mine = jax.tree.map(lambda g: g[0], gradients)
        return joint.update(mine, state, params)

    specs = (P("data"), P(), P())
    sharded: Any = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=True)
    )
    mean = jax.tree.map(lambda g: g.mean(axis=0), local)
    everywhere = NamedSharding(mesh, P())
    local = jax.device_put(local, NamedSharding(mesh, P("data")))
    placed, first = jax.device_put((params, joint.init(params)), everywhere)
    program = sharded.lower(local, first, placed).compile()
    _, state = program(local, first, placed)
    updates, state = _run_again(program, local, state, placed)
    _, alone = jitted(tx)(mean, tx.init(params), params)
    expected, _ = jitted(tx)(mean, alone, params)
    assert_close(updates, expected, "updates on several devices and on one")
    assert_same_shardings(first, state)


def stays_finite(tx: Transform) -> None:
    """Three gradients of 0, 1e-20, 1e20, or of rank one, give finite updates.

    So is the state, but for 1e20, whose square no float32 holds.
    """
    for scale in (0.0, 1e-20, 1e20, None):
        updates, state = after_three(tx, scale)
        kind = "of rank one" if scale is None else f"{scale:g}"
        assert finite(updates), f"updates are not finite for gradients {kind}"
        if scale != 1e20:
            assert finite(state), f"the state is not finite for gradients {kind}"


def after_three(tx: Transform, scale: float | None) -> tuple[Any, Any]:
    """Returns updates and state after three gradients of a scale; None for rank one."""
    params = parameters()
    gradients = jax.tree.map(
        lambda p: jnp.ones_like(p) if scale is None else scale * p, params
    )
    updates, state = params, tx.init(params)
    for _ in range(3):
        updates, state = jitted(tx)(gradients, state, params)
    return updates, state


def takes_unusual_shapes(tx: Transform) -> None:
    """Empty, scalar and many-dimensional parameters work, and none at all."""
    shapes = ((0,), (3, 1), (1, 3), (2, 3, 4), (1, 2, 1, 2, 3), ())
    params = {str(shape): jnp.ones(shape) for shape in shapes}
    updates, _ = jax.eval_shape(tx.update, params, tx.init(params), params)
    _assert_alike(updates, params, "updates and parameters")
    assert tx.update({}, tx.init({}), {})[0] == {}, "no parameters, but updates"


def refuses_types(tx: Transform) -> None:
    """`init` refuses complex and integer parameters with TypeError and their path."""
    for dtype in (jnp.int32, jnp.complex64):
        params = {"dense": {"kernel": jnp.ones((2, 2), dtype)}}
        try:
            tx.init(params)
        except TypeError as error:
            told = str(error)
        else:
            raise AssertionError(f"{dtype.__name__} parameters are not refused")
        assert "dense/kernel" in told, f"the refusal does not name the path: {told}"


CHECKS: dict[str, Callable[[Transform], None]] = {
    check.__name__: check
    for check in (
        *(compiles_once, same_under_jit, keeps_types, starts_from_shapes),
        *(marks_parameters, composes, same_when_sharded, stays_finite),
        *(takes_unusual_shapes, refuses_types),
    )
}


def parameters(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Returns few shapes, for compiling takes the time; both kernels are 8×3."""
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


@functools.lru_cache(maxsize=64)
def jitted(tx: Transform) -> Any:
    """Returns the update under jit, with extra arguments that nobody asked for."""
    known = optax.with_extra_args_support(tx)
    return jax.jit(lambda g, s, p: known.update(g, s, p, value=1.0, unknown=g))


def _run_again(program: Any, *arguments: Any) -> Any:
    """Runs a compiled program, which takes only what it was compiled for."""
    try:
        return program(*arguments)
    except (TypeError, ValueError) as error:
        raise AssertionError("the second call needs another program") from error


def finite(tree: Any) -> bool:
    """Says whether all of a tree is finite."""
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(tree))


def assert_close(tree: Any, other: Any, what: str) -> None:
    """Compares leaves relative to the largest entry of `other`'s."""

    def check(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=0) + 1e-30
        np.testing.assert_allclose(
            a / scale, b / scale, rtol=2e-4, atol=2e-5, err_msg=f"{what} differ"
        )

    jax.tree.map(check, tree, other)


def assert_same_shardings(old: Any, new: Any) -> None:
    """Compares where the leaves of two trees lie."""

    def same(a, b):
        assert b.sharding.is_equivalent_to(a.sharding, a.ndim), (
            f"a state moves from {a.sharding} to {b.sharding}"
        )

    jax.tree.map(same, old, new)


def _assert_alike(tree: Any, other: Any, what: str) -> None:
    first, second = _signature(tree), _signature(other)
    differing = sorted(
        f"{path}: {first.get(path)} and {second.get(path)}"
        for path in first.keys() | second.keys()
        if first.get(path) != second.get(path)
    )
    assert not differing, f"{what} differ at {differing[0]}"
    structures = jax.tree.structure(tree), jax.tree.structure(other)
    assert structures[0] == structures[1], f"{what} differ: {structures}"


def _signature(tree: Any) -> dict[str, str]:
    """Returns `{path: "float32[8,3]"}`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{'weak ' * leaf.weak_type}{jnp.dtype(leaf.dtype)}{list(leaf.shape)}"
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
