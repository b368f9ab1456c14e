"""What a model is to the rest of the project, and how a layer is observed.

A `Model` is a pair of pure functions. A `Tap` asks one layer y = f(x) for a record of
its forward pass, or for a statistic of its backward pass. The latter comes back as the
*gradient of a slot*: a zero argument that the layer carries along and whose cotangent
is defined to be `backward(x, ∂L/∂y)`. K-FAC's factors are so formed inside the backward
pass and neither activations nor output gradients are kept.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hpcjax.core.errors import nearest
from hpcjax.core.structs import pytree, static
from hpcjax.core.varying import vary_like

SEEN = "seen"
LOSSES = "losses"


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
        """Computes outputs and new state; forward records are in `state["seen"]`.

        What layers add to the objective is in `state["losses"]`, see
        `core.added_loss`.
        """
        ...


class Decoder(NamedTuple):
    """The sizes of a causal language model that decoding needs to know.

    Attributes:
      depth: number of blocks.
      heads: query heads.
      kv_heads: key and value heads; divides `heads`.
      head_dim: features of a head.
      vocabulary: tokens that the model gives logits for.
      context: rows of the table of positions; None where positions have no limit.
      dtype: of keys and values.
      crowded: whether tokens compete for places, so that what is said of one depends on
        its neighbours in the batch: experts of a limited capacity.
    """

    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None
    dtype: str
    crowded: bool = False


class Model(NamedTuple):
    """A network as pure functions.

    Attributes:
      init: makes parameters and state.
      apply: computes outputs.
      layers: those that can be observed.
      decoder: what a causal language model is; None for other networks.
    """

    init: Init
    apply: Apply
    layers: tuple[LayerSpec, ...] = ()
    decoder: Decoder | None = None

    def __hash__(self) -> int:
        """Lets a model be a static argument; options of layers have no hash."""
        return hash((self.init, self.apply))


@pytree
class Tap:
    """What to observe at a layer y = f(x) with g = ∂L/∂y.

    Attributes:
      slot: zeros shaped like `backward(x, g)`; its gradient is that statistic.
      forward: `(x, y) -> record`, needs no backward pass.
      backward: `(x, g) -> statistic`. Static: use one module-level function, since a
        fresh lambda at each step compiles again.
      active: scalar, zero where this pass need not compute the backward statistic and
        the slot's gradient is to be zero; None means always. A float, so that one may
        differentiate in the whole tap.
    """

    slot: Any = None
    active: Any = None
    forward: Callable[[Any, Any], Any] | None = static(default=None)
    backward: Callable[[Any, Any], Any] | None = static(default=None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(
    backward: Callable[[Any, Any], Any], x: Any, y: Any, slot: Any, active: Any
) -> Any:
    del backward, x, slot, active
    return y


def _observe_forward(
    backward: Callable[[Any, Any], Any], x: Any, y: Any, slot: Any, active: Any
) -> tuple[Any, Any]:
    del backward, slot
    return y, (x, active)


def _observe_backward(
    backward: Callable[[Any, Any], Any], kept: tuple[Any, Any], g: Any
) -> tuple[Any, Any, Any, Any]:
    x, active = kept
    if active is None:
        return jnp.zeros_like(x), g, backward(x, g), None

    def skip(x: Any, g: Any) -> Any:
        shapes = jax.eval_shape(backward, x, g)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return vary_like(zeros, (x, g))

    def form(x: Any, g: Any) -> Any:
        return vary_like(backward(x, g), (x, g))

    statistic = jax.lax.cond(active != 0, form, skip, x, g)
    return jnp.zeros_like(x), g, statistic, jnp.zeros_like(active)


_observe.defvjp(_observe_forward, _observe_backward)


def observe(tap: Tap | None, x: Any, y: Any) -> tuple[Any, Any]:
    """Returns `(y, forward record or None)`; with `tap=None` nothing is traced."""
    if tap is None:
        return y, None
    if tap.backward is not None and tap.slot is not None:
        observed = _observe(tap.backward, x, y, tap.slot, tap.active)
    else:
        observed = y
    return observed, tap.forward(x, y) if tap.forward else None


def check_taps(model: Model, taps: Mapping[str, Any]) -> None:
    """Raises ValueError for a tap whose path is no observable layer of `model`."""
    paths = [spec.path for spec in model.layers]
    for path in taps:
        if path not in paths:
            raise ValueError(f"no layer at tap path {path!r}{nearest(path, paths)}")


def added_loss(state: Mapping[str, Any]) -> jax.Array | None:
    """Returns what a model's layers add to the objective; None if nothing.

    It is the sum of all numbers in `state["losses"]`, which are weighted already. They
    are of the pass in training that returned `state`; evaluation leaves them.

    Args:
      state: what `apply` returned.

    Examples:
      >>> float(added_loss({"losses": {"balance": jnp.array([0.25, 0.5])}}))
      0.75
    """
    terms = jax.tree.leaves(state.get(LOSSES, {}))
    return functools.reduce(operator.add, map(jnp.sum, terms)) if terms else None


def make_slots(
    model: Model,
    backward: Mapping[str, Callable[[Any, Any], Any]],
    params: Any,
    state: Any,
    x: Any,
    *,
    active: Any = None,
) -> dict[str, Tap]:
    """Returns taps with zero slots of the right shape for each path in `backward`.

    The shapes come from evaluating `backward(x, y)` abstractly, since the output
    gradient has the shape and dtype of the output.

    Args:
      model: whose layers are observed.
      backward: the statistic `(x, g) -> tree` of each layer, by path.
      params: parameters, or their shapes.
      state: state, or its shapes.
      x: a batch of inputs, or its shapes.
      active: a scalar for all taps, may be traced; see `Tap`.

    Raises:
      ValueError: a path that is no layer of `model`.
    """
    check_taps(model, backward)
    probes = {path: Tap(forward=function) for path, function in backward.items()}

    def records(params: Any, state: Any, x: Any) -> Any:
        return model.apply(params, state, x, train=True, taps=probes)[1].get(SEEN, {})

    shapes = jax.eval_shape(records, params, state, x)
    unseen = [path for path in backward if path not in shapes]
    if unseen:
        raise ValueError(f"layers that the model lists but never observes: {unseen}")
    depths = {spec.path: spec.options.get("depth") for spec in model.layers}

    def stacked(depth: int | None) -> Any:
        """Returns one flag for each layer of a scanned stack."""
        if active is None or depth is None:
            return None if active is None else jnp.asarray(active, jnp.float32)
        return jnp.full((depth,), active, jnp.float32)

    taps = {
        path: Tap(
            slot=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[path]),
            backward=function,
            active=stacked(depths[path]),
        )
        for path, function in backward.items()
    }
    # A gradient must have the type of what it is taken of, also inside `shard_map`.
    return vary_like(taps, (params, state, x))
