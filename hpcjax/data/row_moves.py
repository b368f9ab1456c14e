"""Moves of rows between a store and a cache: where rows go, and look-ahead's peers."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.data.lookahead import NONE, Ids, Move, join


class Turn(NamedTuple):
    """A batch and the move after it, by slots: places in the cache.

    Attributes:
      step: the batch; −1 for the move before the first.
      slots: where the rows of the batch are, as the batch's ids are arranged.
      evict: rows to be written to the store.
      evict_slots: where they are.
      fetch: rows to be read from it, after that.
      fetch_slots: where they go.
      ready: the last batch whose rows are all in the cache afterwards.
    """

    step: int
    slots: np.ndarray
    evict: Ids
    evict_slots: Ids
    fetch: Ids
    fetch_slots: Ids
    ready: int


def assign_slots(moves: Iterable[Move], rows: int, capacity: int) -> Iterator[Turn]:
    """Yields moves with the places of their rows in a cache.

    Args:
      moves: from the first one on.
      rows: of the table.
      capacity: rows of the cache.

    Raises:
      ConfigError: the cache is too small.
      ValueError: a move evicts, or a batch uses, what is not in the cache, or a row is
        fetched that is.
    """
    place = np.full(rows, -1, np.int64)
    free = np.arange(capacity)[::-1]  # of which the last are taken first
    for move in moves:
        slots, left = place[move.ids], place[move.evict]
        if min(slots.min(initial=0), left.min(initial=0)) < 0:
            raise ValueError(f"rows of batch {move.step} are not in the cache")
        place[move.evict] = -1
        free = np.concatenate([free, left[::-1]])
        count = len(move.fetch)
        if count > len(free):
            raise ConfigError(
                f"the cache must hold {capacity - len(free) + count} rows for the "
                f"batches up to {move.ready}: got capacity={capacity}; "
                "data.largest_lookahead says how far one of that size can look"
            )
        if (place[move.fetch] >= 0).any():
            raise ValueError(f"a row is in the cache and fetched after {move.step}")
        place[move.fetch] = taken = free[len(free) - count :][::-1]
        free = free[: len(free) - count]
        yield Turn(move.step, slots, move.evict, left, move.fetch, taken, move.ready)


def static_moves(
    batches: Iterable[np.ndarray], hot: Ids, ahead: int = 0
) -> Iterator[Move]:
    """Keeps some rows for good, and moves all others in and out for each batch.

    Args:
      batches: numbers of rows, of any shape.
      hot: rows that are kept, sorted.
      ahead: see `lru_moves`.

    References:
      Adnan et al., Accelerating Recommendation System Training by Leveraging Popular
      Choices (FAE), VLDB 2022, keeps the rows that are used most.
    """

    def change(old: Ids, near: Sequence[Ids], new: Ids) -> tuple[Ids, Ids]:
        stay = np.concatenate([hot, *near])
        return np.setdiff1d(old, stay), np.setdiff1d(new, stay)

    return _move_batches(batches, change, ahead, hot)


def hottest_rows(
    batches: Sequence[np.ndarray], rows: int, capacity: int, ahead: int = 0
) -> Ids:
    """Returns as many of the rows that are used most as a cache can keep.

    The rows of the 1 + `ahead` batches that are there must fit beside them.

    Args:
      batches: a stream that is at hand as a whole: no real peer knows so much.
      rows: of the table.
      capacity: rows of the cache.
      ahead: of `static_moves`.
    """
    sets = [np.unique(ids) for ids in batches]
    counts = np.bincount(np.concatenate(sets), minlength=rows)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(rows, np.int64)
    rank[order] = np.arange(rows)
    near = [np.concatenate(sets[at : at + 1 + ahead]) for at in range(len(sets))]
    ranks = [np.unique(rank[each]) for each in near]

    def needed(kept: int) -> int:
        return kept + max(int((each >= kept).sum()) for each in ranks)

    low, high = 0, min(rows, capacity)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= capacity else (low, middle - 1)
    return np.sort(order[:low])


def lru_moves(
    batches: Iterable[np.ndarray], capacity: int, ahead: int = 0
) -> Iterator[Move]:
    """Fetches what a batch misses, in place of the rows whose last use is longest ago.

    Args:
      batches: numbers of rows, of any shape.
      capacity: rows of the cache.
      ahead: batches that are trained on while the rows of a later one are fetched;
        with 0 each waits for its own, with 1 they are fetched during the one before.

    Raises:
      ConfigError: 1 + `ahead` batches use more rows.
    """
    held: dict[int, None] = {}  # the last ones were used last

    def change(old: Ids, near: Sequence[Ids], new: Ids) -> tuple[Ids, Ids]:
        del old
        wanted = len(np.unique(np.concatenate([new, *near])))
        if wanted > capacity:
            raise ConfigError(
                f"the cache must hold the {wanted} rows of a batch and the {ahead} "
                f"before it: got capacity={capacity}"
            )
        missed = [row for row in new.tolist() if row not in held]
        for row in new.tolist():
            held.pop(row, None)
            held[row] = None
        gone = [*itertools.islice(held, max(0, len(held) - capacity))]
        for row in gone:
            del held[row]
        return np.array(sorted(gone), np.int64), np.array(missed, np.int64)

    return _move_batches(batches, change, ahead, NONE)


def _move_batches(
    batches: Iterable[np.ndarray],
    change: Callable[[Ids, Sequence[Ids], Ids], tuple[Ids, Ids]],
    ahead: int,
    kept: Ids,
) -> Iterator[Move]:
    """Yields moves that know of 1 + `ahead` batches more, and at the end evict all.

    After a batch, `change` says what is evicted and fetched: of its own rows, those of
    the batches that come next, and those of the one that the move is for.
    """
    checks.require_count(0, ahead=ahead)
    inside, incoming, number = {*kept.tolist()}, [kept], -1
    near = collections.deque([(-1, NONE, NONE)])
    for number, ids in enumerate(batches):
        unique = np.unique(ids)
        full = len(near) > ahead
        step, done, old = near.popleft() if full else near[0]
        uses = [each for _, _, each in near]
        evict, fetch = change(old, uses, unique)
        inside = (inside - {*evict.tolist()}) | {*fetch.tolist()}
        incoming.append(fetch)
        near.append((number, ids, unique))
        if full:
            yield Move(step, done, evict, join(incoming), number)
            incoming = []
    while near and number >= 0:
        step, done, _ = near.popleft()
        rest = NONE if near else np.array(sorted(inside), np.int64)
        yield Move(step, done, rest, join(incoming), number)
        incoming = []
