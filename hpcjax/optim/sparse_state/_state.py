"""Compressed master weights and optimizer state, and the step that updates them."""

import warnings
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from hpcjax.core import checks, trees
from hpcjax.core.deferred import is_deferred, realize
from hpcjax.core.patterns import check_patterns, check_stacked, matches_any
from hpcjax.core.structs import pytree
from hpcjax.optim.loss_scale import advance, begin_scaling, unscale
from hpcjax.optim.loss_scale_config import LossScale
from hpcjax.optim.sparse_state._elementwise import check_elementwise
from hpcjax.optim.sparse_state._positions import Positions, locate
from hpcjax.optim.sparse_state._pruned import Pruned, make_slots, map_pruned
from hpcjax.optim.sparse_state.options import MODES, Index, Mode


class Compressed(NamedTuple):
    """Parameters as a pruned network holds them.

    Attributes:
      params: what models take, a `Pruned` for each pruned parameter; others are arrays.
      master: float32 values of all parameters, kept ones only of those that are pruned;
        None where `params` are float32 themselves.
    """

    params: Any
    master: Any


@pytree
class SparseState:
    """The whole state of training a pruned network.

    Attributes:
      params: see `Compressed`.
      master: see `Compressed`.
      inner: the states of the mean over devices and of the transform.
      scaling: the `Scaling` of the loss; None without.
    """

    params: Any
    master: Any
    inner: Any
    scaling: Any = None


def compress(
    params: Any,
    masks: Any,
    *,
    dtype: Any = "bfloat16",
    index: Index = "int32",
    mode: Mode = "dense",
    stacked: tuple[str, ...] = (),
    allow_empty: bool = False,
) -> Compressed:
    """Returns the compressed form of a pruned network's parameters.

    Args:
      params: float32 parameters; sharded ones are compressed by shard.
      masks: the same tree with a bool array for each pruned parameter, true where it is
        kept, and None for others. A `Positions` may take the place of a mask.
      dtype: of the weights that models compute with, and of gradients. With float32
        there is no other copy of them.
      index: "int32" stores a number for each kept value, "bitmap" a bit for each
        element: fewer bytes where more than one of 32 is kept, and time to list them.
      mode: "dense" holds dense weights; "rematerialize" holds kept values, of which the
        weights of a layer are made in every pass.
      stacked: regexes of parameters whose first axis is a stack of scanned layers, such
        as the `stacks` of a model's config.
      allow_empty: accepts a mask that keeps nothing.

    Raises:
      ConfigError: a mask of another shape or dtype, or that keeps nothing; an unknown
        choice; a part of 2³¹ or more elements.

    References:
      Singh and Bhatele, Exploiting Sparsity in Pruned Neural Networks to Optimize Large
      Model Training, IPDPS 2023, §III.

    Examples:
      >>> kept = {"w": jnp.array([[True, False], [False, True]])}
      >>> made = compress({"w": jnp.eye(2)}, kept)
      >>> made.params["w"].realize().dtype.name, made.master["w"].tolist()
      ('bfloat16', [1.0, 1.0])
    """
    checks.require_choice("mode", mode, MODES)
    check_patterns("stacked", stacked)
    leaves = trees.flatten(params)
    check_stacked(stacked, leaves)
    given = trees.flatten(masks, is_leaf=lambda m: m is None or _is_positions(m))
    odd = sorted(given.keys() ^ leaves.keys())
    checks.require(not odd, "masks must be a tree like the parameters", differing=odd)
    held, master = {}, {}
    for path, leaf in leaves.items():
        at = given[path]
        if at is None:
            # Copies: a step donates its state, and not the given parameters.
            held[path] = jnp.array(leaf, dtype)
            master[path] = jnp.array(leaf, jnp.float32)
            continue
        if not _is_positions(at):
            _check_mask(path, at, leaf, allow_empty)
            at = locate(
                path,
                at,
                index=index,
                stacked=matches_any(stacked, path),
                sharding=getattr(leaf, "sharding", None),
            )
        rule = f"the positions of {path} must be those of a parameter of its shape"
        checks.require(at.shape == leaf.shape, rule, positions=at.shape, of=leaf.shape)
        values = _place(at.gather(leaf), at.places)
        short = values.astype(dtype)
        weights = _place(at.expand(short), leaf) if mode == "dense" else short
        held[path] = Pruned(weights=weights, positions=at, dense=mode == "dense")
        master[path] = values.astype(jnp.float32)
    single = jnp.dtype(dtype) == jnp.float32
    return Compressed(
        trees.unflatten(params, held),
        None if single else trees.unflatten(params, master),
    )


def to_dense(state: Compressed | SparseState) -> Any:
    """Returns the float32 parameters as a tree of dense arrays."""
    return map_pruned(
        lambda node, values: node.positions.expand(values),
        state.params,
        master_of(state),
        dense=lambda _, leaf: leaf,
    )


def check_masks(params: Any, masks: Any) -> None:
    """Raises ConfigError unless compressed parameters are those of these masks.

    Call it after a checkpoint was restored: arrays of two masks that keep as many
    values have the same shapes.

    Args:
      params: compressed, with arrays and not only their shapes.
      masks: see `compress`.
    """
    nodes = trees.flatten(params, is_deferred)
    given = trees.flatten(masks, is_leaf=lambda mask: mask is None)
    odd = sorted(given.keys() ^ nodes.keys())
    checks.require(not odd, "masks must be a tree like the parameters", differing=odd)
    for path, node in nodes.items():
        mask, is_pruned = given[path], is_deferred(node)
        same = is_pruned == (mask is not None)
        if same and is_pruned:
            at = node.positions
            kept = at.expand(jnp.ones((*at.lead, at.kept))) > 0
            same = kept.shape == mask.shape and bool((kept == mask).all())
        rule = "the mask of a restored parameter must be the one it was trained with"
        checks.require(same, rule, path=path)


