"""Processes that send each other numpy arrays; every message is as long as need be."""

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
    """The members are the ranks of a transport.

    Args:
      transport: ours; nothing else may use it with tags of kind "exchange".

    Attributes:
      seconds: in which messages were sent and waited for, until now.
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
        # What has one dtype travels as one message.
        made = list(leaves)
        for dtype in {leaf.dtype: None for leaf in leaves}:
            places = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
            total = self._total(np.concatenate([leaves[i].ravel() for i in places]))
            ends = np.cumsum([leaves[i].size for i in places])[:-1]
            for i, part in zip(places, np.split(total, ends), strict=True):
                made[i] = part.reshape(leaves[i].shape)
        return jax.tree.unflatten(structure, made)

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

    def exchange(self, given: Entries, starts: Vector, slots: int) -> Sent:
        edges = np.searchsorted(given.indices, starts)
        parts = [
            _packed(given.indices[a:b], given.values[a:b])
            for a, b in itertools.pairwise(edges)
        ]
        came = self._call(hostcomm.alltoallv, parts)
        received = self.merge(*_unpacked(came), n=starts[-1])
        own = edges[self.rank + 1] - edges[self.rank]
        arrived = sum(part.shape[1] for part in came) - own
        everything = np.ones(len(given.indices), bool)
        return Sent(
            received,
            everything,
            np.int32(given.count - own),
            np.int32(arrived),
        )

    def balance(self, given: Entries, counts: Vector, slots: int, n: int) -> Entries:
        share, rest = divmod(int(np.sum(counts)), self.size)
        sizes = [share + (rank < rest) for rank in range(self.size)]
        ends = np.cumsum(sizes) - int(np.sum(counts[: self.rank]))
        edges = [0, *np.clip(ends, 0, len(given.indices))]
        parts = [
            _packed(given.indices[a:b], given.values[a:b])
            for a, b in itertools.pairwise(edges)
        ]
        came = self._call(hostcomm.alltoallv, parts)
        indices, values = _unpacked(came)
        return Entries(indices, values, np.int32(len(indices)))

    def gather(self, given: Entries, slots: int) -> tuple[Entries, Vector]:
        own = _packed(given.indices, given.values)
        parts = self._call(hostcomm.allgatherv, own)
        indices, values = _unpacked(parts)
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
        found = 0
        for bit in reversed(range(31)):
            tried = found | 1 << bit
            if self.sum(self.count(order >= tried)) >= k:
                found = tried
        return np.int32(found)

    def reaching(self, order: Vector, magnitude: Scalar) -> Vector:
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
        made = np.zeros(indices.shape, x.dtype)
        real = indices < x.size
        made[real] = x[indices[real]]
        return made

    def scatter(self, n: int, indices: Vector, values: Vector) -> Vector:
        made = np.zeros(n, values.dtype)
        real = indices < n
        np.add.at(made, indices[real], values[real])
        return made

    def clear(self, x: Vector, indices: Vector) -> Vector:
        made = np.array(x)
        made[indices[indices < x.size]] = 0
        return made

    def merge(self, indices: Vector, values: Vector, n: int | Scalar) -> Entries:
        real = indices < n
        found, place = np.unique(indices[real], return_inverse=True)
        sums = np.zeros(len(found), np.float32)
        np.add.at(sums, place, values[real])
        return Entries(found, sums, np.int32(len(found)))

    def count(self, mask: Vector) -> Scalar:
        return np.int32(np.count_nonzero(mask))

    def draw(
        self, seed: int, step: Scalar, name: str, make: Callable[[Any], Any]
    ) -> Any:
        made = make(derive(jax.random.key(seed), name, int(step)))
        return jax.tree.map(np.asarray, made)

    def _total(self, x: Vector) -> Vector:
        with np.errstate(over="ignore"):  # what is not finite is looked for
            return self._call(hostcomm.allreduce, x)[()]

    def _call(self, collective: Callable[..., Any], array: Any) -> Any:
        begin = time.perf_counter()
        tag = Tag("exchange", next(self._calls))
        made = collective(self.transport, array, tag=tag)
        self.seconds += time.perf_counter() - begin
        return made


def _packed(indices: Vector, values: Vector) -> Vector:
    """Returns int32 [2, count]: indices as they are, and the bits of the values."""
    return np.stack([indices, values.view(np.int32)])


def _unpacked(parts: Sequence[Vector]) -> tuple[Vector, Vector]:
    packed = np.concatenate(parts, axis=1)
    return packed[0], packed[1].view(np.float32)
