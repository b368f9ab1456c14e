"""Computing each of several results on one device only, and broadcasting it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax.collectives import broadcast
from hpcjax.core.assignment import assign_longest_first
from hpcjax.core.varying import Axes, assume_equal, axis_names, require_axes, vary
from hpcjax.optim.matrices import map_equal_shapes


def unstack(group: Any) -> list[Any]:
    """Returns the members of a tree whose leaves have a first dimension of them."""
    count = len(jax.tree.leaves(group)[0])
    return [jax.tree.map(lambda leaf, i=i: leaf[i], group) for i in range(count)]


def map_groups_on_owners(
    function: Callable[[Any], Any],
    groups: Sequence[Sequence[Any]],
    cost: Callable[[Any], float],
    axes: Axes,
) -> list[Any]:
    """Returns the results of `map_on_owners` for each group, stacked.

    Args:
      function: of an argument; its results must have one shape within a group.
      groups: the arguments.
      cost: of the call with an argument, in any unit.
      axes: the mesh axis, or axes.
    """
    arguments = [argument for group in groups for argument in group]
    found = iter(map_on_owners(function, arguments, [*map(cost, arguments)], axes))
    return [
        jax.tree.map(lambda *each: jnp.stack(each), *[next(found) for _ in group])
        for group in groups
    ]


def map_on_owners(
    function: Callable[[Any], Any],
    arguments: Sequence[Any],
    costs: Sequence[float],
    axes: Axes,
) -> list[Any]:
    """Returns `[function(a) for a in arguments]`, each computed on one device only.

    Calls are assigned to devices in order of falling cost, see `assign_longest_first`,
    and each device broadcasts its results to the others.

    Args:
      function: takes and returns a tree of arrays.
      arguments: one for each call, the same on all devices of `axes`.
      costs: one for each call, in any unit.
      axes: the mesh axis, or axes.

    Raises:
      ConfigError: outside of `shard_map` over the axes.
    """
    require_axes(axes, "an optimizer that shares its factors out")
    names = axis_names(axes)
    devices = 1
    for name in names:
        devices *= jax.lax.axis_size(name)
    work = {place: {"": cost} for place, cost in enumerate(costs)}
    owner = assign_longest_first(work, [[device] for device in range(devices)]).owner
    mine = [[p for p in work if owner[p][""] == device] for device in range(devices)]

    def branch(device: int) -> Callable[[Any], Any]:
        def run(arguments: Any) -> Any:
            own = map_equal_shapes(function, [(arguments[p],) for p in mine[device]])
            # All branches of a `switch` return the same tree: zeros for the others'.
            shapes = [jax.eval_shape(function, each) for each in arguments]
            results = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            for place, result in zip(mine[device], own, strict=True):
                results[place] = result
            return vary(results, names)

        return run

    index = jax.lax.axis_index(names)
    branches = [branch(device) for device in range(devices)]
    results = vary(jax.lax.switch(index, branches, list(arguments)), names)
    # One broadcast for each device and dtype: its results lie one after another in
    # `flat`.
    for device, places in enumerate(mine):
        others = [other for other in range(devices) if other != device]
        leaves, structure = jax.tree.flatten([results[place] for place in places])
        for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
            same = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            flat = jnp.concatenate([leaves[i].ravel() for i in same])
            flat = broadcast(flat, names, [[device, *others]])
            ends = np.cumsum([leaves[i].size for i in same])[:-1].tolist()
            for i, part in zip(same, jnp.split(flat, ends), strict=True):
                leaves[i] = part.reshape(leaves[i].shape)
        received = jax.tree.unflatten(structure, assume_equal(leaves, names))
        for place, result in zip(places, received, strict=True):
            results[place] = result
    return results
