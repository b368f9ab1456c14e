"""State whose value differs from device to device along a mesh axis.

A transform wraps such a part of its state in `PerDevice` and works with the shapes of
one device. Code that runs the transform inside `shard_map` takes the in and out
specifications from `specs`, calls `enter` on the first line of the body and `leave` on
the last. Outside, every leaf below a `PerDevice` has one leading dimension, of the size
of the axis. Chains, masks, checkpoints and `jax.tree` functions need no special case.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.structs import pytree, static
from hpcjax.core.varying import axis_names, vary

Resize = Literal["mean", "reset", "refuse"]


@pytree
class PerDevice:
    """A subtree whose value differs along mesh axis `axis`.

    Attributes:
      value: the subtree, with the shapes of one device.
      axis: the mesh axis, or axes, along which it differs.
      resize: what happens when a checkpoint continues on another number of devices:
        `"mean"` keeps the mean over devices (residuals; leaves that are not floating
        must be equal on all), `"reset"` starts again from zeros (caches), `"refuse"`
        is an error.
    """

    value: Any
    axis: str | tuple[str, ...] = static()
    resize: Resize = static(default="mean")


def wrap(
    value: Any, axis: str | tuple[str, ...] | None, resize: Resize = "mean"
) -> Any:
    """Returns a `PerDevice` of the value; without an axis the value itself."""
    if axis is None:
        return value
    return PerDevice(value=value, axis=axis, resize=resize)


def unwrap(part: Any) -> Any:
    """Returns the value in a `PerDevice`; anything else unchanged."""
    return part.value if isinstance(part, PerDevice) else part


def map_per_device(
    function: Callable[[PerDevice, Any, str], Any],
    tree: Any,
    other: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Maps `function(node, leaf, path)` in a `PerDevice`, `other(leaf)` elsewhere.

    A `PerDevice` inside another one differs along the axes of both. `function` is then
    given the inner node with the axes of both, the outer ones first.
    """

    def visit(outer: tuple[str, ...], place: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, PerDevice):
            return other(node)
        # `fromkeys` removes repeated axes and keeps their order.
        axes = tuple(dict.fromkeys((*outer, *axis_names(node.axis))))
        joint = dataclasses.replace(node, axis=axes if outer else node.axis)

        def inside(path: tuple[Any, ...], leaf: Any) -> Any:
            if isinstance(leaf, PerDevice):
                return visit(axes, place + path, leaf)
            return function(joint, leaf, trees.path_of(place + path))

        # `node` is itself a `PerDevice` and must be entered; only those inside it stop
        # the traversal.
        return jax.tree.map_with_path(
            inside,
            node,
            is_leaf=lambda part: isinstance(part, PerDevice) and part is not node,
        )

    return jax.tree.map_with_path(
        functools.partial(visit, ()),
        tree,
        is_leaf=lambda part: isinstance(part, PerDevice),
    )


def average(tree: Any) -> Any:
    """Replaces each `PerDevice` by the mean over its devices; inside `shard_map`.

    Sums are formed in float32 or wider; results are replicated along the axes.
    """
    return _average(tree, lambda leaf, axis: jax.lax.pmean(vary(leaf, axis), axis))


def average_outside(tree: Any) -> Any:
    """Does the same as `average` outside `shard_map`, where device dimensions lead."""
    return _average(tree, lambda leaf, _: leaf.mean(axis=0))


def _average(tree: Any, mean: Callable[[Any, Any], Any]) -> Any:
    def fit(node: PerDevice, leaf: Any, _: str) -> Any:
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return mean(wide, node.axis).astype(leaf.dtype)

    return bare(map_per_device(fit, tree))


def bare(tree: Any) -> Any:
    """Replaces each `PerDevice` in a tree by its value, nested ones too."""
    # One pass removes the outermost of nested ones only.
    while any(isinstance(part, PerDevice) for part in _parts(tree)):
        tree = jax.tree.map(
            unwrap, tree, is_leaf=lambda part: isinstance(part, PerDevice)
        )
    return tree


def _parts(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, PerDevice))


def specs(state: Any) -> Any:
    """Returns the `shard_map` specifications of `state`: replicated, or split."""
    return map_per_device(
        lambda node, *_: PartitionSpec(node.axis), state, lambda _: PartitionSpec()
    )


