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
      indices: int32; n at places of a padded buffer that hold no entry, which may be
        behind the entries or between them.
      values: float32; 0 at places that hold no entry.
      count: int32, number of entries.
    """

    indices: Vector
    values: Vector
    count: Scalar


class Sent(NamedTuple):
    """The result of `Group.exchange`.

    Attributes:
      received: sums of the entries of our region, one for each index.
      taken: bool, whether the entry at each place of the arguments was sent.
      sent: int32, number of entries that went to other members.
      arrived: int32, number of entries that came from other members.
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
        """P, the number of members."""

    @property
    @abc.abstractmethod
    def rank(self) -> Scalar:
        """Our number, from 0."""

    @abc.abstractmethod
    def sum(self, x: Any) -> Any:
        """Returns the sum over members of an array, or of each array of a tree."""

    @abc.abstractmethod
    def all_gather(self, x: Vector) -> Vector:
        """Returns the arrays of all members, which have one shape, as `[P, ...]`."""

    @abc.abstractmethod
    def broadcast(self, x: Any) -> Any:
        """Returns the tree of member 0."""

    @abc.abstractmethod
    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """Sends `x` along (source, target) pairs; returns zeros to who is no target."""

    @abc.abstractmethod
    def exchange(self, entries: Entries, starts: Vector, slots: int) -> Sent:
        """Sends every entry to the owner of its region, who adds up entries by index.

        Sums are in the order of ranks. Member i sends to i + 1 first, then to i + 2 and
        so on, so that no receiver gets messages of all members at once.

        Args:
          entries: ours, without repeated indices.
          starts: int32 [P + 1], from 0 to n: region r begins at `starts[r]`.
          slots: size of the padded buffer from one member to another; if there are more
            entries, the largest are sent. Ignored if buffers are not padded.
        """

    @abc.abstractmethod
    def balance(self, entries: Entries, counts: Vector, slots: int, n: int) -> Entries:
        """Redistributes entries such that all members have equally many.

        The entries ascend over ranks, before and after.

        Args:
          entries: ours.
          counts: int32 [P], number of entries of each member, g in all.
          slots: size of the padded buffer for a member's share, at least ⌈g / P⌉.
          n: length of the vector.
        """

    @abc.abstractmethod
    def gather(self, entries: Entries, slots: int) -> tuple[Entries, Vector]:
        """Gathers the entries of all members, ordered by rank.

        Around a ring, a member sends all entries but those of the next member.

        Args:
          entries: ours.
          slots: size of the padded buffer of a member; places of `entries` behind it
            must hold none.

        Returns:
          The entries, and the number of entries of each member, int32 [P].
        """

    @abc.abstractmethod
    def cond(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        """Returns `yes()` or `no()`, which may communicate.

        The predicate must be the same for all members, so that all take part.
        """

    @abc.abstractmethod
    def choose(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        """Returns `yes()` or `no()`, which must not communicate.

        Every member may have another predicate.
        """

    def after(self, tree: Any, earlier: Any) -> Any:
        """Returns `tree`; what is sent of it is sent after `earlier` has come.

        On a mesh by `core.after`, which says why. A host process goes line by line, so
        that nothing has to be done.
        """
        del earlier
        return tree

    @abc.abstractmethod
    def repeat(
        self,
        times: int,
        going: Callable[[Any], Scalar],
        body: Callable[[Any], Any],
        start: Any,
    ) -> Any:
        """Applies `body` while `going`, at most `times`; neither may communicate."""

    @abc.abstractmethod
    def magnitudes(self, x: Vector) -> Vector:
        """Returns int32 in the order of |x|; see `kernels.magnitudes`."""

    @abc.abstractmethod
    def kth(self, order: Vector, k: int) -> Scalar:
        """Returns the k-th largest of our `magnitudes`; 0 if there are fewer."""

    @abc.abstractmethod
    def kth_of_all(self, order: Vector, k: int) -> Scalar:
        """Returns the k-th largest of all members' `magnitudes`; 0 if fewer."""

    @abc.abstractmethod
    def keep_reaching(self, order: Vector, magnitude: Scalar) -> Vector:
        """Drops `magnitudes` below one; counts of larger ones do not change.

        This makes repeated counts cheaper. A padded group returns all of them, since
        the size of the result must be static.
        """

    @abc.abstractmethod
    def number_of(self, magnitude: Scalar) -> Scalar:
        """Returns the positive float32 of a magnitude."""

    @abc.abstractmethod
    def nonzero(self, mask: Vector, capacity: int) -> Vector:
        """Returns the indices of true entries, ascending, as `Entries.indices`.

        A padded buffer holds the first `capacity`; others hold all.
        """

    @abc.abstractmethod
    def select(
        self, x: Vector, order: Vector, magnitude: Scalar, capacity: int
    ) -> Entries:
        """Selects entries that are not zero and have at least a magnitude.

        Args:
          x: values.
          order: their `magnitudes`.
          magnitude: the least one to select.
          capacity: size of a padded buffer, which holds the first entries; `count` may
            be larger.
        """

    @abc.abstractmethod
    def take(self, x: Vector, indices: Vector) -> Vector:
        """Returns `x` at indices; 0 at indices that equal its size."""

    @abc.abstractmethod
    def scatter(self, n: int, indices: Vector, values: Vector) -> Vector:
        """Returns a vector of length n to which values are added at indices."""

    @abc.abstractmethod
    def clear(self, x: Vector, indices: Vector) -> Vector:
        """Returns `x` with zeros at indices; those that equal its size are ignored."""

    @abc.abstractmethod
    def merge(self, indices: Vector, values: Vector, n: int | Scalar) -> Entries:
        """Adds up values with the same index, in the order of the arguments."""

    @abc.abstractmethod
    def count(self, mask: Vector) -> Scalar:
        """Counts the true entries, int32."""

    @abc.abstractmethod
    def draw(
        self, seed: int, step: Scalar, name: str, make: Callable[[Any], Any]
    ) -> Any:
        """Returns `make(key)`, as arrays of `xp`, with a key of the other arguments.

        Args:
          seed: the key's seed; members with the same arguments get the same key.
          step: number of the draw.
          name: of what is drawn.
          make: maps a JAX key to arrays.
        """


def count_passed_on(group: Group, counts: Vector) -> tuple[Scalar, Scalar]:
    """Returns the numbers of entries that we send and receive in `Group.gather`."""
    total = group.xp.sum(counts, dtype="int32")
    return total - counts[(group.rank + 1) % group.size], total - counts[group.rank]


def select_masked(group: Group, x: Vector, mask: Vector, capacity: int) -> Entries:
    """Returns the entries of `x` where a mask is true, at most `capacity` of them."""
    indices = group.nonzero(mask, capacity)
    count = group.count(indices < x.size)
    return Entries(indices, group.take(x, indices), count)


def keep_entries(
    group: Group, entries: Entries, mask: Vector, n: int, size: int
) -> Entries:
    """Returns the entries whose mask is true, in a buffer of `size` places.

    Args:
      group: the kind of arrays; nothing is communicated.
      entries: of a vector of length n.
      mask: of each place; must be false where there is no entry.
      n: length of the vector.
      size: of the new buffer, if it is padded.
    """
    capacity = entries.indices.size
    places = group.nonzero(mask, size)
    real = places < capacity
    # `take` returns 0 for places without an entry, which is a valid index.
    indices = group.xp.where(real, group.take(entries.indices, places), n)
    values = group.take(entries.values, places)
    return Entries(indices.astype("int32"), values, group.count(real))


def mask_largest(group: Group, order: Vector, k: int) -> Vector:
    """Returns a mask of the k largest `magnitudes`; zeros are never among them.

    It selects all above the k-th, and of those equal to it the first by index, so that
    there are exactly k if as many are not zero.
    """
    xp, edge = group.xp, group.kth(order, k)
    above, ties = order > edge, (order == edge) & (order > 0)
    room = k - group.count(above)
    places = group.nonzero(ties, k).astype("int32")
    # The first `room` ties are taken: those up to the place of the last of them, which
    # is -1 if there is no room.
    ends = xp.concatenate([xp.full(1, -1, "int32"), places])
    last = ends[xp.minimum(room, ends.size - 1)]
    return above | (ties & (xp.arange(order.size, dtype="int32") <= last))


def select_largest(
    group: Group, x: Vector, order: Vector, k: int, capacity: int
) -> Entries:
    """Returns the k entries of `x` with the largest magnitudes, see `mask_largest`."""
    return select_masked(group, x, mask_largest(group, order, k), capacity)
