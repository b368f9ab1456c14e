"""What a model is to the rest of the project, and how a layer is observed.

A `Model` is a pair of pure functions. A `Tap` asks one layer y = f(x) for a record of
its forward pass, or for a statistic of its backward pass. The latter comes back as the
*gradient of a slot*: a zero argument that the layer carries along and whose cotangent
is defined to be `backward(x, ∂L/∂y)`. K-FAC's factors are so formed inside the backward
pass and neither activations nor output gradients are kept.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hpcjax.core.errors import nearest
from hpcjax.core.structs import pytree, static

SEEN = "seen"


class LayerSpec(NamedTuple):
    """One layer that can be observed.

    Attributes:
      path: its place in the parameters, such as `"block_0/conv1"`.
      kind: `"dense"` or `"conv"`.
      options: what the kind needs to form its statistics (strides, padding, bias, ...).
    """

    path: str
    kind: str
    options: Mapping[str, Any]


class Init(Protocol):
    """`init(key) -> (params, state)`, both nested dicts of arrays."""

    def __call__(self, key: jax.Array) -> tuple[Any, Any]:
        """Makes parameters and state (running statistics; often empty)."""
        ...


class Apply(Protocol):
    """`apply(params, state, x, *, train, key, taps) -> (y, state)`."""

    def __call__(
        self,
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: jax.Array | None = None,
        taps: Mapping[str, "Tap"] | None = None,
    ) -> tuple[Any, Any]:
        """Computes outputs and new state; forward records are in `state["seen"]`."""
        ...


class Model(NamedTuple):
    """A network as pure functions, plus the list of its observable layers."""

    init: Init
    apply: Apply
    layers: tuple[LayerSpec, ...] = ()


@pytree
class Tap:
    """What to observe at a layer y = f(x) with g = ∂L/∂y.

    Attributes:
      slot: zeros shaped like `backward(x, g)`; its gradient is that statistic.
      forward: `(x, y) -> record`, needs no backward pass.
      backward: `(x, g) -> statistic`. Static: use one module-level function, since a
        fresh lambda at each step compiles again.
    """

    slot: Any = None
    forward: Callable[[Any, Any], Any] | None = static(default=None)
    backward: Callable[[Any, Any], Any] | None = static(default=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(backward: Callable[[Any, Any], Any], x: Any, y: Any, slot: Any) -> Any:
    del backward, x, slot
    return y


def _observe_forward(
    backward: Callable[[Any, Any], Any], x: Any, y: Any, slot: Any
) -> tuple[Any, Any]:
    del backward, slot
    return y, x


def _observe_backward(
    backward: Callable[[Any, Any], Any], x: Any, g: Any
) -> tuple[Any, Any, Any]:
    return jnp.zeros_like(x), g, backward(x, g)


_observe.defvjp(_observe_forward, _observe_backward)


def observe(tap: Tap | None, x: Any, y: Any) -> tuple[Any, Any]:
    """Returns `(y, forward record or None)`; with `tap=None` nothing is traced."""
    if tap is None:
        return y, None
    if tap.backward is not None and tap.slot is not None:
        observed = _observe(tap.backward, x, y, tap.slot)
    else:
        observed = y
    return observed, tap.forward(x, y) if tap.forward else None


def check_taps(model: Model, taps: Mapping[str, Any]) -> None:
    """Raises ValueError for a tap whose path is no observable layer of `model`."""
    paths = [spec.path for spec in model.layers]
    for path in taps:
        if path not in paths:
            raise ValueError(f"no layer at tap path {path!r}{nearest(path, paths)}")


def make_slots(
    model: Model,
    backward: Mapping[str, Callable[[Any, Any], Any]],
    params: Any,
    state: Any,
    x: Any,
) -> dict[str, Tap]:
    """Returns taps with zero slots of the right shape for each path in `backward`.

    The shapes come from evaluating `backward(x, y)` abstractly, since the output
    gradient has the shape and dtype of the output.

    Raises:
      ValueError: a path that is no layer of `model`.
    """
    check_taps(model, backward)
    probes = {path: Tap(forward=function) for path, function in backward.items()}

    def records(params: Any, state: Any, x: Any) -> Any:
        return model.apply(params, state, x, train=True, taps=probes)[1][SEEN]

    shapes = jax.eval_shape(records, params, state, x)
    return {
        path: Tap(
            slot=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[path]),
            backward=function,
        )
        for path, function in backward.items()
    }
