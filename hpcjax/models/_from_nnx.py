"""Turning an NNX module into pure functions of nested dicts of arrays."""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax.core import trees
from hpcjax.core.deferred import realize
from hpcjax.core.keys import Key, derive, from_row
from hpcjax.core.model import (
    LOSSES,
    SEEN,
    Cut,
    Decoder,
    LayerSpec,
    Model,
    Tap,
    check_taps,
)
from hpcjax.models._flax_layers import make_observable
from hpcjax.models.modules import STACKED, Conv, Loss, Observable, Observation

VariableT = TypeVar("VariableT", bound=nnx.Variable)
Flat = dict[str, nnx.Variable]
# Entries of the returned state that describe one pass; the next pass is not given them.
_RECORDS = (SEEN, LOSSES)


def from_nnx(
    build: Callable[..., nnx.Module],
    *,
    decoder: Decoder | None = None,
    cut: Callable[[], Cut] | None = None,
    call: Callable[..., Any] = operator.call,
    table: bool = False,
) -> Model:
    """Turns a network into a `Model` with plain parameters and state.

    The module is built once, abstractly, and split into a graph definition and nested
    dicts of arrays, which `apply` merges while it is traced. A parameter or statistic
    that is declared by `models.param` or `models.statistic` is drawn with the key
    `core.derive(key, path)`, so that adding a layer leaves the draws of others
    unchanged. Variables of flax's own layers are drawn by flax, if `build` takes
    `rngs`.

    Args:
      build: a class or function without arguments, or with the argument `rngs`, that
        returns the module. Its `__call__(x, *, train, key)` returns the outputs.
      decoder: the sizes of a causal language model.
      cut: see `core.Model`.
      call: `(module, x, *, train, key) -> outputs`; by default calls the module.
      table: whether there is a parameter "table" whose rows are drawn at once, a number
        by its place; an initializer that takes `start` is told the first of them.

    Returns:
      The model; `layers` lists every `models.Dense`, `models.Conv`, `nnx.Linear` and
      two-dimensional `nnx.Conv` by path.

    Raises:
      ValueError: a variable that is neither a parameter nor a statistic, such as the
        random stream of a dropout layer, or one that is not declared although `build`
        takes no `rngs`.

    Examples:
      >>> from hpcjax import core, models
      >>> model = from_nnx(lambda: models.Dense(2, 3, policy=core.Policy()))
      >>> jax.tree.map(lambda p: p.shape, model.init(jax.random.key(0))[0])
      {'bias': (3,), 'kernel': (2, 3)}
      >>> from_nnx(lambda rngs: nnx.Linear(2, 3, rngs=rngs)).layers[0].kind
      'dense'
    """
    # The signature of a module's class itself is that of its metaclass.
    builder = build.__init__ if inspect.isclass(build) else build
    takes_rngs = "rngs" in inspect.signature(builder).parameters

    def build_with(key: jax.Array) -> nnx.Module:
        return build(rngs=nnx.Rngs(key)) if takes_rngs else build()

    module = nnx.eval_shape(lambda: build_with(jax.random.key(0)))
    make_observable(module)
    for path, layer in observable_layers(module):
        if isinstance(layer, Conv):
            layer.name = path
    graph, params_like, losses_like, state_like, other = nnx.split(
        module, nnx.Param, Loss, nnx.BatchStat, ...
    )
    losses, rest = flatten(losses_like), flatten(other)
    declared = flatten(params_like) | losses | flatten(state_like)
    bare = [p for p, v in declared.items() if "initializer" not in v.get_metadata()]
    _check_declared([] if takes_rngs else bare, rest)
    listed = tuple(
        LayerSpec(path, layer.kind, layer.options())
        for path, layer in observable_layers(module)
    )

    def init(key: jax.Array) -> tuple[Any, Any]:
        by_flax = flatten(nnx.state(build_with(derive(key, "rngs")))) if bare else {}
        state = _draw(flatten(state_like), key, by_flax)
        zeros = {LOSSES: _draw(losses, key, by_flax)} if losses else {}
        return _draw(flatten(params_like), key, by_flax), state | zeros

    def apply(
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: Key | None = None,
        taps: Mapping[str, Tap] | None = None,
    ) -> tuple[Any, Any]:
        kept = {name: value for name, value in state.items() if name not in _RECORDS}
        network = nnx.merge(
            graph,
            _fill(params_like, params),
            _fill(losses_like, _make_zeros(losses)),
            _fill(state_like, kept),
        )
        if taps is not None:
            check_taps(model, taps)
            set_taps(network, taps)
        y = call(network, x, train=train, key=key)
        added, new = nnx.state(network, Loss, nnx.BatchStat)
        # Evaluation returns the added losses that it was given, so that the structure
        # of the state is the same in both modes.
        old = {name: state[name] for name in (LOSSES,) if name in state}
        added_losses = {LOSSES: _values(flatten(added))} if train and losses else old
        seen = records(network, taps or {})
        return y, _values(flatten(new)) | added_losses | ({SEEN: seen} if seen else {})

    rows = functools.partial(_draw_rows, declared["table"]) if table else None
    model = Model(init, apply, listed, decoder, cut, rows=rows)
    return model


