"""State whose value differs from device to device along a mesh axis.

A transform wraps such a part of its state in `PerDevice` and otherwise sees plain
shapes. Whoever runs the transform inside `shard_map` calls `specs` for the in and out
specifications, `enter` on the first line of the body and `leave` on the last; outside,
every leaf below a `PerDevice` has one leading dimension of the size of the axis.
Chains, masks, checkpoints and `jax.tree` functions need to know nothing of it.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from hpcjax.core import trees
from hpcjax.core.structs import pytree, static

Resize = Literal["mean", "reset", "refuse"]


@pytree
class PerDevice:
    """A subtree whose value differs along mesh axis `axis`.

    Attributes:
      value: the subtree, with the shapes of one device.
      axis: the mesh axis, or axes, along which it differs.
      resize: on another device count `"mean"` keeps the mean over devices (residuals;
        a leaf that is not floating must be the same on all), `"reset"` starts again
        from zero (caches), `"refuse"` is an error.
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
    """Returns what `wrap` was given."""
    return part.value if isinstance(part, PerDevice) else part


def map_per_device(
    function: Callable[[PerDevice, Any, str], Any],
    tree: Any,
    other: Callable[[Any], Any] = lambda leaf: leaf,
) -> Any:
    """Maps `function(node, leaf, path)` in a `PerDevice`, `other(leaf)` elsewhere."""

    def visit(place: tuple[Any, ...], node: Any) -> Any:
        if not isinstance(node, PerDevice):
            return other(node)
        return jax.tree.map_with_path(
            lambda path, leaf: function(node, leaf, trees.path_of(place + path)), node
        )

    return jax.tree.map_with_path(
        visit, tree, is_leaf=lambda node: isinstance(node, PerDevice)
    )


def specs(state: Any) -> Any:
    """Returns the `shard_map` specifications of `state`: replicated, or split."""
    return map_per_device(
        lambda node, *_: PartitionSpec(node.axis), state, lambda _: PartitionSpec()
    )


def enter(state: Any) -> Any:
    """Drops the leading device dimension: the first line inside `shard_map`."""
    return map_per_device(lambda _, leaf, __: leaf[0], state)


def leave(state: Any) -> Any:
    """Adds the leading device dimension: the last line inside `shard_map`."""
    return map_per_device(lambda _, leaf, __: leaf[None], state)


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
    """Repeats freshly initialised per-device leaves along the devices of `mesh`."""

    def repeat(node: PerDevice, leaf: Any, _: str) -> Any:
        return jnp.broadcast_to(leaf, (axis_size(mesh, node.axis), *leaf.shape))

    return map_per_device(repeat, state)


def resize(state: Any, mesh: Mesh, like: Any = None) -> Any:
    """Fits restored per-device leaves to the device count of `mesh`.

    Going down averages groups of neighbours, going up repeats, so that the mean over
    devices is unchanged; the trajectory of a non-linear method is not. Integers,
    booleans and random keys have no mean: what all devices agree on is kept.

    Args:
      state: as it was restored.
      mesh: to go on with.
      like: the state to go on with, or its shapes; what `"reset"` starts again takes
        its shape, which may depend on the mesh. None for the shapes of `state`.

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
            return leaf[np.zeros(new, int)]
        if new > old:
            return leaf[np.arange(new) // (new // old)]
        groups = leaf.reshape(new, old // new, *leaf.shape[1:])
        # numpy would add up a half precision in itself.
        wide = jnp.promote_types(leaf.dtype, jnp.float32)
        return groups.mean(1, dtype=wide).astype(leaf.dtype)

    return map_per_device(fit, state)
