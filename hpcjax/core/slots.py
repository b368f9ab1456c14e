"""Zero slots for backward statistics, and the count of the uses of each layer.

A slot's gradient is the *sum* over all uses of its layer in a pass, which is in general
not the statistic of the layer as a whole; so a layer that is used twice is refused,
unless the mean over its uses is wanted, and one under `jax.vmap` always. Uses are
counted in the jaxpr, where loops and branches are explicit.
"""

import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from hpcjax.core.model import Model, Tap, check_taps, reuse_error
from hpcjax.core.varying import vary_like

Backward = Mapping[str, Callable[[Any, Any], Any]]
# The path of the layer whose slot, or part of it, a variable of a jaxpr is.
Slots = dict[Var, str]
# How often a pass observes each layer: the least and the most, over branches.
Uses = dict[str, tuple[int, int]]


def make_slots(
    model: Model,
    backward: Backward,
    params: Any,
    state: Any,
    x: Any,
    *,
    active: Any = None,
    average_uses: bool = False,
) -> dict[str, Tap]:
    """Returns taps with zero slots of the right shape for each path in `backward`.

    The model is traced once and not run. The output gradient g has the shape and dtype
    of the output y, so the shapes of `backward(x, y)` are those of `backward(x, g)`.

    Args:
      model: the model whose layers are observed.
      backward: the statistic `(x, g) -> tree` of each layer, by path.
      params: parameters, or their shapes.
      state: state, or its shapes.
      x: a batch of inputs, or its shapes.
      active: a scalar for all taps, may be traced; see `Tap`.
      average_uses: accepts layers that are used several times in a pass, whose
        statistic is then the mean of those of each use. A stack of layers must still be
        used once, and all uses have inputs of one shape, so that the mean weighs all
        rows alike.

    Raises:
      ValueError: a path that is no layer of `model`; a layer that is never observed, or
        within `jax.vmap`, where statistics add up, or more than once if that is not
        accepted; uses of a shared layer that differ in shape, or in number between the
        branches of a `cond`.
    """
    check_taps(model, backward)
    depths = {spec.path: spec.options.get("depth") for spec in model.layers}
    layers, uses = _trace(model, backward, depths, params, state, x)
    shared = {path for path, (_, most) in uses.items() if most > (depths[path] or 1)}
    for path in shared:
        if not average_uses or depths[path] is not None:
            raise reuse_error(path)
        _check_mean(path, layers[path], *uses[path])
    backward = {
        path: _Share(function, uses[path][1]) if path in shared else function
        for path, function in backward.items()
    }

    def fill(path: str, shape: tuple[int, ...], dtype: Any, value: Any) -> jax.Array:
        """Returns a constant array, with a leading dimension for stacked layers."""
        depth = depths[path]
        return jnp.full(shape if depth is None else (depth, *shape), value, dtype)

    taps = {
        path: Tap(
            slot=jax.tree.map(
                lambda s, path=path: fill(path, s.shape, s.dtype, 0),
                layers[path].statistic,
            ),
            backward=function,
            active=None if active is None else fill(path, (), jnp.float32, active),
        )
        for path, function in backward.items()
    }
    # A gradient must have the type of what it is taken of, also inside `shard_map`.
    return vary_like(taps, (params, state, x))


@dataclasses.dataclass(frozen=True)
class _Share:
    """A statistic divided by the uses of its layer, so that they add up to a mean.

    It compares by value, so that an equal one does not make `jit` compile again.
    """

    statistic: Callable[[Any, Any], Any]
    uses: int

    def __call__(self, x: Any, g: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf / self.uses, self.statistic(x, g))


class _Layer(NamedTuple):
    """Shapes of a layer's inputs, of all uses, and of the leaves of its statistic."""

    shapes: frozenset[tuple[int, ...]]
    statistic: Any


def _check_mean(path: str, layer: _Layer, least: int, most: int) -> None:
    """Raises ValueError unless the mean over a shared layer's uses is that of rows."""
    if len(layer.shapes) > 1:
        raise ValueError(
            f"uses of the shared layer {path!r} must have inputs of one shape: got "
            f"{sorted(layer.shapes)}"
        )
    if least != most:
        raise ValueError(
            f"the shared layer {path!r} must be used equally often in all branches of "
            f"a cond: got {least} times in one and {most} in another"
        )


