"""Longest-processing-time assignment: largest item first, to the least loaded."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


class Assignment(NamedTuple):
    """The workers that items and their parts are assigned to.

    Attributes:
      group: the number of each item's group of workers.
      owner: the worker of each part of each item.
      loads: the total cost of each worker, in order.
    """

    group: dict[Hashable, int]
    owner: dict[Hashable, dict[str, int]]
    loads: tuple[float, ...]


def assign_longest_first(
    work: Mapping[ItemT, Mapping[str, float]],
    groups: Sequence[Sequence[int]],
    *,
    colocate: bool = True,
) -> Assignment:
    """Spreads items over groups of workers, and the parts of an item over its group.

    Items are taken in order of decreasing total cost, ties in their given order. Each
    goes to the group with the least load, ties to the first. All its parts go to the
    least loaded worker of that group or, with `colocate=False`, one after another in
    decreasing (cost, name), each to the worker that is the least loaded by then. With
    groups of one worker this is Graham's rule, whose largest load is at most 4/3 of the
    least possible.

    Args:
      work: the cost of each part of each item.
      groups: disjoint groups of workers 0, 1, …, none empty; each worker in one.
      colocate: whether the parts of an item stay together.

    Raises:
      ValueError: groups that are not a partition of 0, 1, ….

    References:
      Graham, Bounds on Multiprocessing Timing Anomalies, 1969.

    Examples:
      >>> work = {"x": {"": 3.0}, "y": {"": 1.0}, "z": {"": 2.0}}
      >>> assign_longest_first(work, [[0], [1]]).loads
      (3.0, 3.0)
    """
    workers = sorted(worker for group in groups for worker in group)
    if not workers or workers != list(range(len(workers))) or not all(groups):
        raise ValueError(f"groups must share out the workers 0, 1, …: got {groups}")
    loads = [0.0] * len(workers)
    chosen: dict[Hashable, int] = {}
    owner: dict[Hashable, dict[str, int]] = {}

    def least(among: Iterable[int]) -> int:
        return min(among, key=lambda worker: loads[worker])

    for item in sorted(work, key=lambda item: -sum(work[item].values())):
        parts = work[item]
        totals = [sum(loads[worker] for worker in group) for group in groups]
        chosen[item] = totals.index(min(totals))
        group = groups[chosen[item]]
        together, owner[item] = least(group), {}
        by_cost = sorted(((cost, name) for name, cost in parts.items()), reverse=True)
        for cost, name in by_cost:
            worker = together if colocate else least(group)
            owner[item][name] = worker
            loads[worker] += cost
    return Assignment(chosen, owner, tuple(loads))
