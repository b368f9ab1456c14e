"""What an exchange needs of the devices, or processes, that take part in it.

An algorithm of this room is written once, against `Group`. `MeshGroup` runs it inside
`shard_map`, where shapes are static and buffers padded; `HostGroup` runs it in numpy,
in processes that send each other messages of whatever size.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# A JAX array in a MeshGroup, a numpy array in a HostGroup.
Vector = Any
Scalar = Any


class Entries(NamedTuple):
    """Entries of a vector of length n, by ascending index.

    Attributes:
      indices: int32; n where a place holds none, behind those that do or between them.
      values: float32; 0 there.
      count: int32, how many there are.
    """

    indices: Vector
    values: Vector
    count: Scalar


class Sent(NamedTuple):
    """What `Group.exchange` has done.

    Attributes:
      received: the sums of what came for our region, one entry for each index.
      taken: bool, for each place of the given entries, whether it was sent.
      sent: int32, entries that went to others.
      arrived: int32, entries that came from others.
    """

    received: Entries
    taken: Vector
    sent: Scalar
    arrived: Scalar


class Group(abc.ABC):
    """The members of an exchange, as one of them sees it.

    Every method that communicates must be called by all members, in the same order.

    Attributes:
      xp: the module of array functions, `jax.numpy` or `numpy`.
      padded: whether buffers have a fixed size.
    """

    xp: Any
    padded: bool

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of members, P."""

    @property
    @abc.abstractmethod
    def rank(self) -> Scalar:
        """Our number, from 0."""

    @abc.abstractmethod
    def sum(self, x: Any) -> Any:
        """Returns the sum over members of an array, or of each of a tree."""

    @abc.abstractmethod
    def all_gather(self, x: Vector) -> Vector:
        """Returns `[P, ...]`: the arrays of all members, which have one shape."""

    @abc.abstractmethod
    def broadcast(self, x: Any) -> Any:
        """Returns the tree that member 0 has."""

    @abc.abstractmethod
    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Returns what the source of our (source, target) pair has; zeros if none."""

    @abc.abstractmethod
    def exchange(self, given: Entries, starts: Vector, slots: int) -> Sent:
        """Sends every entry to the owner of its region, who adds up what it gets.

        Sums are made in the order of ranks. Member i sends to i + 1 first, then to
        i + 2 and so on, so that no receiver is hit by all at once.

        Args:
          given: without repetitions.
          starts: int32 [P + 1], from 0 to n: region r begins at `starts[r]`.
          slots: entries of one member for another that a padded buffer holds; the
            largest are sent. Not looked at where buffers are not padded.
        """

    @abc.abstractmethod
    def balance(self, given: Entries, counts: Vector, slots: int, n: int) -> Entries:
        """Spreads entries that ascend over ranks evenly, in the same order.

        Args:
          given: ours.
          counts: int32 [P], how many each member has, g in all.
          slots: room for a member's share, at least g / P rounded up.
          n: length of the vector.
        """

    @abc.abstractmethod
    def gather(self, given: Entries, slots: int) -> tuple[Entries, Vector]:
        """Gathers the entries of all members, by rank.

        Around a ring a member passes on all of them but those of the next one.

        Args:
          given: ours.
          slots: room for one member's; what is beyond it must not hold any.

        Returns:
          The entries, and int32 [P], how many of them each member had.
        """

    @abc.abstractmethod
    def cond(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        """Returns `yes()` or `no()`, which may communicate.

        The predicate must be the same for all members.
        """

    @abc.abstractmethod
    def choose(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        """Returns `yes()` or `no()`, which may not communicate, as each decides."""

    @abc.abstractmethod
    def repeat(
        self,
        times: int,
        going: Callable[[Any], Scalar],
        body: Callable[[Any], Any],
        start: Any,
    ) -> Any:
        """Applies `body` while `going`, at most so often; nothing may communicate."""

    @abc.abstractmethod
    def magnitudes(self, x: Vector) -> Vector:
        """Returns int32 that are ordered as |x|; see `kernels.magnitudes`."""

    @abc.abstractmethod
    def kth(self, order: Vector, k: int) -> Scalar:
        """Returns the k-th largest of our `magnitudes`, 0 if there are fewer."""

    @abc.abstractmethod
    def kth_of_all(self, order: Vector, k: int) -> Scalar:
        """Returns the k-th largest of all members' `magnitudes`, 0 if fewer."""

    @abc.abstractmethod
    def reaching(self, order: Vector, magnitude: Scalar) -> Vector:
        """Returns `magnitudes` that hold all that reach one, for counts above it."""

    @abc.abstractmethod
    def number_of(self, magnitude: Scalar) -> Scalar:
        """Returns the float32 whose magnitude it is."""

    @abc.abstractmethod
    def nonzero(self, mask: Vector, capacity: int) -> Vector:
        """Returns the indices where it holds, ascending, as `Entries.indices`.

        A padded buffer holds the first `capacity`; others are as long as need be.
        """

    @abc.abstractmethod
    def select(
        self, x: Vector, order: Vector, magnitude: Scalar, capacity: int
    ) -> Entries:
        """Selects what is not zero and reaches a magnitude.

        Args:
          x: numbers.
          order: their `magnitudes`.
          magnitude: to reach.
          capacity: a padded buffer holds the first ones; `count` may be larger.
        """

    @abc.abstractmethod
    def take(self, x: Vector, indices: Vector) -> Vector:
        """Returns `x` at indices, 0 where they are its size."""

    @abc.abstractmethod
    def scatter(self, n: int, indices: Vector, values: Vector) -> Vector:
        """Returns the vector of length n with the sums of values at indices."""

    @abc.abstractmethod
    def clear(self, x: Vector, indices: Vector) -> Vector:
        """Returns `x` with zeros at indices; those that are its size are left out."""

    @abc.abstractmethod
    def merge(self, indices: Vector, values: Vector, n: int | Scalar) -> Entries:
        """Returns the sums of the values that have one index, in the order given."""

    @abc.abstractmethod
    def count(self, mask: Vector) -> Scalar:
        """Returns how often it holds, int32."""

    @abc.abstractmethod
    def draw(
        self, seed: int, step: Scalar, name: str, make: Callable[[Any], Any]
    ) -> Any:
        """Returns `make(key)` as arrays of ours, with a key of the seed and the step.

        Args:
          seed: the same for all members gives the same key.
          step: number of the draw.
          name: what is drawn.
          make: JAX code.

        Returns:
          What `make` returns.
        """


