"""The interface of a model, and how statistics of its layers are collected.

A `Model` is a pair of pure functions. A `Tap` asks one layer y = f(x) for a record of
its forward pass, or for a statistic of its backward pass. The statistic comes back as
the *gradient of a slot*: an extra argument, all zeros, whose cotangent is defined to be
`backward(x, ∂L/∂y)`. K-FAC computes its factors in this way inside the backward pass,
so that neither activations nor output gradients outlive it.
"""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from hpcjax.core import trees
from hpcjax.core.errors import nearest
from hpcjax.core.keys import Key
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


def dense_layers(params: Any) -> tuple[LayerSpec, ...]:
    """Lists the dense layers of a tree: one for every matrix that is named `kernel`.

    Args:
      params: nested dicts of arrays, or of their shapes; a `bias` next to a kernel
        belongs to the same layer.

    Examples:
      >>> params = {"head": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}}
      >>> [(spec.path, spec.options) for spec in dense_layers(params)]
      [('head', {'inputs': 3, 'outputs': 2, 'use_bias': True})]
    """
    leaves = trees.flatten(params)
    layers = []
    for path, leaf in leaves.items():
        parent, _, name = path.rpartition("/")
        if name == "kernel" and len(leaf.shape) == 2:
            inputs, outputs = leaf.shape
            use_bias = f"{parent}/bias" in leaves
            options = {"inputs": inputs, "outputs": outputs, "use_bias": use_bias}
            layers.append(LayerSpec(parent, "dense", options))
    return tuple(layers)


class Init(Protocol):
    """`init(key) -> (params, state)`, both nested dicts of arrays."""

    def __call__(self, key: jax.Array) -> tuple[Any, Any]:
        """Draws the parameters and makes the state (running statistics, or empty)."""
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
        key: Key | None = None,
        taps: Mapping[str, "Tap"] | None = None,
    ) -> tuple[Any, Any]:
        """Computes outputs and new state.

        If the network returns the records of its taps' `forward` functions, they are in
        `state["seen"]`. Backward statistics, such as K-FAC's, need no such record.

        Terms that layers add to the objective are in `state["losses"]`, see
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
      crowded: whether tokens compete for places in experts of limited capacity, so
        that the logits of one sequence depend on the others in its batch.
      again: regexes of the parameters that the backward pass gathers again where they
        are cut, or whose layer's output or moments it sums again.
    """

    depth: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int | None
    dtype: str
    crowded: bool = False
    again: tuple[str, ...] = ()


class Between(NamedTuple):
    """How what passes between the stages of a network is encoded.

    `rest` are the parameters outside of the stack, `stage` is the number of the one
    that is sent a code.

    Attributes:
      encode: `(rest, y, stage, key, sent=None) -> code`, any tree of arrays. In a
        backward pass `sent` is the code of the forward one, without its floating-point
        arrays, whose places the code has again.
      decode: `(rest, code, like, stage) -> y`, of shape and dtype of `like`.
      coded: the first stage that is sent one.
      through: whether slopes pass as if nothing had been encoded.
      skips: whether validation does without.
      give: `(blocks, layers, key) -> blocks`, puts the codec into those kernels whose
        products devices sum, of a stack of blocks with these numbers; None for none.
      start: the first layer whose sums are compressed.
    """

    encode: Callable[..., Any]
    decode: Callable[[Any, Any, Any, Any], Any]
    coded: int = 1
    through: bool = False
    skips: bool = False
    give: Callable[[Any, jax.Array, Any], Any] | None = None
    start: int = 0


class Cut(NamedTuple):
    """A network with an empty state in three parts, around a stack of equal blocks.

    Nothing is drawn, and no example looks at another one. `rest` are all parameters
    outside of the stack, which `first` and `last` share.

    Attributes:
      first: `(rest, x) -> y`, the input of the first block.
      block: `(one, y) -> y`, with one layer's slice of the stack and an output of the
        input's shapes and dtypes.
      last: `(rest, y) -> outputs`.
      stack: the key of the stack among the parameters.
      between: what stages send each other; None for outputs as they are.
    """

    first: Callable[[Any, Any], Any]
    block: Callable[[Any, Any], Any]
    last: Callable[[Any, Any], Any]
    stack: str = "blocks"
    between: Between | None = None


