"""Who keeps which records, and in which order they are fetched: a plan for a whole run.

All workers make the same plan by themselves, from the order of the run alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from hpcjax.core import checks

if TYPE_CHECKING:
    from hpcjax.data.access import AccessStream

Placement = Literal["frequency", "dedup", "hybrid", "first_touch"]
PLACEMENTS: tuple[Placement, ...] = ("frequency", "dedup", "hybrid", "first_touch")
Records = Int[np.ndarray, " records"]


class StorageClass(NamedTuple):
    """One kind of memory that each worker has, such as RAM or an SSD.

    Attributes:
      name: for people.
      bytes: what it holds.
      read_rate: bytes per second of all its threads together.
      threads: that fill it.
    """

    name: str
    bytes: int
    read_rate: float
    threads: int = 1


class Nearest(NamedTuple):
    """Where else a record is kept, for one worker; [examples] each.

    Attributes:
      worker: the other worker, or −1 where nobody else keeps the record.
      place: the record's place in the order in which that one fetches its class.
      storage: that class, by its place among all.
    """

    worker: Records
    place: Records
    storage: Records


class Plan(NamedTuple):
    """What each worker keeps.

    Attributes:
      held: for each worker and class the records, in the order in which they are
        fetched, which is that of their first use.
      examples: how many records there are.
    """

    held: tuple[tuple[Records, ...], ...]
    examples: int

    def storage_of(self, worker: int) -> Records:
        """Returns the class in which a worker keeps each record; −1 for none."""
        storage = np.full(self.examples, -1)
        for number, records in enumerate(self.held[worker]):
            storage[records] = number
        return storage

    def nearest(self, worker: int) -> Nearest:
        """Returns from whom else a worker may have each record.

        Of several it is the one with the fastest class, then the one that fetches the
        record earliest, then the lowest.
        """
        shape = (self.examples,)
        rank, best = np.full(shape, -1), np.full(shape, np.iinfo(np.int64).max)
        for other, classes in enumerate(self.held):
            for number, records in enumerate(classes if other != worker else ()):
                key = number * self.examples + np.arange(len(records))
                sooner = key < best[records]
                rank[records[sooner]] = other
                best[records[sooner]] = key[sooner]
        return Nearest(rank, best % self.examples, best // self.examples)


def plan(
    stream: "AccessStream",
    sizes: Int[np.ndarray, " examples"],
    classes: Sequence[StorageClass],
    placement: Placement = "frequency",
) -> Plan:
    """Returns what each worker keeps in its classes, from fast to slow.

    A worker fills its classes with the records that it reads most often, of equals with
    those of the lowest number; the first that does not fit closes a class. Nothing is
    ever replaced.

    - "frequency": each worker for itself (the paper). Popular records are kept twice.
    - "dedup": a record is kept by that worker with room which reads it most often. What
      is read in an epoch is read once in all, so that reads of the storage depend only
      on how much is kept by anybody.
    - "hybrid": "dedup", and what room is left then by "frequency".
    - "first_touch": a record is kept by that worker with room which reads it first, and
      what room is left then by what each reads first. No foresight chooses.

    Args:
      stream: the order of the run.
      sizes: bytes of each record.
      classes: of each worker.
      placement: which of these.

    Raises:
      ConfigError: another placement, or sizes of another number of records.
    """
    checks.require_choice("placement", placement, PLACEMENTS)
    checks.require(
        len(sizes) == stream.examples,
        "sizes must hold one for each record",
        sizes=len(sizes),
        records=stream.examples,
    )
    room = sum(each.bytes for each in classes)
    wishes = np.stack([_wish(stream, w, placement) for w in range(stream.workers)])
    kept = np.zeros(wishes.shape, bool)
    if placement != "frequency":
        kept = _share_out(wishes, sizes, room)
    held = []
    for worker, own in enumerate(wishes):
        chosen = kept[worker]
        order = _by_wish(np.flatnonzero(chosen), own)
        if placement != "dedup":
            more = np.flatnonzero(~chosen & (own > 0))
            order = np.append(order, _by_wish(more, own))
        held.append(_fill(order, sizes, classes, stream.first_use(worker)))
    return Plan(tuple(held), stream.examples)


def _wish(stream: "AccessStream", worker: int, placement: Placement) -> Records:
    """Returns how much a worker wants to keep each record: 0 if it never reads it."""
    if placement != "first_touch":
        return stream.counts(worker)
    first = stream.first_use(worker)
    return np.where(first < 0, 0, stream.order.size - first)


def _by_wish(records: Records, wishes: Records) -> Records:
    return records[np.argsort(-wishes[records], kind="stable")]


def _fill(
    order: Records,
    sizes: Int[np.ndarray, " examples"],
    classes: Sequence[StorageClass],
    first_use: Int[np.ndarray, " examples"],
) -> tuple[Records, ...]:
    """Cuts an order of records into classes, and sorts each by first use.

    What the worker never reads itself, which only "dedup" may give it, comes last.
    """
    filled = []
    for each in classes:
        fits = np.cumsum(sizes[order]) <= each.bytes
        taken, order = order[fits], order[~fits]
        use = np.where(first_use[taken] < 0, np.iinfo(np.int64).max, first_use[taken])
        filled.append(taken[np.argsort(use, kind="stable")])
    return tuple(filled)


def _share_out(
    wishes: Int[np.ndarray, "workers examples"],
    sizes: Int[np.ndarray, " examples"],
    room: int,
) -> Bool[np.ndarray, "workers examples"]:
    """Gives each record to one worker: who wants it most of those that have room.

    In rounds: records that nobody has yet ask their first choice, which takes those it
    wants most as far as they fit and, if some do not, is full. Room is that of all
    classes together; what then falls between two of them is kept by nobody.
    """
    kept, wished = np.zeros(wishes.shape, bool), wishes.astype(np.int64)
    left = np.full(len(wishes), room, np.int64)
    asking = np.flatnonzero(wishes.any(axis=0))
    while len(asking) and (wished >= 0).any():
        first = wished[:, asking].argmax(axis=0)
        refused = []
        for worker in np.unique(first):
            order = _by_wish(asking[first == worker], wishes[worker])
            used = np.cumsum(sizes[order])
            fits = used <= left[worker]
            kept[worker, order[fits]] = True
            left[worker] -= used[fits][-1] if fits.any() else 0
            if not fits.all():
                refused.append(order[~fits])
                wished[worker] = -1
        asking = np.sort(np.concatenate(refused)) if refused else asking[:0]
    return kept
