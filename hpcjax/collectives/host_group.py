"""Groups of processes that send each other numpy arrays, of any length."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hpcjax import hostcomm
from hpcjax.collectives.group import Entries, Group, Scalar, Sent, Vector
from hpcjax.core.keys import derive
from hpcjax.hostcomm import Tag, Transport

_SIGN = np.int32(0x7FFFFFFF)


class HostGroup(Group):
    """A group whose members are the ranks of a transport.

    Args:
      transport: ours; nothing else may use it with tags of kind "exchange".

    Attributes:
      seconds: time spent in communication so far.
    """

    xp = np
    padded = False

    def __init__(self, transport: Transport) -> None:
        self.transport, self.seconds = transport, 0.0
        self._calls = itertools.count()

    @property
    def size(self) -> int:
        return self.transport.size

    @property
    def rank(self) -> int:
        return self.transport.rank

    def sum(self, x: Any) -> Any:
        leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, x))
        if len(leaves) == 1:
            return jax.tree.unflatten(structure, [self._total(leaves[0])])
        # All leaves of one dtype go into one message.
        sums = list(leaves)
        for dtype in {leaf.dtype: None for leaf in leaves}:
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            total = self._total(np.concatenate([leaves[i].ravel() for i in places]))
            ends = np.cumsum([leaves[i].size for i in places])[:-1]
            for i, part in zip(places, np.split(total, ends), strict=True):
                sums[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, sums)

    def all_gather(self, x: Vector) -> Vector:
        return self._call(hostcomm.allgather, np.asarray(x))

    def broadcast(self, x: Any) -> Any:
        return jax.tree.map(lambda leaf: self._call(hostcomm.broadcast, leaf), x)

    def permute(self, x: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        def move(transport: Transport, leaf: Vector, *, tag: Tag) -> Vector:
            received = np.zeros_like(leaf)
            for source, target in pairs:
                if source == self.rank:
                    transport.send(target, tag, leaf)
            for source, target in pairs:
                if target == self.rank:
                    received = transport.receive(source, tag)
            return received

        return jax.tree.map(lambda leaf: self._call(move, leaf), x)

    def exchange(self, entries: Entries, starts: Vector, slots: int) -> Sent:
        # Indices ascend: the entries of a region are a slice.
        edges = np.searchsorted(entries.indices, starts)
        parts = [
            _pack_entries(entries.indices[a:b], entries.values[a:b])
            for a, b in itertools.pairwise(edges)
        ]
        received_parts = self._call(hostcomm.alltoallv, parts)
        received = self.merge(*_unpack_entries(received_parts), n=starts[-1])
        own = edges[self.rank + 1] - edges[self.rank]
        arrived = sum(part.shape[1] for part in received_parts) - own
        everything = np.ones(len(entries.indices), bool)
        return Sent(
            received,
            everything,
            np.int32(entries.count - own),
            np.int32(arrived),
        )

    def balance(self, entries: Entries, counts: Vector, slots: int, n: int) -> Entries:
        share, rest = divmod(int(np.sum(counts)), self.size)
        sizes = [share + (rank < rest) for rank in range(self.size)]
        # The ends of all shares, counted from our first entry.
        ends = np.cumsum(sizes) - int(np.sum(counts[: self.rank]))
        edges = [0, *np.clip(ends, 0, len(entries.indices))]
        parts = [
            _pack_entries(entries.indices[a:b], entries.values[a:b])
            for a, b in itertools.pairwise(edges)
        ]
        indices, values = _unpack_entries(self._call(hostcomm.alltoallv, parts))
        return Entries(indices, values, np.int32(len(indices)))

    def gather(self, entries: Entries, slots: int) -> tuple[Entries, Vector]:
        own = _pack_entries(entries.indices, entries.values)
        parts = self._call(hostcomm.allgatherv, own)
        indices, values = _unpack_entries(parts)
        counts = np.array([part.shape[1] for part in parts], np.int32)
        return Entries(indices, values, np.int32(len(indices))), counts

    def cond(
        self, predicate: Scalar, yes: Callable[[], Any], no: Callable[[], Any]
    ) -> Any:
        return yes() if predicate else no()

    choose = cond

    def repeat(
        self,
        times: int,
        going: Callable[[Any], Scalar],
        body: Callable[[Any], Any],
        start: Any,
    ) -> Any:
        for _ in range(times):
            if not going(start):
                break
            start = body(start)
        return start

    def magnitudes(self, x: Vector) -> Vector:
        return np.asarray(x, np.float32).view(np.int32) & _SIGN

    def kth(self, order: Vector, k: int) -> Scalar:
        if k > order.size:
            return np.int32(0)
        return np.partition(order, order.size - k)[order.size - k]

    def kth_of_all(self, order: Vector, k: int) -> Scalar:
        # As `kernels.kth_magnitude`: the largest magnitude that k values reach.
        kth = 0
        for bit in reversed(range(31)):
            tried = kth | 1 << bit
            if self.sum(self.count(order >= tried)) >= k:
                kth = tried
        return np.int32(kth)

    def keep_reaching(self, order: Vector, magnitude: Scalar) -> Vector:
        return order[order >= magnitude]

    def number_of(self, magnitude: Scalar) -> Scalar:
        return np.int32(magnitude).view(np.float32)

    def nonzero(self, mask: Vector, capacity: int) -> Vector:
        return np.flatnonzero(mask).astype(np.int32)

    def select(
        self, x: Vector, order: Vector, magnitude: Scalar, capacity: int
    ) -> Entries:
        indices = self.nonzero(order >= max(magnitude, 1), capacity)
        return Entries(indices, x[indices], np.int32(len(indices)))

    def take(self, x: Vector, indices: Vector) -> Vector:
        values = np.zeros(indices.shape, x.dtype)
        real = indices < x.size
        values[real] = x[indices[real]]
        return values

    def scatter(self, n: int, indices: Vector, values: Vector) -> Vector:
        total = np.zeros(n, values.dtype)
        real = indices < n
        # Not `total[indices] += values`, which adds only once at a repeated index.
        np.add.at(total, indices[real], values[real])
        return total

    def clear(self, x: Vector, indices: Vector) -> Vector:
        cleared = np.array(x)
        cleared[indices[indices < x.size]] = 0
        return cleared

    def merge(self, indices: Vector, values: Vector, n: int | Scalar) -> Entries:
        real = indices < n
        unique, place = np.unique(indices[real], return_inverse=True)
        sums = np.zeros(len(unique), np.float32)
        np.add.at(sums, place, values[real])
        return Entries(unique, sums, np.int32(len(unique)))

    def count(self, mask: Vector) -> Scalar:
        return np.int32(np.count_nonzero(mask))

    def draw(
        self, seed: int, step: Scalar, name: str, make: Callable[[Any], Any]
    ) -> Any:
        drawn = make(derive(jax.random.key(seed), name, int(step)))
        return jax.tree.map(np.asarray, drawn)

    def _total(self, x: Vector) -> Vector:
        with np.errstate(over="ignore"):  # `Exchange` checks for non-finite sums
            return self._call(hostcomm.allreduce, x)[()]

    def _call(self, collective: Callable[..., Any], array: Any) -> Any:
        """Runs a collective under a tag that is the same in all members."""
        begin = time.perf_counter()
        tag = Tag("exchange", next(self._calls))
        result = collective(self.transport, array, tag=tag)
        self.seconds += time.perf_counter() - begin
        return result


def _pack_entries(indices: Vector, values: Vector) -> Vector:
    """Returns one message, int32 [2, count]: indices and the bits of values."""
    return np.stack([indices, values.view(np.int32)])


def _unpack_entries(parts: Sequence[Vector]) -> tuple[Vector, Vector]:
    packed = np.concatenate(parts, axis=1)
    return packed[0], packed[1].view(np.float32)
