"""Arrays that are cut over mesh axes: their parts, inside `shard_map`.

A parameter that is spread over devices keeps its path, its global shape and its dtype,
in a state as in a checkpoint; a `PartitionSpec` says how it is cut. So any checkpoint
goes on under any other one. `PerDevice` is for what differs between devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from hpcjax.core import compat, trees
from hpcjax.core.deferred import Deferred
from hpcjax.core.errors import ConfigError
from hpcjax.core.structs import pytree, static
from hpcjax.core.varying import (
    after,
    axis_names,
    require_axes,
    vary,
    varying_axes,
)

Cuts = tuple[tuple[int, str], ...]
"""(dimension counted from the last one, mesh axis), the outermost axis first.

The scan over a stack of layers takes its first dimension away: the last ones stay.
"""

Specs = Mapping[str, PartitionSpec]
"""How parameters are cut, by path; one that is not there is replicated."""


class CutAxes(dict[str, tuple[str, ...]]):
    """What an update of parts is told as `cut`: mesh axes, by path of what is cut.

    Attributes:
      global_shape: by path of every parameter, the shape of the whole.
      of_layer: the axes that one layer of a stack is cut along, whose layers are the
        first dimension: devices along others have other layers.
    """

    def __init__(
        self, cuts: Mapping[str, Cuts], global_shape: Mapping[str, tuple[int, ...]]
    ) -> None:
        within = {
            path: tuple(cut for cut in own if cut[0] != -len(global_shape[path]))
            for path, own in cuts.items()
        }
        super().__init__({path: axes_of(own) for path, own in cuts.items() if own})
        self.of_layer = {path: axes_of(own) for path, own in within.items() if own}
        self.global_shape = global_shape


def list_cuts(specs: Specs, path: str, ndim: int) -> Cuts:
    """Returns how an array of so many dimensions is cut.

    Examples:
      >>> list_cuts({"kernel": PartitionSpec(None, ("model", "data"))}, "kernel", 2)
      ((-1, 'model'), (-1, 'data'))
      >>> list_cuts({}, "kernel", 2)
      ()
    """
    return tuple(
        (dim - ndim, axis)
        for dim, axes in enumerate(specs.get(path, PartitionSpec()))
        if axes is not None
        for axis in axis_names(axes)
    )


def axes_of_spec(spec: PartitionSpec) -> set[str]:
    """Returns the mesh axes that a specification names."""
    return set(axes_of(list_cuts({"": spec}, "", len(spec))))


def axes_of(cuts: Cuts) -> tuple[str, ...]:
    """Returns the mesh axes of cuts."""
    return tuple(dict.fromkeys(axis for _, axis in cuts))


def spec_tree(specs: Specs, like: Any) -> Any:
    """Returns the specification of each leaf of a tree."""
    paths = trees.flatten(like)
    return trees.unflatten(like, {p: specs.get(p, PartitionSpec()) for p in paths})


def state_specs(
    tx: optax.GradientTransformation, params: Any, state: Any, specs: Specs
) -> Any:
    """Returns those of a transform's state: what is like a parameter is cut like it."""
    return map_state(
        lambda leaf, spec: leaf if is_masked(leaf) else spec,
        tx,
        state,
        spec_tree(specs, params),
        other=lambda _: PartitionSpec(),
    )


def map_state(
    function: Callable[[Any, Any], Any],
    tx: optax.GradientTransformation,
    state: Any,
    like: Any,
    other: Callable[[Any], Any],
) -> Any:
    """Maps what is of a parameter, with that of `like`, and `other` what is of none.

    optax finds it by a state of a placeholder, which a function of the tree, such as
    the labels of `optax.partition`, may not be able to walk. Then all is of parameters
    that has their structure.
    """
    wanted = jax.tree.structure(like)

    def is_of_params(node: Any) -> bool:
        return jax.tree.structure(node, is_leaf=is_masked) == wanted

    def init(placeholder: Any) -> Any:
        try:
            return tx.init(placeholder)
        except (AttributeError, LookupError, TypeError, ValueError):
            return jax.tree.map(
                lambda node: placeholder if is_of_params(node) else node,
                state,
                is_leaf=is_of_params,
            )

    return optax.tree.map_params(
        init, function, state, like, transform_non_params=other, is_leaf=is_masked
    )


def is_masked(node: Any) -> bool:
    """Says whether a node stands for what `optax.masked` has removed."""
    return isinstance(node, optax.MaskedNode)