def flatten(state: Any) -> Flat:
    """Returns an NNX state as `{path: variable}`, sorted by path components."""
    return {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(state)}


def observable_layers(module: nnx.Module) -> Iterator[tuple[str, Observable]]:
    """Yields (path, layer) of every layer of `module` that can be observed."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, Observable):
            yield "/".join(map(str, path)), node


def set_taps(module: nnx.Module, taps: Mapping[str, Tap]) -> None:
    """Gives every layer named in `taps` its tap."""
    for path, layer in observable_layers(module):
        if path in taps:
            layer.tap = nnx.data(Observation(taps[path], path=path))


def records(module: nnx.Module, taps: Mapping[str, Tap]) -> dict[str, Any]:
    """Returns by path what the forward functions of the taps recorded."""
    asked = [path for path, tap in taps.items() if tap.forward is not None]
    layers = dict(observable_layers(module)) if asked else {}
    seen = {path: layers[path].record for path in asked}
    unused = [path for path, record in seen.items() if record is None]
    if unused:
        raise ValueError(f"layers observed but not used in this pass: {unused}")
    return {
        path: record.get_value() for path, record in seen.items() if record is not None
    }


def _check_declared(bare: Iterable[str], rest: Iterable[str]) -> None:
    """Raises ValueError if there are variables that `init` could not draw."""
    wrong = sorted([*bare, *rest])
    if wrong:
        raise ValueError(
            "every variable must be declared by models.param or models.statistic, or "
            "be a parameter or statistic of flax's layers and `build` take rngs: got "
            f"others at {wrong}"
        )


def _draw(declared: Flat, key: jax.Array, by_flax: Flat) -> dict[str, Any]:
    """Draws variables by their initializers; those without one are taken from flax."""
    drawn = {}
    for path, variable in declared.items():
        like = variable.get_value()
        initializer = variable.get_metadata().get("initializer")
        if initializer is None:
            drawn[path] = by_flax[path].get_value()
        else:
            drawn[path] = initializer(derive(key, path), like.shape, like.dtype)
    return _nest(drawn)


def _draw_rows(table: nnx.Variable, key: jax.Array, start: Any, count: int) -> Any:
    """Returns rows of a table as `_draw` draws them, see `core.Model`."""
    draw, like = table.get_metadata()["initializer"], table.get_value()
    own = from_row(derive(key, "table"), start, math.prod(like.shape[1:]))
    told = {"start": start} if "start" in inspect.signature(draw).parameters else {}
    return draw(own, (count, *like.shape[1:]), like.dtype, **told)


def _fill(like: Any, tree: Any) -> Any:
    """Returns the NNX state `like` with the leaves of the nested dicts `tree`.

    A leaf may be a pytree itself, such as a quantized matrix in place of a kernel. A
    `core.Deferred` becomes an array here, or if it is of a stack in the stack's scan.
    """
    declared = flatten(like)
    leaves = trees.flatten(tree, is_leaf=lambda node: not isinstance(node, Mapping))
    if set(leaves) != set(declared):
        missing, extra = set(declared) - set(leaves), set(leaves) - set(declared)
        raise ValueError(
            f"the model's tree differs: missing {sorted(missing)}, not in the model "
            f"{sorted(extra)}"
        )
    # NNX numbers the items of a list with ints, and joined paths cannot tell 0 from
    # "0": the keys are taken from `like` instead.
    keys = [keys for keys, _ in nnx.to_flat_state(like)]
    return nnx.from_flat_state(
        [
            (place, variable.replace(_take(leaves[path], variable)))
            for place, (path, variable) in zip(keys, declared.items(), strict=True)
        ]
    )


def _take(leaf: Any, variable: nnx.Variable) -> Any:
    """Returns a leaf as the module gets it."""
    return leaf if variable.get_metadata().get(STACKED) else realize(leaf)


def _make_zeros(declared: Flat) -> dict[str, Any]:
    likes = {path: variable.get_value() for path, variable in declared.items()}
    return {path: jnp.zeros(like.shape, like.dtype) for path, like in likes.items()}


def _values(flat: Flat) -> dict[str, Any]:
    """Returns the values of variables as nested dicts."""
    return _nest({path: variable.get_value() for path, variable in flat.items()})


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from `{"a/b": value}`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return nested
