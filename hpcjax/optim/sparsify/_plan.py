"""What is pruned of given parameters, when, and how much of each layer is kept."""

import functools
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.patterns import check_pruned, check_stacked, matches_any
from hpcjax.core.structures import NM, Structure
from hpcjax.optim.sparsify._stacks import split_shapes
from hpcjax.optim.sparsify.distributions import (
    Distribution,
    Layer,
    Uniform,
)
from hpcjax.optim.sparsify.schedules import Schedule, ramp


class Plan(NamedTuple):
    """All that is known of masks before they are chosen.

    Attributes:
      pruned: whether each parameter is pruned, by path.
      stacked: the paths of those that are stacks of layers.
      steps: at which masks change, ascending.
      counts: the units that each layer keeps from each of these steps on, `[changes]`;
        one such array for all layers together, where scores decide between layers.
    """

    pruned: dict[str, bool]
    stacked: frozenset[str]
    steps: np.ndarray
    counts: dict[str, np.ndarray] | np.ndarray


def choose_pruned(
    params: Any,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    stacked: tuple[str, ...] = (),
) -> dict[str, bool]:
    """Returns whether each parameter is pruned, by path.

    Args:
      params: a tree of arrays or shapes.
      include: regexes; nothing includes all parameters with two axes or more.
      exclude: regexes of parameters that are not pruned, whatever includes them.
      stacked: regexes of stacks of layers, whose first axis does not count.

    Raises:
      ConfigError: a regex that matches nothing, or there are parameters and none is
        pruned.

    Examples:
      >>> params = {"bias": np.ones(2), "kernel": np.ones((3, 2))}
      >>> choose_pruned(params, (), ())
      {'bias': False, 'kernel': True}
    """
    leaves = trees.flatten(params)
    if not leaves:
        return {}
    rules: list[tuple[str, bool | None]] = [
        *((pattern, False) for pattern in exclude),
        *((pattern, True) for pattern in include),
        (".*", False if include else None),
    ]
    chosen = trees.choose(rules, leaves, others=trees.paths(params))
    stacks = find_stacked(params, stacked)
    pruned = {
        path: leaves[path].ndim - (path in stacks) > 1 if choice is None else choice
        for path, choice in chosen.items()
    }
    check_pruned({path: leaf.shape for path, leaf in leaves.items()}, pruned.values())
    return pruned


def find_stacked(params: Any, stacked: tuple[str, ...]) -> frozenset[str]:
    """Returns the paths of parameters that are stacks of layers.

    Raises:
      ConfigError: a regex that matches nothing.
    """
    check_stacked(stacked, trees.paths(params))
    return frozenset(
        path for path in trees.flatten(params) if matches_any(stacked, path)
    )


def make_plan(
    params: Any,
    *,
    structure: Structure,
    distribution: Distribution | None,
    schedule: Schedule,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    stacked: tuple[str, ...] = (),
) -> Plan:
    """Returns the plan for parameters, from their shapes alone.

    A distribution of None is `Uniform()`, and that of `NM` for `NM`.

    Raises:
      ConfigError: nothing matches a regex, the structure does not fit a parameter, or
        a distribution is given with `NM`, which has its own.
    """
    pruned = choose_pruned(params, include, exclude, stacked)
    stacks, leaves = find_stacked(params, stacked), trees.flatten(params)
    shapes = split_shapes(
        {path: leaves[path].shape for path in pruned if pruned[path]}, stacks
    )
    made = _counts(tuple(shapes.items()), structure, distribution, schedule)
    return Plan(pruned, stacks, np.asarray(schedule.steps(), np.int32), made)


@functools.lru_cache(maxsize=64)
def _counts(
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    structure: Structure,
    distribution: Distribution | None,
    schedule: Schedule,
) -> dict[str, np.ndarray] | np.ndarray:
    """Returns the counts of `Plan`; cached, for every trace asks for them again."""
    if not shapes:
        return {}
    by_path = dict(shapes)
    units = structure.unit_shapes(by_path)
    layers = {
        name: Layer(int(np.prod(shape)), by_path.get(name, shape))
        for name, shape in units.items()
    }
    shares = distribution or Uniform()
    if isinstance(structure, NM):
        if distribution is not None:
            raise ConfigError(
                "NM keeps n of m everywhere, and so takes no distribution: got "
                f"structure={structure}, distribution={distribution}"
            )
        # Of each m inputs; the share that goes is scheduled as any sparsity.
        layers = {
            name: Layer(structure.m, layer.shape) for name, layer in layers.items()
        }
        shares = Uniform(sparsity=1 - structure.n / structure.m)
    every: list[Any] = [
        shares.counts(layers, ramp(schedule, number))
        for number in range(len(schedule.steps()))
    ]
    if isinstance(every[0], int):
        return np.asarray(every, np.int32)
    return {
        name: np.asarray([counts[name] for counts in every], np.int32)
        for name in layers
    }
