"""One device's value on many devices, by a binomial tree."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from hpcjax.core.varying import Axes, axis_names, vary


def broadcast(
    x: Shaped[Array, "..."], axes: Axes, groups: Sequence[Sequence[int]]
) -> Shaped[Array, "..."]:
    """Gives the value of the first device of each group to the rest of the group.

    A binomial tree: in round k the first 2ᵏ members send to the next 2ᵏ. A group of p
    devices takes ⌈log₂ p⌉ rounds and moves p − 1 times the value, which is the least a
    broadcast can move; an all-reduce of the value and zeros moves about twice that.

    Args:
      x: the value; what the other members hold is replaced. A device in no group keeps
        its own.
      axes: the mesh axis, or axes; a device's number counts along them, last fastest.
      groups: disjoint lists of device numbers.

    Returns:
      The value, of the shape and dtype of `x`. Its type says that it may differ along
      `axes`: see `core.assume_equal`.

    Raises:
      ValueError: a device in two groups, or one that there is not.

    Examples:
      >>> from jax.sharding import PartitionSpec
      >>> from hpcjax import sharding
      >>> body = lambda x: broadcast(x, "data", [[0]])
      >>> mesh = sharding.data_mesh(1)
      >>> spec = PartitionSpec("data")
      >>> jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.ones(1))
      Array([1.], dtype=float32)
    """
    members = [device for group in groups for device in group]
    if len(members) != len(set(members)):
        raise ValueError(f"groups must not share devices: got {groups}")
    names = axis_names(axes)
    devices = math.prod(jax.lax.axis_size(name) for name in names)
    if not set(members) <= set(range(devices)):
        raise ValueError(f"devices are 0 to {devices - 1}: got groups {groups}")
    x = vary(x, names)
    index = jax.lax.axis_index(names)
    for pairs in _rounds(groups):
        receives = np.zeros(devices, bool)
        receives[[target for _, target in pairs]] = True
        received = jax.lax.ppermute(x, names, pairs)
        x = jnp.where(jnp.asarray(receives)[index], received, x)
    return x


def _rounds(groups: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """Returns the (source, target) pairs of each round."""
    rounds = []
    have, largest = 1, max((len(group) for group in groups), default=0)
    while have < largest:
        rounds.append(
            [
                (group[place - have], group[place])
                for group in groups
                for place in range(have, min(2 * have, len(group)))
            ]
        )
        have *= 2
    return rounds