def _trace(
    model: Model,
    backward: Backward,
    depths: Mapping[str, int | None],
    params: Any,
    state: Any,
    x: Any,
) -> tuple[dict[str, _Layer], Uses]:
    """Returns the shapes at each layer, and how often a pass uses it."""
    layers: dict[str, _Layer] = {}

    def probe(path: str, slot: Any) -> Tap:
        function = backward[path]

        def note(x: Any, y: Any) -> jax.Array:
            shapes = {jax.tree.leaves(x)[0].shape}
            if path in layers:
                shapes |= layers[path].shapes
            statistic = jax.eval_shape(function, x, y)
            layers[path] = _Layer(frozenset(shapes), statistic)
            return jnp.zeros(())

        return Tap(slot=slot, forward=note, backward=function, overwrites=True)

    def run(slots: Any, params: Any, state: Any, x: Any) -> Any:
        taps = {path: probe(path, slot) for path, slot in slots.items()}
        # What is drawn, such as dropout, changes no shape.
        key = jax.random.key(0)
        return model.apply(params, state, x, train=True, key=key, taps=taps)[0]

    # The slots' own shapes do not matter here, only their variables in the jaxpr. A
    # stack of layers is scanned, so that its slot needs the leading dimension.
    slots = {path: jnp.zeros(depths[path] or ()) for path in backward}
    jaxpr = jax.make_jaxpr(run)(slots, params, state, x).jaxpr
    # `slots` is the first argument and JAX flattens dictionaries by sorted keys: the
    # first input variables are the slots in the order of their paths.
    names: Slots = dict(zip(jaxpr.invars, sorted(slots), strict=False))
    return layers, _uses(jaxpr, names, layers)


def _uses(jaxpr: Jaxpr, names: Slots, layers: Mapping[str, _Layer]) -> Uses:
    """Returns how often a pass observes each layer; raises ValueError if never."""
    unseen = [path for path in names.values() if path not in layers]
    if unseen:
        raise ValueError(
            f"layers that the model lists but never observes: {unseen}; call "
            "core.observe(taps.get(path), x, y) after each"
        )
    ranks = {path: max(map(len, each.shapes)) for path, each in layers.items()}
    # Of counters `|` takes the maximum of each count, `&` the minimum.
    most, least = (
        _count_uses(jaxpr, dict(names), ranks, choose)
        for choose in (operator.or_, operator.and_)
    )
    return {path: (least[path], times) for path, times in most.items()}


def _count_uses(
    jaxpr: Jaxpr,
    names: Slots,
    ranks: Mapping[str, int],
    choose: Callable[[Counter[str], Counter[str]], Counter[str]],
) -> Counter[str]:
    """Returns how often each slot is observed; `choose` says of which branch.

    A variable that is computed from a slot, such as a slice of a stack's, counts as the
    slot and is added to `names`.

    Raises:
      ValueError: a layer's inputs have more dimensions than `ranks` says, which is the
        mark of `jax.vmap`.
    """
    total: Counter[str] = Counter()
    for equation in jaxpr.eqns:
        given = [v for v in equation.invars if isinstance(v, Var) and v in names]
        if not given:
            continue
        path = names[given[-1]]
        if equation.primitive.name.startswith("custom_vjp_call"):
            # This is `core.observe`: x is the first operand, the slot is the last one.
            # In `vmap` x has one dimension more. A slot that is closed over remains a
            # scalar there, and its cotangent is summed over the examples.
            batched = _rank(equation.invars[0]) > ranks[path]
            if batched and not _rank(given[-1]):
                raise ValueError(
                    f"layer {path!r} is observed within jax.vmap, where the statistics "
                    "of examples would add up: apply it to the whole batch"
                )
            total[path] += 1
            continue
        bodies = list(_bodies(equation.params))
        if not bodies:
            names.update(dict.fromkeys(equation.outvars, path))
        counts = []
        for body in bodies:
            # Operands and a body's arguments agree from the end: the first operand of a
            # `cond` is its index, which no branch gets.
            own = equation.invars[-len(body.invars) :]
            inside = _hand_over(names, own, body.invars)
            counts.append(_count_uses(body, inside, ranks, choose))
            names |= _hand_over(inside, body.outvars, equation.outvars)
        # One branch is executed, the body of a scan `length` times.
        times = equation.params.get("length", 1)
        found = functools.reduce(choose, counts) if counts else Counter()
        for each, number in found.items():
            total[each] += times * number
    return total


def _rank(variable: Any) -> int:
    return variable.aval.ndim


def _bodies(params: Mapping[str, Any]) -> Iterator[Jaxpr]:
    """Yields the jaxprs among an equation's parameters."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr | Jaxpr):
                yield each.jaxpr if isinstance(each, ClosedJaxpr) else each


def _hand_over(names: Slots, given: Sequence[Any], taken: Sequence[Any]) -> Slots:
    """Returns the names of `taken`, the same values as `given` in another jaxpr."""
    return {
        own: names[variable]
        for variable, own in zip(given, taken, strict=False)
        if isinstance(variable, Var) and variable in names
    }
