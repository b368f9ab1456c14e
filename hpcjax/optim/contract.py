"""The contract of transforms: checks that every transform of this room must pass.

A check takes a `Subject`, which is an optax transform with the arguments of its
updates, and raises AssertionError if a rule is broken. A transform that passes all
checks works in this training loop and in others, on one device or many, and together
with the wrappers of optax and flax. `check_contract` runs them on a transform of your
own.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hpcjax.core import per_device
from hpcjax.optim._inspect import inspect
from hpcjax.optim.all_reduce import all_reduce_mean
from hpcjax.optim.tree_assertions import (
    assert_alike,
    assert_close,
    assert_same_shardings,
    is_finite,
)

Transform = optax.GradientTransformation


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A transform, and the arguments with which its updates are called.

    A worker that changes its parameters by itself can be checked too, if it is wrapped
    so that `update` returns the change of its parameters.

    Attributes:
      tx: the transform, or optimizer, on one device.
      params: the only parameters that it is made for, as nested dicts; None if it takes
        any parameters.
      extra_args: what `update` needs besides gradients, state and parameters.
      sharded: the version for use inside `shard_map` over a mesh axis "data", which
        takes each device's local gradients; None stands for `tx` after their mean.
      factory: the partial whose call makes `tx`.
    """

    tx: Transform
    params: Any = None
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sharded: Transform | None = None
    factory: functools.partial[Any] | None = None

    def parameters(self, dtype: Any = jnp.float32) -> Any:
        """Returns new arrays of parameters, which may be donated."""
        if self.params is None:
            return parameters(dtype)
        return jax.tree.map(lambda p: jnp.array(p, dtype), self.params)

    def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Returns updates and the next state."""
        return self.extended.update(gradients, state, params, **self.extra_args)

    def step(self, params: Any, state: Any) -> tuple[Any, Any]:
        """Returns parameters and state after a step with the parameters as gradients.

        Extra arguments that no transform knows are passed as well; they must be
        ignored.
        """
        extra = {"value": 1.0, "unknown": params, **self.extra_args}
        updates, state = self.extended.update(params, state, params, **extra)
        return optax.apply_updates(params, updates), state

    @property
    def extended(self) -> Any:
        """The transform, made to accept and ignore unknown extra arguments."""
        return optax.with_extra_args_support(self.tx)

    @functools.cached_property
    def jitted(self) -> Any:
        """The update, compiled."""
        return jax.jit(self.update)

    @functools.cached_property
    def program(self) -> Any:
        """The compiled step, which donates the buffers of parameters and state."""
        params = self.parameters()
        step = jax.jit(self.step, donate_argnums=(0, 1))
        return step.lower(params, self.tx.init(params)).compile()


def check_contract(
    tx: Transform,
    *,
    skip: Collection[str] = (),
    params: Any = None,
    extra_args: Mapping[str, Any] | None = None,
    factory: functools.partial[Any] | None = None,
) -> tuple[str, ...]:
    """Runs all checks of the contract on a transform of your own.

    Args:
      tx: the transform, or optimizer.
      skip: names of checks that cannot hold for it.
      params: the only parameters that it is made for, as nested dicts; None if it takes
        any parameters.
      extra_args: what its `update` needs besides gradients, state and parameters.
      factory: the partial whose call made it; needed for the check `injects`.

    Returns:
      The names of the checks that were run.

    Raises:
      AssertionError: a rule is broken. Exceptions that the transform itself raises are
        passed on, with a note that names the check.

    Examples:
      >>> import optax
      >>> "same_under_jit" in check_contract(optax.sgd(0.1), skip=["refuses_types"])
      True
    """
    subject = Subject(tx, params, extra_args or {}, factory=factory)
    chosen = tuple(name for name in checks_of(subject) if name not in skip)
    for name in chosen:
        try:
            CHECKS[name](subject)
        except Exception as error:
            error.add_note(f"the contract's check {name!r} does not hold")
            raise
    return chosen


def checks_of(subject: Subject) -> list[str]:
    """Returns the names of the checks that apply to a subject."""
    can = {
        # A transform made for one tree of parameters takes no other shapes.
        "takes_unusual_shapes": subject.params is None,
        "injects": subject.factory is not None,
    }
    return [name for name in CHECKS if can.get(name, True)]


def compiles_once(subject: Subject) -> None:
    """The program compiled for one step also runs the next one: nothing retraces."""
    params = subject.parameters()
    first = subject.tx.init(params)
    # Copies, because the program donates its arguments and `first` is needed below.
    moved, state = subject.program(*jax.tree.map(jnp.copy, (params, first)))
    assert_alike(state, first, "states of two steps")
    _run_again(subject.program, moved, state)


def can_be_donated(subject: Subject) -> None:
    """Parameters and a new state can be donated together.

    XLA donates a buffer once, so no array may occur twice in the state or be shared
    with the parameters.
    """
    params = subject.parameters()
    try:
        subject.program(params, subject.tx.init(params))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        rule = "an array of the fresh state is in two places, or a parameter's"
        raise AssertionError(f"{rule}, and so cannot be donated") from error


def same_under_jit(subject: Subject) -> None:
    """Updates and state are the same with `jit` as without."""
    params = {"kernel": jnp.asarray([[1.0, 2.0], [3.0, 5.0]])}
    if subject.params is not None:
        params = subject.parameters()
    state = subject.tx.init(params)
    plain, next_plain = subject.update(params, state, params)
    compiled, next_compiled = subject.jitted(params, state, params)
    assert_close(plain, compiled, "updates with and without jit")
    assert_alike(next_plain, next_compiled, "states with and without jit")


def keeps_types(subject: Subject) -> None:
    """Structure, shapes and dtypes are specs, in float32 and in bfloat16.

    Those of the updates are those of the parameters, and the state's never change.
    """
    for dtype in (jnp.float32, jnp.bfloat16):
        params = subject.parameters(dtype)
        _assert_steady(subject, subject.extended, params, f"in {dtype.__name__}")


def starts_from_shapes(subject: Subject) -> None:
    """`init` also takes `ShapeDtypeStruct`s, and returns the same state."""
    params = subject.parameters()
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
    state = subject.tx.init(params)
    assert_alike(jax.eval_shape(subject.tx.init, shapes), state, "traced, real states")
    assert_alike(subject.tx.init(shapes), state, "states from shapes and from arrays")


def marks_parameters(subject: Subject) -> None:
    """`optax.tree_map_params` marks whole copies of the parameters in the state."""
    count = len(jax.tree.leaves(subject.parameters()))
    marked = parameter_leaves(subject)
    assert marked % count == 0, f"{marked} leaves of {count} parameters are marked"


def parameter_leaves(subject: Subject) -> int:
    """Returns how many leaves of the state optax takes for copies of a parameter."""
    params = subject.parameters()
    names = jax.tree.map(lambda _: "parameter", params)
    transform: Any = subject.tx
    marked = optax.tree_map_params(
        transform,
        lambda _, name: name,
        subject.tx.init(params),
        names,
        transform_non_params=lambda _: "other",
    )
    return jax.tree.leaves(marked).count("parameter")


def composes(subject: Subject) -> None:
    """It works inside optax's `masked`, `partition` and `chain`, and for `inspect`."""
    params = subject.parameters()
    mask = jax.tree.map(lambda p: p.ndim > 1, params)
    labels = jax.tree.map(lambda p: "a" if p.ndim > 1 else "b", params)
    both = optax.chain(
        optax.masked(subject.tx, mask),
        optax.partition({"a": subject.tx, "b": optax.identity()}, labels),
    )
    figures = inspect(_assert_steady(subject, both, params, "when composed"))
    wrong = [name for name, value in figures.items() if np.ndim(value)]
    assert not wrong, f"inspect must find scalars: got {wrong}"