class Model(NamedTuple):
    """A network as pure functions.

    Attributes:
      init: makes parameters and state.
      apply: computes outputs.
      layers: the layers that can be observed.
      decoder: sizes of a causal language model; None for other networks.
      cut: `cut()` returns the same network in parts, or raises ConfigError with what of
        it cannot be cut; None for networks that never can.
      added: keys of what a part of a run has added to parameters and state: a fork of a
        run without that part begins with it as drawn.
      frozen: regexes of the paths of parameters that training leaves as they are.
      rows: `rows(key, start, count)` returns so many rows of the parameter "table", as
        `init(key)` draws them; None where it has no such one.
    """

    init: Init
    apply: Apply
    layers: tuple[LayerSpec, ...] = ()
    decoder: Decoder | None = None
    cut: Callable[[], Cut] | None = None
    added: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    rows: Callable[[Any, Any, int], Any] | None = None

    def __hash__(self) -> int:
        """Makes a model usable as a static argument: `layers` cannot be hashed."""
        return hash((self.init, self.apply))


@pytree
class Tap:
    """What to observe at a layer y = f(x) with g = ∂L/∂y.

    Attributes:
      slot: zeros shaped like `backward(x, g)`; its gradient is that statistic.
      forward: `(x, y) -> record`, needs no backward pass.
      backward: `(x, g) -> statistic`. It is static: pass one module-level function,
        since a new lambda at each step would compile the step again.
      overwrites: whether a later use of the layer may replace the forward record of an
        earlier one; otherwise a second use is refused.
      active: scalar; where it is zero the statistic is not computed and the slot's
        gradient is zero. None: always computed. It is a float, not a boolean, so that
        `jax.grad` accepts the whole tap as its argument.
    """

    slot: Any = None
    active: Any = None
    forward: Callable[[Any, Any], Any] | None = static(default=None)
    backward: Callable[[Any, Any], Any] | None = static(default=None)
    overwrites: bool = static(default=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observe(
    backward: Callable[[Any, Any], Any], x: Any, y: Any, slot: Any, active: Any
) -> Any:
    # The identity in y. The other arguments are here for the backward pass only: x as
    # a residual, `slot` to have a gradient that can carry the statistic out of it.
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
    # y passes through, hence its cotangent is g. x does not enter the value, hence the
    # zeros; its true cotangent arrives through the layer f that computed y from it.
    x, active = kept
    if active is None:
        return jnp.zeros_like(x), g, backward(x, g), None

    # Both branches of `cond` must have one type, and inside `shard_map` that includes
    # the mesh axes along which it varies: plain zeros would vary along none.
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
    """Returns `(y, forward record or None)`; without a tap, adds no operation.

    A layer must use the returned y in place of its own: only gradients that pass
    through it reach the slot.
    """
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
    """Returns the sum of the terms that layers add to the objective; None without any.

    Layers have multiplied the numbers in `state["losses"]` by their weights. The terms
    belong to the training pass that returned `state`; evaluation leaves them unchanged.

    Args:
      state: what `apply` returned.

    Examples:
      >>> float(added_loss({"losses": {"balance": jnp.array([0.25, 0.5])}}))
      0.75
    """
    terms = jax.tree.leaves(state.get(LOSSES, {}))
    return functools.reduce(operator.add, map(jnp.sum, terms)) if terms else None


def reuse_error(path: str) -> ValueError:
    """Returns the error for a layer that is observed more than once in a pass."""
    return ValueError(
        f"layer {path!r} is used again in the same pass: a forward record needs a "
        "layer that is used once; leave it out, or take the mean of a backward "
        "statistic over all uses, core.make_slots(..., average_uses=True)"
    )