def enter(state: Any) -> Any:
    """Drops the leading device dimension: the first line inside `shard_map`.

    Raises:
      ConfigError: there is none, as where `expand` was forgotten.
    """

    def first(node: PerDevice, leaf: Any, path: str) -> Any:
        if leaf.ndim == 0:
            raise ConfigError(
                f"{path} differs along {node.axis}, and has no axis of devices: call "
                "per_device.expand(state, mesh) once, outside of shard_map"
            )
        return leaf[0]

    return map_per_device(first, state)


def leave(state: Any) -> Any:
    """Adds the leading device dimension: the last line inside `shard_map`."""
    return map_per_device(lambda _, leaf, __: leaf[None], state)


def require_entered(part: Any, shapes: Any, who: str) -> None:
    """Checks that the state of one device has the shapes of one device.

    Args:
      part: a `PerDevice` or its value.
      shapes: the same tree of arrays or `ShapeDtypeStruct`s; `()` expects nothing.
      who: whose state it is, for the message.

    Raises:
      ConfigError: it has other shapes, as where `expand` or `enter` was forgotten.
    """
    given, wanted = jax.tree.leaves(unwrap(part)), jax.tree.leaves(shapes)
    for leaf, like in zip(given, wanted, strict=False):
        if leaf.shape != like.shape:
            raise ConfigError(
                f"{who} has a part of shape {leaf.shape} on this device, where it must "
                f"be {like.shape}: outside of shard_map call per_device.expand(state, "
                "mesh) once, inside per_device.enter(state) on the first line and "
                "per_device.leave(state) on the last"
            )


def axis_size(mesh: Mesh, axis: str | tuple[str, ...]) -> int:
    """Returns the number of devices along one axis, or along several together."""
    names = (axis,) if isinstance(axis, str) else axis
    size = 1
    for name in names:
        if name not in mesh.shape:
            raise ValueError(f"axis must be one of {tuple(mesh.shape)}: got {name!r}")
        size *= mesh.shape[name]
    return size


def expand(state: Any, mesh: Mesh) -> Any:
    """Adds the device dimension to fresh per-device leaves, by repeating them."""

    def repeat(node: PerDevice, leaf: Any, _: str) -> Any:
        return jnp.broadcast_to(leaf, (axis_size(mesh, node.axis), *leaf.shape))

    return map_per_device(repeat, state)


def resize(state: Any, mesh: Mesh, like: Any = None) -> Any:
    """Fits restored per-device leaves to the device count of `mesh`.

    Fewer devices take the averages of groups of neighbours, more devices take copies.
    Either keeps the mean over devices, but a non-linear method continues on another
    trajectory. Integers, booleans and random keys have no mean: they are kept if they
    are equal on all devices.

    Args:
      state: the restored state.
      mesh: the mesh to continue on.
      like: a state made for `mesh`, or its shapes: leaves with `"reset"` may have
        shapes that depend on the mesh. None for the shapes of `state`.

    Raises:
      ValueError: neither count divides the other, the state refuses, or devices hold
        different values of a leaf that is not floating; names the leaf.
    """
    shapes = {} if like is None else trees.flatten(like)

    def fit(node: PerDevice, leaf: Any, path: str) -> Any:
        old, new = leaf.shape[0], axis_size(mesh, node.axis)
        wanted = shapes[path].shape if path in shapes else (new, *leaf.shape[1:])
        if node.resize == "reset" and leaf.shape != wanted:
            return jnp.zeros(wanted, leaf.dtype)
        if old == new:
            return leaf
        if node.resize == "refuse" or (old % new and new % old):
            raise ValueError(
                f"per-device state {path!r} of axis {node.axis!r} saved on {old} "
                f"devices cannot continue on {new} (resize={node.resize!r})"
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            if not bool((leaf == leaf[:1]).all()):
                raise ValueError(
                    f"per-device state {path!r} ({leaf.dtype}) has no mean and differs "
                    f"between the {old} devices it was saved on: it cannot continue on "
                    f"{new}"
                )
            # Indexing works for random keys, too; all rows are equal to row 0.
            return leaf[np.zeros(new, int)]
        if new > old:
            # Device d continues from old device ⌊d · old / new⌋: 0 0 1 1 for 2 to 4.
            return leaf[np.arange(new) // (new // old)]
        groups = leaf.reshape(new, old // new, *leaf.shape[1:])
        # Restored leaves may be NumPy arrays, whose mean accumulates in their own
        # dtype.
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return groups.mean(1, dtype=wide).astype(leaf.dtype)

    return map_per_device(fit, state)