def master_of(state: Compressed | SparseState) -> Any:
    """Returns the float32 values that the optimizer updates."""
    if state.master is not None:
        return state.master
    return map_pruned(Pruned.values, state.params)


class Init(Protocol):
    """`init(compressed) -> SparseState`."""

    def __call__(self, compressed: Compressed) -> SparseState:
        """Makes the state before the first step."""
        ...


class Step(Protocol):
    """`step(state, grads, overflow=None, **extra) -> SparseState`."""

    def __call__(
        self, state: SparseState, grads: Any, overflow: Any = None, **extra: Any
    ) -> SparseState:
        """Takes a step with compressed gradients.

        With a loss scale nothing but the scale changes if one of the gradients is not
        finite, or `overflow` is true, which is the same on all devices.
        """
        ...


class SparseOptimizer(NamedTuple):
    """An optimizer of compressed parameters; see `wrap`."""

    init: Init
    step: Step


def wrap(
    tx: optax.GradientTransformation,
    *,
    mean: optax.GradientTransformation | None = None,
    loss_scale: LossScale | None = None,
) -> SparseOptimizer:
    """Returns an optimizer whose state has the sizes of kept values.

    A step averages compressed gradients in their dtype, casts them to float32, divides
    the loss scale out of them, updates the float32 values, and from these makes the
    weights of the next forward pass. Pruned weights stay exactly zero.

    Args:
      tx: an elementwise transform, which may use norms too.
      mean: averages gradients over devices, such as `optim.all_reduce_mean("data")`,
        inside `shard_map`. It gets and sends compressed gradients.
      loss_scale: for float16 gradients; the loss to differentiate is then multiplied by
        `state.scaling.scale`, see `value_and_grad`.

    Returns:
      `init` and `step`. A jitted step should donate its state.

    Raises:
      ConfigError: at `init`, if `tx` is not elementwise, see `check_elementwise`.

    References:
      Singh and Bhatele, IPDPS 2023, §III-C.

    Examples:
      >>> kept = {"w": jnp.array([[True, False], [False, True]])}
      >>> made = compress({"w": jnp.eye(2)}, kept)
      >>> optimizer = wrap(optax.adam(0.5))
      >>> state = optimizer.init(made)
      >>> state = optimizer.step(state, {"w": jnp.ones(2, jnp.bfloat16)})
      >>> state.params["w"].realize().tolist()
      [[0.5, 0.0], [0.0, 0.5]]
    """
    tx = optax.with_extra_args_support(tx)
    link = optax.with_extra_args_support(mean or optax.identity())

    def init(compressed: Compressed) -> SparseState:
        check_elementwise(tx, compressed.params)
        master = master_of(compressed)
        slots = make_slots(compressed.params)
        inner = link.init(slots), tx.init(master)
        state = SparseState(
            params=compressed.params,
            master=compressed.master,
            inner=inner,
            scaling=begin_scaling(loss_scale),
        )
        _warn_if_larger(tx, state)
        return state

    def step(
        state: SparseState, grads: Any, overflow: Any = None, **extra: Any
    ) -> SparseState:
        link_state, tx_state = state.inner
        grads, link_state = link.update(grads, link_state, **extra)
        grads = unscale(grads, state.scaling)
        master, scaling = master_of(state), state.scaling
        updates, tx_state = tx.update(grads, tx_state, master, **extra)
        new = optax.apply_updates(master, updates), (link_state, tx_state)
        if loss_scale is not None and scaling is not None:
            finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)])
            finite = finite.all() & ~jnp.asarray(
                False if overflow is None else overflow
            )
            # Before weights are written, so that there are no two copies of these.
            old = master, state.inner
            new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
            scaling = advance(loss_scale, scaling, finite)
        master, inner = new
        return SparseState(
            params=_write(state.params, master),
            master=None if state.master is None else master,
            inner=inner,
            scaling=scaling,
        )

    return SparseOptimizer(init, step)


def _check_mask(path: str, mask: Any, leaf: Any, allow_empty: bool) -> None:
    rule = f"the mask of {path} must be bool {list(leaf.shape)}"
    good = mask.shape == leaf.shape and mask.dtype == bool
    checks.require(good, rule, shape=mask.shape, dtype=str(mask.dtype))
    if not allow_empty:
        rule = f"the mask of {path} must keep a value, or allow_empty be true"
        checks.require(bool(mask.any()), rule, kept=0)


def _place(array: jax.Array, like: Any) -> jax.Array:
    """Returns an array split over the devices of a mesh as another one is."""
    sharding = getattr(like, "sharding", None)
    split = isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated
    return jax.device_put(array, sharding) if split else array


def _is_positions(node: Any) -> bool:
    return isinstance(node, Positions)


def _warn_if_larger(tx: optax.GradientTransformation, state: SparseState) -> None:
    """Warns of a state that, with gradients, is larger than that of dense arrays."""

    def dense_like(params: Any) -> Any:
        weights = realize(params)
        single = state.master is None
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)
        return weights, weights, () if single else wide, tx.init(wide)

    slots = jax.eval_shape(make_slots, state.params)
    ours = trees.num_bytes((state, slots))
    theirs = trees.num_bytes(jax.eval_shape(dense_like, state.params))
    if ours > theirs:
        warnings.warn(
            f"state and gradients take {ours} bytes, {theirs} without compression: too "
            "few parameters are pruned",
            stacklevel=3,
        )


def _write(params: Any, master: Any) -> Any:
    """Returns the parameters with the values of `master`, rounded to their dtype."""
    return map_pruned(
        Pruned.replace,
        params,
        master,
        dense=lambda leaf, values: values.astype(leaf.dtype),
    )