def gather(part: jax.Array, cuts: Cuts) -> jax.Array:
    """Returns the whole array, of which each device gives its part.

    Its gradient is the reduce-scatter: each device gets its part of the sum over
    devices.
    """
    for dim, axis in reversed(cuts):
        part = lax.all_gather(part, axis, axis=part.ndim + dim, tiled=True)
    return part


def sum_parts(whole: jax.Array, cuts: Cuts) -> jax.Array:
    """Returns this device's part of the sum over devices, by reduce-scatters."""
    for dim, axis in cuts:
        whole = lax.psum_scatter(
            vary(whole, axis), axis, scatter_dimension=whole.ndim + dim, tiled=True
        )
    return whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gather_first(parts: list[Any], others: Any, cuts: tuple[Cuts, ...]) -> Any:
    """Returns the whole arrays of parts, and the others as they are.

    Where a scan gathers the others, its backward pass is a loop with collectives. The
    reduce-scatters of the first, which may need nothing of that loop, come after it, so
    that all devices take them in one order: see `core.after`. What the scan begins with
    must come after the gathers.

    Args:
      parts: this device's parts.
      others: a tree.
      cuts: how each of the parts is cut.
    """
    return [gather(part, cut) for part, cut in zip(parts, cuts, strict=True)], others


def _gather_forward(parts: list[Any], others: Any, cuts: tuple[Cuts, ...]) -> Any:
    return gather_first(parts, others, cuts), None


def _gather_backward(cuts: tuple[Cuts, ...], _: None, slopes: Any) -> Any:
    whole, others = slopes
    whole = after(whole, others)
    return [sum_parts(x, cut) for x, cut in zip(whole, cuts, strict=True)], others


gather_first.defvjp(_gather_forward, _gather_backward)


def whole_shape(part: tuple[int, ...], cuts: Cuts) -> tuple[int, ...]:
    """Returns the shape of an array of which a device has a part of such a shape."""
    shape = list(part)
    for dim, axis in cuts:
        shape[dim] *= lax.axis_size(axis)
    return tuple(shape)


def take_part(whole: jax.Array, cuts: Cuts) -> jax.Array:
    """Returns this device's part of an array that all have."""
    for dim, axis in cuts:
        size = whole.shape[dim] // lax.axis_size(axis)
        start = lax.axis_index(axis) * size
        whole = lax.dynamic_slice_in_dim(vary(whole, axis), start, size, dim)
    return whole


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def share_out(whole: jax.Array, cuts: Cuts) -> jax.Array:
    """Returns this device's part of an array that is equal on all.

    The slopes of parts are gathered. Those of `take_part` are summed over devices,
    which sends twice as much: each adds zeros for what it has no part of.
    """
    return take_part(whole, cuts)


def _share_out_forward(whole: jax.Array, cuts: Cuts) -> tuple[jax.Array, None]:
    return take_part(whole, cuts), None


def _share_out_backward(cuts: Cuts, _: None, slope: jax.Array) -> tuple[jax.Array]:
    return (gather_equal(slope, cuts),)


share_out.defvjp(_share_out_forward, _share_out_backward)


def gather_equal(part: jax.Array, cuts: Cuts) -> jax.Array:
    """Returns the whole array, equal on all devices, of which each gives its part.

    Slopes of the whole are equal on all devices as well, so that each takes its part of
    them; the reduce-scatter of `gather` would count them once for each device.
    """
    for dim, axis in reversed(cuts):
        part = compat.gather_equal(part, axis, part.ndim + dim)
    return part


# The name of what collectives of a layer return, see `received`.
COLLECTIVE = "collective"


def received(x: jax.Array) -> jax.Array:
    """Names what a collective has returned, after casts, for `jax.checkpoint`.

    A policy that saves this name recomputes no collective.
    """
    return checkpoint_name(x, COLLECTIVE)


