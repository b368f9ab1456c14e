"""From an NNX module to pure functions over nested dicts of arrays."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax.core import trees
from hpcjax.core.keys import derive
from hpcjax.core.model import LOSSES, SEEN, Decoder, LayerSpec, Model, Tap, check_taps
from hpcjax.models.modules import Loss, Observable, Observation

VariableT = TypeVar("VariableT", bound=nnx.Variable)
Flat = dict[str, nnx.Variable]
# What the returned state holds of one pass alone, which the next is not given.
_RECORDS = (SEEN, LOSSES)


def from_nnx(
    build: Callable[[], nnx.Module],
    *,
    decoder: Decoder | None = None,
    call: Callable[..., Any] = operator.call,
) -> Model:
    """Turns a network into a `Model` with plain parameters and state.

    The module is built once, abstractly, and split into a graph definition and nested
    dicts; `apply` merges them while it is traced. Every parameter and statistic is
    declared by `models.param` or `models.statistic` and drawn with the key
    `core.derive(key, path)`: adding a layer changes no other parameter's draw.

    Args:
      build: returns the module, whose `__call__(x, *, train, key)` gives the outputs.
      decoder: the sizes of a causal language model.
      call: `(module, x, *, train, key) -> outputs`, if it is not the module's call.

    Returns:
      The model; `layers` lists every `models.Dense` and `models.Conv` by path.

    Raises:
      ValueError: a variable that is neither a declared parameter nor a declared
        statistic, such as a layer of `flax.nnx` with a random stream holds.

    Examples:
      >>> from hpcjax import core, models
      >>> model = from_nnx(lambda: models.Dense(2, 3, policy=core.Policy()))
      >>> jax.tree.map(lambda p: p.shape, model.init(jax.random.key(0))[0])
      {'bias': (3,), 'kernel': (2, 3)}
    """
    module = nnx.eval_shape(build)
    graph, *split = nnx.split(module, nnx.Param, Loss, nnx.BatchStat, ...)
    declared_params, losses, declared_state, rest = map(flatten, split)
    _check_declared(declared_params | losses | declared_state, rest)
    listed = tuple(
        LayerSpec(path, layer.kind, layer.options())
        for path, layer in observable_layers(module)
    )

    def init(key: jax.Array) -> tuple[Any, Any]:
        state = _draw(declared_state, key)
        zeros = {LOSSES: _draw(losses, key)} if losses else {}
        return _draw(declared_params, key), state | zeros

    def apply(
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: jax.Array | None = None,
        taps: Mapping[str, Tap] | None = None,
    ) -> tuple[Any, Any]:
        kept = {name: value for name, value in state.items() if name not in _RECORDS}
        network = nnx.merge(
            graph,
            _fill(declared_params, params),
            _fill(losses, _zeros(losses)),
            _fill(declared_state, kept),
        )
        if taps is not None:
            check_taps(model, taps)
            set_taps(network, taps)
        y = call(network, x, train=train, key=key)
        added, new = nnx.state(network, Loss, nnx.BatchStat)
        given = {name: state[name] for name in (LOSSES,) if name in state}
        made = {LOSSES: _values(flatten(added))} if train and losses else given
        seen = records(network, taps or {})
        return y, _values(flatten(new)) | made | ({SEEN: seen} if seen else {})

    model = Model(init, apply, listed, decoder)
    return model


def flatten(state: Any) -> Flat:
    """Returns `{path: variable}` of an NNX state, in order of path components."""
    return {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(state)}


def observable_layers(module: nnx.Module) -> Iterator[tuple[str, Observable]]:
    """Yields path and layer of every layer below `module` that can be observed."""
    for path, node in nnx.iter_graph(module):
        if isinstance(node, Observable):
            yield "/".join(map(str, path)), node


def set_taps(module: nnx.Module, taps: Mapping[str, Tap]) -> None:
    """Gives every layer named in `taps` its tap."""
    for path, layer in observable_layers(module):
        if path in taps:
            layer.tap = nnx.data(Observation(taps[path]))


def records(module: nnx.Module, taps: Mapping[str, Tap]) -> dict[str, Any]:
    """Returns the forward records that the taps asked for, by path."""
    asked = [path for path, tap in taps.items() if tap.forward is not None]
    found = dict(observable_layers(module)) if asked else {}
    seen = {path: found[path].record for path in asked}
    unused = [path for path, record in seen.items() if record is None]
    if unused:
        raise ValueError(f"layers observed but not used in this pass: {unused}")
    return {
        path: record.get_value() for path, record in seen.items() if record is not None
    }


def _check_declared(declared: Flat, rest: Flat) -> None:
    bare = [
        path for path, v in declared.items() if "initializer" not in v.get_metadata()
    ]
    wrong = sorted([*bare, *rest])
    if wrong:
        raise ValueError(
            "every variable must be declared by models.param or models.statistic: got "
            f"others at {wrong}"
        )


def _draw(declared: Flat, key: jax.Array) -> dict[str, Any]:
    drawn = {}
    for path, variable in declared.items():
        like = variable.get_value()
        initializer = variable.get_metadata()["initializer"]
        drawn[path] = initializer(derive(key, path), like.shape, like.dtype)
    return _nested(drawn)


def _fill(declared: Flat, tree: Any) -> Any:
    """Returns an NNX state of the declared variables with the leaves of `tree`.

    A leaf may be a tree itself, such as a quantized matrix in place of a kernel.
    """
    leaves = trees.flatten(tree, is_leaf=lambda node: not isinstance(node, Mapping))
    if set(leaves) != set(declared):
        missing, extra = set(declared) - set(leaves), set(leaves) - set(declared)
        raise ValueError(
            f"the model's tree differs: missing {sorted(missing)}, not in the model "
            f"{sorted(extra)}"
        )
    return nnx.from_flat_state(
        [
            (tuple(path.split("/")), variable.replace(leaves[path]))
            for path, variable in declared.items()
        ]
    )


def _zeros(declared: Flat) -> dict[str, Any]:
    likes = {path: variable.get_value() for path, variable in declared.items()}
    return {path: jnp.zeros(like.shape, like.dtype) for path, like in likes.items()}


def _values(flat: Flat) -> dict[str, Any]:
    return _nested({path: variable.get_value() for path, variable in flat.items()})


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from `{"a/b": value}`."""
    nested: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, name = path.split("/")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return nested
