"""Groups of the devices along mesh axes, inside `shard_map`, or of a `vmap`'s examples.

Shapes are static here: buffers of entries are padded, with the index n and the value 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import kernels
from hpcjax.collectives.group import Entries, Group, Scalar, Sent, Vector
from hpcjax.collectives.subset import spread
from hpcjax.core.keys import derive
from hpcjax.core.varying import Axes, after, assume_equal, axis_names, vary


class MeshGroup(Group):
    """A group whose members are the devices along mesh axes.

    Args:
      axes: of the surrounding `shard_map`; None for this device alone. With the name of
        a `vmap`, its examples are the members, all on one device.

    Raises:
      NameError: outside a `shard_map`, or `vmap`, over the axes.
    """

    xp = jnp
    padded = True

    def __init__(self, axes: Axes | None) -> None:
        self.axes = () if axes is None else axis_names(axes)
        try:
            self._size = math.prod(jax.lax.axis_size(name) for name in self.axes)
        except NameError as error:
            raise NameError(
                f"axes {self.axes} are not bound: call this inside shard_map over them"
            ) from error

    @property
    def size(self) -> int:
        return self._size

    @property
    def _mapped(self) -> bool:
        """Whether the axes are of `vmap` and not of `shard_map`."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return not set(self.axes) <= set(manual)

    @property
    def rank(self) -> Scalar:
        return jax.lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def sum(self, x: Any) -> Any:
        return jax.lax.psum(self._vary(x), self.axes) if self.axes else x

    def all_gather(self, x: Vector) -> Vector:
        if not self.axes:
            return x[None]
        return jax.lax.all_gather(self._vary(x), self.axes)

    def broadcast(self, x: Any) -> Any:
        if self.size == 1:
            return x
        everyone = [range(self.size)]
        return jax.tree.map(lambda leaf: spread(self, self._vary(leaf), everyone), x)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        if not self._mapped:
            places = self._places_on_mesh()
            own = [(places[source], places[target]) for source, target in pairs]
            return jax.lax.ppermute(self._vary(x), self.axes, own)
        # Under `vmap`, JAX supports only permutations in which every member sends.
        sources = {target: source for source, target in pairs}
        source = jnp.asarray([sources.get(rank, -1) for rank in range(self.size)])
        source = source[self.rank]

        def move(leaf: Vector) -> Vector:
            return jnp.where(source >= 0, self.all_gather(leaf)[source], 0)

        return jax.tree.map(move, x)

    def _places_on_mesh(self) -> list[int]:
        """Returns the numbers of our ranks for `ppermute`.

        It numbers devices in the order of the mesh's axes, whatever that of `axes` is,
        in which everything else does.
        """
        names = jax.sharding.get_abstract_mesh().axis_names
        sizes = [jax.lax.axis_size(name) for name in self.axes]
        order = sorted(range(len(self.axes)), key=lambda at: names.index(self.axes[at]))
        ranks = np.arange(self.size).reshape(sizes).transpose(order).reshape(-1)
        return np.argsort(ranks).tolist()

    def exchange(self, entries: Entries, starts: Vector, slots: int) -> Sent:
        n = starts[-1]
        capacity = len(entries.indices)
        real = entries.indices < n
        owner = jnp.searchsorted(starts[1:-1], entries.indices, side="right")
        first = jnp.searchsorted(entries.indices, starts).astype(jnp.int32)
        crowded = jnp.max(first[1:] - first[:-1]) > slots

        def by_index() -> Vector:
            return jnp.arange(capacity, dtype=jnp.int32) - first[owner]

        def by_magnitude() -> Vector:
            # If the first entries of a region were sent in every step, the others would
            # never be. Sorted by region and then by magnitude, the entries take the
            # same places as in the order of indices, region by region.
            inside = jnp.where(real, owner, self.size)
            order = jnp.lexsort((-self.magnitudes(entries.values), inside))
            return jnp.zeros(capacity, jnp.int32).at[order].set(by_index())

        place = self.choose(crowded, by_magnitude, by_index)
        taken = real & (place < slots)
        # Place `slots` is out of bounds, and dropped.
        place = jnp.where(taken, place, slots)
        sent = self._to_all(self._place_entries(entries, owner, place, slots, n))
        indices, values = sent
        received = self.merge(indices.reshape(-1), values.reshape(-1), n)
        own = self.count(taken & (owner == self.rank))
        arrived = self.count(indices < n) - own
        return Sent(received, taken, self.count(taken) - own, arrived)

    def balance(self, entries: Entries, counts: Vector, slots: int, n: int) -> Entries:
        total, before = jnp.sum(counts), jnp.cumsum(counts) - counts
        share, rest = total // self.size, total % self.size
        real = entries.indices < n
        # The number of an entry among those of all members decides its owner. The first
        # `rest` members own share + 1 entries each, the others share.
        number = before[self.rank] + jnp.cumsum(real, dtype=jnp.int32) - 1
        early = number // (share + 1)
        late = rest + (number - rest * (share + 1)) // jnp.maximum(share, 1)
        owner = jnp.where(early < rest, early, late)
        # `owner` members in front of it own owner * share + min(owner, rest) entries.
        place = number - owner * share - jnp.minimum(owner, rest)
        place = jnp.where(real, place, slots)
        indices, values = self._to_all(
            self._place_entries(entries, owner, place, slots, n)
        )
        # No two members fill the same place of a share: of each place, one member has
        # sent the entry, the others the padding n and 0.
        mine = share + (self.rank < rest).astype(jnp.int32)
        return Entries(jnp.min(indices, axis=0), jnp.sum(values, axis=0), mine)

    def gather(self, entries: Entries, slots: int) -> tuple[Entries, Vector]:
        indices, values = entries.indices[:slots], entries.values[:slots]
        packed = jnp.stack([indices, _to_bits(values)])
        packed = self.all_gather(packed)
        counts = self.all_gather(entries.count)
        indices, values = packed[:, 0].reshape(-1), _from_bits(packed[:, 1]).reshape(-1)
        return Entries(indices, values, jnp.sum(counts, dtype=jnp.int32)), counts

    def cond(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        return self.choose(assume_equal(predicate, self.axes), yes, no)

    def choose(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        return jax.lax.cond(
            predicate, lambda: self._vary(yes()), lambda: self._vary(no())
        )

    def after(self, tree: Any, earlier: Any) -> Any:
        return after(tree, earlier)

    def repeat(
        self,
        times: int,
        going: Callable[[Any], Scalar],
        body: Callable[[Any], Any],
        start: Any,
    ) -> Any:
        def more(carry: Any) -> Scalar:
            return (carry[0] < times) & going(carry[1])

        def turn(carry: Any) -> Any:
            return carry[0] + 1, self._vary(body(carry[1]))

        count = self._vary(jnp.int32(0))
        return jax.lax.while_loop(more, turn, (count, self._vary(start)))[1]

    def magnitudes(self, x: Vector) -> Vector:
        return kernels.magnitudes(x)

    def kth(self, order: Vector, k: int) -> Scalar:
        return kernels.kth_magnitude(order, k)

    def kth_of_all(self, order: Vector, k: int) -> Scalar:
        return kernels.kth_magnitude(order, k, total=self.sum)

    def keep_reaching(self, order: Vector, magnitude: Scalar) -> Vector:
        return order  # a shorter array would have no static size

    def number_of(self, magnitude: Scalar) -> Scalar:
        return _from_bits(magnitude)

    def nonzero(self, mask: Vector, capacity: int) -> Vector:
        return kernels.nonzero(mask, capacity)[0]

    def select(
        self, x: Vector, order: Vector, magnitude: Scalar, capacity: int
    ) -> Entries:
        return Entries(*kernels.select_above(x, magnitude, capacity))

    def take(self, x: Vector, indices: Vector) -> Vector:
        return x.at[indices].get(mode="fill", fill_value=0)

    def scatter(self, n: int, indices: Vector, values: Vector) -> Vector:
        return jnp.zeros(n, values.dtype).at[indices].add(values, mode="drop")

    def clear(self, x: Vector, indices: Vector) -> Vector:
        return x.at[indices].set(0, mode="drop")

    def merge(self, indices: Vector, values: Vector, n: int | Scalar) -> Entries:
        order = jnp.argsort(indices, stable=True)
        indices, values = indices[order], values[order]
        # Equal indices are neighbours now, and share a place in the result.
        new = jnp.concatenate([jnp.ones(1, bool), indices[1:] != indices[:-1]])
        place = jnp.cumsum(new, dtype=jnp.int32) - 1
        size = len(indices)
        sums = jnp.zeros(size, values.dtype).at[place].add(values)
        merged = jnp.full(size, n, jnp.int32).at[place].set(indices)
        return Entries(merged, sums, self.count(merged < n))

    def count(self, mask: Vector) -> Scalar:
        return kernels.count(mask.reshape(-1))

    def draw(
        self, seed: int, step: Scalar, name: str, make: Callable[[Any], Any]
    ) -> Any:
        return make(derive(jax.random.key(seed), name, step))

    def _vary(self, tree: Any) -> Any:
        return vary(tree, self.axes)

    def _place_entries(
        self, entries: Entries, owner: Vector, place: Vector, slots: int, empty: Scalar
    ) -> Vector:
        """Returns the buffers to each member, int32 [P, 2, slots]; values as bits."""
        shape = (self.size, slots)
        indices = jnp.full(shape, empty, jnp.int32)
        indices = indices.at[owner, place].set(entries.indices, mode="drop")
        values = jnp.zeros(shape, jnp.int32)
        values = values.at[owner, place].set(_to_bits(entries.values), mode="drop")
        return jnp.stack([indices, values], axis=1)

    def _to_all(self, parts: Vector) -> tuple[Vector, Vector]:
        """Exchanges buffers; returns the indices and values of each, [P, slots]."""
        if self.axes:
            parts = jax.lax.all_to_all(self._vary(parts), self.axes, 0, 0)
        return parts[:, 0], _from_bits(parts[:, 1])


def _to_bits(values: Vector) -> Vector:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _from_bits(bits: Vector) -> Vector:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