@pytree
class Part:
    """A device's part of a parameter, with which layers compute as it is.

    A layer that takes one in the place of an array takes and returns parts of features,
    and communicates where it must; see `layers.dense`.

    Attributes:
      value: the part.
      cuts: how the parameter is cut.
      once: whether devices with equal inputs share out what they send to others, see
        `layers.experts`.
      codec: how what devices send to sum outputs is compressed, see `compress.Codec`;
        None for not at all.
      given: what the codec takes besides, such as its own parameters.
    """

    value: Any
    cuts: Cuts = static()
    once: bool = static(default=True)
    codec: Any = static(default=None)
    given: Any = None

    @property
    def T(self) -> "Part":  # noqa: N802 - as of arrays
        """The part of the transposed matrix."""
        turned = tuple((-3 - dim, axis) for dim, axis in self.cuts)
        return Part(value=self.value.T, cuts=turned)

    def sum(self, y: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """Returns the sum of devices' products, as exactly as the codec sends them."""
        if self.codec is None:
            return lax.psum(y, axes)
        return self.codec.sum(y, axes, self.given)


def open_part(leaf: Any, *dims: int) -> tuple[Any, ...]:
    """Returns an array, and the mesh axes over which each dimension is cut.

    Args:
      leaf: a `Part`, or anything else, which is whole.
      *dims: counted from the last one, such as -1.

    Raises:
      ConfigError: a part outside of `shard_map`, or inside one with `check_vma=False`,
        where slopes would be summed wrongly.

    Examples:
      >>> open_part(Part(value=3.0, cuts=((-1, "row"),)), -2, -1)
      (3.0, (), ('row',))
    """
    if not isinstance(leaf, Part):
        return leaf, *[()] * len(dims)
    if isinstance(leaf.value, jax.Array):
        _check_types(leaf)
    axes = [tuple(axis for at, axis in leaf.cuts if at == dim) for dim in dims]
    return leaf.value, *axes


def _check_types(part: Part) -> None:
    axes = axes_of(part.cuts)
    require_axes(axes, "a layer with parts of its parameters")
    split = {axis for axis in axes if lax.axis_size(axis) > 1}
    if not split <= varying_axes(part.value):
        raise ConfigError(
            f"a part that is cut over {', '.join(axes)} must differ along them: take "
            "shard_map with check_vma=True, and their names in its in_specs"
        )


@pytree
class Shard(Deferred):
    """A device's part of a parameter, gathered where a model uses it.

    Attributes:
      value: the part.
      cuts: how the parameter is cut, as far as it is gathered.
      again: whether the backward pass gathers it again, and does not keep it.
      kept: how the parameter is cut besides; what is gathered is a `Part` then.
      codec: of that `Part`.
      given: of that `Part`.
    """

    value: Any
    cuts: Cuts = static()
    again: bool = static(default=False)
    kept: Cuts = static(default=())
    codec: Any = static(default=None)
    given: Any = None

    def realize(self) -> Any:
        """Returns the parameter, or its `Part`; see `gather`."""
        whole = gather(self.value, self.cuts)
        own = {"cuts": self.kept, "codec": self.codec, "given": self.given}
        return Part(value=whole, **own) if self.kept else whole


def codec_start(tree: Any) -> int:
    """Returns the first layer of a stack whose sums are compressed; 0 if all are."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_cut)
    codecs = [node.codec for node in nodes if _is_cut(node) and node.codec is not None]
    return max((codec.start for codec in codecs), default=0)


def without_codecs(tree: Any) -> Any:
    """Returns a tree whose parts are summed without codecs."""
    return jax.tree.map(
        lambda node: (
            dataclasses.replace(node, codec=None, given=None) if _is_cut(node) else node
        ),
        tree,
        is_leaf=_is_cut,
    )


def _is_cut(node: Any) -> bool:
    return isinstance(node, Part | Shard)


def gathering_policy(
    policy: Callable[..., Any] | None, tree: Any
) -> Callable[..., Any] | None:
    """Returns a policy of `jax.checkpoint` that does with shards what they ask for.

    Args:
      policy: what is saved of all else; None for everything.
      tree: what the function gets that is checkpointed. Without a `Shard` in it nothing
        changes.
    """
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Shard))
    again = {node.again for node in nodes if isinstance(node, Shard)}
    if policy is None:
        return _save_all_but_gathered if True in again else None
    if again != {False}:
        return policy  # none of which saves what was gathered
    return lambda primitive, *args, **options: (
        _is_gather(primitive) or policy(primitive, *args, **options)
    )


# What a gathered array becomes on its way into a product. To save the result would be
# to save the whole parameter.
_PASSED_ON = {
    *("broadcast_in_dim", "convert_element_type", "name", "reshape", "squeeze"),
    "transpose",
}


def _save_all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    # By primitive: `save_anything_except_these_names` saves the unnamed result of the
    # gather, which the name is put on afterwards.
    return not (_is_gather(primitive) or primitive.name in _PASSED_ON)


def _is_gather(primitive: Any) -> bool:
    return primitive.name.startswith("all_gather")