def accumulates(subject: Subject) -> None:
    """It works inside `optax.MultiSteps`, which accumulates gradients."""
    tx = optax.MultiSteps(subject.tx, 2)
    _assert_steady(subject, tx, subject.parameters(), "over several gradients")


def injects(subject: Subject) -> None:
    """`optax.inject_hyperparams(factory)` takes the same arguments as the factory.

    It turns numbers into arrays that a schedule may change. A number that must stay a
    Python number belongs in a keyword of `**options`, which optax leaves alone.
    """
    factory = subject.factory or functools.partial(optax.chain, subject.tx)
    tx = optax.inject_hyperparams(factory.func)(*factory.args, **factory.keywords)
    _assert_steady(subject, tx, subject.parameters(), "with what is injected")


def works_in_nnx(subject: Subject) -> None:
    """It works in `flax.nnx.Optimizer`, which gives variables to `init`, not arrays."""
    from flax import nnx

    def train(params: Any) -> Any:
        variables = jax.tree.map(nnx.Param, params)
        model = nnx.Dict({name: nnx.data(each) for name, each in variables.items()})
        optimizer = nnx.Optimizer(model, subject.extended, wrt=nnx.Param)
        read = lambda: nnx.to_pure_dict(nnx.state((model, optimizer)))  # noqa: E731
        before = read()
        optimizer.update(model, nnx.state(model), **subject.extra_args)
        return before, read()

    before, after = jax.eval_shape(train, subject.parameters())
    assert_alike(after, before, "nnx's optimizers of two steps")


