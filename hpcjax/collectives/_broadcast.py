"""Broadcast of one device's value to others, by a binomial tree."""

from collections.abc import Sequence

from jaxtyping import Array, Shaped

from hpcjax.collectives.mesh_group import MeshGroup
from hpcjax.collectives.subset import spread
from hpcjax.core.varying import Axes, axis_names, vary


def broadcast(
    x: Shaped[Array, "..."], axes: Axes, groups: Sequence[Sequence[int]]
) -> Shaped[Array, "..."]:
    """Broadcasts the value of the first device of each group to the rest of the group.

    In round k of a binomial tree, the first 2ᵏ members send to the next 2ᵏ. A group of
    p devices takes ⌈log₂ p⌉ rounds and moves p − 1 times the value, the least that a
    broadcast can; an all-reduce of the value and zeros would move about twice that.

    Args:
      x: the value of the first device of a group; that of others is replaced. A device
        in no group keeps its own.
      axes: mesh axis or axes; devices are numbered along them, the last one fastest.
      groups: disjoint lists of device numbers.

    Returns:
      The value, of the shape and dtype of `x`. Its type says that it may differ along
      `axes`: see `core.assume_equal`.

    Raises:
      ValueError: a device in two groups, or one that does not exist.

    Examples:
      >>> import jax
      >>> from jax.sharding import PartitionSpec
      >>> from hpcjax import sharding
      >>> body = lambda x: broadcast(x, "data", [[0]])
      >>> mesh = sharding.data_mesh(1)
      >>> spec = PartitionSpec("data")
      >>> spread = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
      >>> spread(jax.numpy.ones(1))
      Array([1.], dtype=float32)
    """
    members = [device for group in groups for device in group]
    if len(members) != len(set(members)):
        raise ValueError(f"groups must not share devices: got {groups}")
    names = axis_names(axes)
    devices = MeshGroup(names).size
    if not set(members) <= set(range(devices)):
        raise ValueError(f"devices are 0 to {devices - 1}: got groups {groups}")
    return spread(MeshGroup(names), vary(x, names), groups)