def passed_on(group: Group, counts: Vector) -> tuple[Scalar, Scalar]:
    """Returns how many entries we send in `Group.gather`, and how many come."""
    total = group.xp.sum(counts, dtype="int32")
    return total - counts[(group.rank + 1) % group.size], total - counts[group.rank]


def entries_at(group: Group, x: Vector, mask: Vector, capacity: int) -> Entries:
    """Returns the entries of `x` where a mask holds, at most `capacity` of them."""
    indices = group.nonzero(mask, capacity)
    count = group.count(indices < x.size)
    return Entries(indices, group.take(x, indices), count)


def packed(group: Group, found: Entries, mask: Vector, n: int, size: int) -> Entries:
    """Returns the entries where a mask holds, in a buffer with room for `size`.

    Args:
      group: whose arrays these are.
      found: entries of a vector of length n.
      mask: of each place; where there is no entry it must not hold.
      n: length of the vector.
      size: places of the new buffer, if it is padded.
    """
    capacity = found.indices.size
    places = group.nonzero(mask, size)
    real = places < capacity
    indices = group.xp.where(real, group.take(found.indices, places), n)
    values = group.take(found.values, places)
    return Entries(indices.astype("int32"), values, group.count(real))


def is_largest(group: Group, order: Vector, k: int) -> Vector:
    """Says which are the k largest `magnitudes`; zeros never are.

    All above the k-th, then those equal to it by ascending index, so that there are
    exactly k if so many are not zero.
    """
    xp, edge = group.xp, group.kth(order, k)
    above, ties = order > edge, (order == edge) & (order > 0)
    room = k - group.count(above)
    places = group.nonzero(ties, k).astype("int32")
    ends = xp.concatenate([xp.full(1, -1, "int32"), places])
    last = ends[xp.minimum(room, ends.size - 1)]
    return above | (ties & (xp.arange(order.size, dtype="int32") <= last))


def largest(group: Group, x: Vector, order: Vector, k: int, capacity: int) -> Entries:
    """Returns the k entries of `x` whose magnitude is largest, see `is_largest`."""
    return entries_at(group, x, is_largest(group, order, k), capacity)