def same_when_sharded(subject: Subject) -> None:
    """On all devices with averaged gradients the update is that of one device.

    Two steps inside `shard_map`, with random local gradients, are compared with two
    steps outside on their mean; the state must also stay where it was placed.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    # With jax 0.11.2 XLA's compiler for CPU crashes on any arithmetic with an empty
    # array in a program for several devices, with or without a collective.
    params = jax.tree.map(
        lambda p: p if p.size else optax.MaskedNode(), subject.parameters()
    )
    noise, count = np.random.default_rng(0), jax.device_count()
    local = jax.tree.map(
        lambda p: jnp.asarray(noise.normal(size=(count, *p.shape)), p.dtype), params
    )
    joint = subject.sharded or optax.chain(all_reduce_mean("data"), subject.tx)
    joint = optax.with_extra_args_support(joint)

    def step(gradients, state, params):
        mine = jax.tree.map(lambda g: g[0], gradients)
        updates, state = joint.update(
            mine, per_device.enter(state), params, **subject.extra_args
        )
        return updates, per_device.leave(state)

    first = per_device.expand(joint.init(params), mesh)
    specs = per_device.specs(first)
    sharded: Any = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P("data"), specs, P()), out_specs=(P(), specs)
        )
    )
    mean = jax.tree.map(lambda g: g.mean(axis=0), local)

    def place(tree: Any, specs: Any) -> Any:
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        return jax.device_put(tree, where)

    local, placed, first = (
        place(local, P("data")),
        place(params, P()),
        place(first, specs),
    )
    program = sharded.lower(local, first, placed).compile()
    _, state = program(local, first, placed)
    updates, state = _run_again(program, local, state, placed)
    _, alone = subject.jitted(mean, subject.tx.init(params), params)
    expected, _ = subject.jitted(mean, alone, params)
    assert_close(updates, expected, "updates on several devices and on one")
    assert_same_shardings(first, state)


def stays_finite(subject: Subject) -> None:
    """Updates are finite after three equal gradients of a degenerate kind.

    These are gradients times 0, 1e-20 and 1e20, and all ones, which is of rank one. The
    state must be finite too, except for 1e20, whose square overflows float32.
    """
    for scale in (0.0, 1e-20, 1e20, None):
        updates, state = after_three(subject, scale)
        kind = "of rank one" if scale is None else f"{scale:g}"
        assert is_finite(updates), f"updates are not finite for gradients {kind}"
        if scale != 1e20:
            assert is_finite(state), f"the state is not finite for gradients {kind}"


def after_three(subject: Subject, scale: float | None) -> tuple[Any, Any]:
    """Returns updates and state after three gradients; scale None means all ones."""
    params = subject.parameters()
    gradients = jax.tree.map(
        lambda p: jnp.ones_like(p) if scale is None else scale * p, params
    )
    updates, state = params, subject.tx.init(params)
    for _ in range(3):
        updates, state = subject.jitted(gradients, state, params)
    return updates, state


def takes_unusual_shapes(subject: Subject) -> None:
    """Empty, scalar and five-dimensional parameters work, and an empty tree."""
    shapes = ((0,), (3, 1), (1, 3), (2, 3, 4), (1, 2, 1, 2, 3), ())
    params = {str(shape): jnp.ones(shape) for shape in shapes}
    _assert_steady(subject, subject.extended, params, "of unusual shapes")
    none, _ = subject.update({}, subject.tx.init({}), {})
    assert none == {}, "no parameters, but updates"


def refuses_types(subject: Subject) -> None:
    """`init` raises TypeError for complex and integer parameters, naming their path."""
    for dtype in (jnp.int32, jnp.complex64):
        params = {"dense": {"kernel": jnp.ones((2, 2), dtype)}}
        try:
            subject.tx.init(params)
        except TypeError as error:
            message = str(error)
        else:
            raise AssertionError(f"{dtype.__name__} parameters are not refused")
        assert "dense/kernel" in message, (
            f"the refusal does not name the path: {message}"
        )


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__: check
    for check in (
        *(compiles_once, can_be_donated, same_under_jit, keeps_types),
        *(starts_from_shapes, marks_parameters, composes, accumulates, injects),
        *(works_in_nnx, same_when_sharded, stays_finite, takes_unusual_shapes),
        refuses_types,
    )
}


def parameters(dtype: Any = jnp.float32) -> dict[str, Any]:
    """Returns small parameters of every kind: two kernels, a bias, empty, a scalar.

    Only few, since compilation dominates the time of the suite. Both kernels are 8×3
    matrices, so that methods which batch equal shapes have a batch.
    """
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


def _run_again(program: Any, *arguments: Any) -> Any:
    """Runs a compiled program on arguments of the types that it was compiled for."""
    try:
        return program(*arguments)
    except (TypeError, ValueError) as error:
        raise AssertionError("the second call needs another program") from error


def _assert_steady(subject: Subject, tx: Any, params: Any, where: str) -> Any:
    """Asserts that a step of `tx`, a wrapped subject, keeps types; returns a state."""
    step = functools.partial(tx.update, **subject.extra_args)
    state = tx.init(params)
    updates, after = jax.eval_shape(step, params, state, params)
    assert_alike(updates, params, f"updates and parameters {where}")
    assert_alike(after, state, f"states of two steps {where}")
    return state
