"""The bytes that partial backward passes send, by worker."""

from collections.abc import Sequence
from typing import NamedTuple

from hpcjax.collectives import dense_words
from hpcjax.optim.partial_backward import Mode, contributors_of, trees_of


class Sends(NamedTuple):
    """The bytes that each worker sends in a step.

    Attributes:
      reduced: in ring all-reduces among the contributors of each block.
      given: of means, to workers that have no gradient of a block.
    """

    reduced: tuple[float, ...]
    given: tuple[float, ...]

    @property
    def total(self) -> tuple[float, ...]:
        """Their sum, by worker."""
        return tuple(a + b for a, b in zip(self.reduced, self.given, strict=True))


def contributor_bytes(
    block_bytes: Sequence[int | float],
    roles: Sequence[int],
    mode: Mode = "contributors",
) -> Sends:
    """Returns the bytes that each worker sends in a step, if all sums are ring-reduced.

    For k equal blocks of s bytes and one worker of each role, "contributors" sends
    Σⱼ (2 (j − 1) + (k − j)) s = 3/2 k (k − 1) s in all, 3/4 of the 2 k (k − 1) s that
    "zeros" sends.

    Args:
      block_bytes: size of each block's gradient in float32.
      roles: the roles of all workers.
      mode: see `contributor_mean`.

    Raises:
      ConfigError: roles that are not those of so many blocks.

    Examples:
      >>> from hpcjax.optim import roles
      >>> sum(contributor_bytes([1, 1, 1, 1], roles(4, 4, 0)).total)
      18.0
      >>> sum(contributor_bytes([1, 1, 1, 1], roles(4, 4, 0), "zeros").total)
      24.0
    """
    k, workers = len(block_bytes), len(roles)
    reduced, given = [0.0] * workers, [0.0] * workers
    for number, size in enumerate(block_bytes, 1):
        contributors = contributors_of(roles, number, k)
        members = range(workers) if mode == "zeros" else contributors
        for worker in members:
            reduced[worker] += dense_words(size, len(members))
        for tree in trees_of(roles, contributors) if mode == "contributors" else ():
            for place in range(len(tree)):
                given[tree[place]] += size * _children(place, len(tree))
    return Sends(tuple(reduced), tuple(given))


def _children(place: int, size: int) -> int:
    """Returns to how many others a place in a binomial tree sends.

    As in `collectives.spread`: in the round of distance `step` the first `step` places
    have the data, and each sends it to the place `step` further, if there is one.
    """
    step, count = 1, 0
    while step < size:
        count += place < step and place + step < size
        step *= 2
    return count
