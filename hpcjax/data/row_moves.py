"""Moves of rows between a store and a cache: where rows go, and look-ahead's peers."""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.data.lookahead import NONE, Ids, Move


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


def static_moves(batches: Iterable[np.ndarray], hot: Ids) -> Iterator[Move]:
    """Keeps some rows for good, and moves all others in and out for each batch.

    Args:
      batches: numbers of rows, of any shape.
      hot: rows that are kept, sorted.

    References:
      Adnan et al., Accelerating Recommendation System Training by Leveraging Popular
      Choices (FAE), VLDB 2022, keeps the rows that are used most.
    """

    def change(old: Ids, new: Ids) -> tuple[Ids, Ids]:
        return np.setdiff1d(old, hot), np.setdiff1d(new, hot)

    return _one_by_one(batches, change, hot)


def hottest_rows(batches: Sequence[np.ndarray], rows: int, capacity: int) -> Ids:
    """Returns as many of the rows that are used most as a cache can keep.

    The rows of each batch that are not kept must fit beside them.

    Args:
      batches: a stream that is at hand as a whole: no real peer knows so much.
      rows: of the table.
      capacity: rows of the cache.
    """
    sets = [np.unique(ids) for ids in batches]
    counts = np.bincount(np.concatenate(sets), minlength=rows)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(rows, np.int64)
    rank[order] = np.arange(rows)
    ranks = [np.sort(rank[unique]) for unique in sets]

    def needed(kept: int) -> int:
        return kept + max(int((each >= kept).sum()) for each in ranks)

    low, high = 0, min(rows, capacity)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= capacity else (low, middle - 1)
    return np.sort(order[:low])


def lru_moves(batches: Iterable[np.ndarray], capacity: int) -> Iterator[Move]:
    """Fetches what a batch misses, in place of the rows whose last use is longest ago.

    Args:
      batches: numbers of rows, of any shape.
      capacity: rows of the cache.

    Raises:
      ConfigError: a batch uses more rows.
    """
    held: collections.OrderedDict[int, None] = collections.OrderedDict()

    def change(old: Ids, new: Ids) -> tuple[Ids, Ids]:
        del old
        wanted = new.tolist()
        if len(wanted) > capacity:
            raise ConfigError(
                f"the cache must hold the {len(wanted)} rows of a batch: got "
                f"capacity={capacity}"
            )
        missed = [row for row in wanted if row not in held]
        for row in wanted:
            held[row] = None
            held.move_to_end(row)
        gone = [held.popitem(last=False)[0] for _ in range(len(held) - capacity)]
        return np.array(sorted(gone), np.int64), np.array(missed, np.int64)

    return _one_by_one(batches, change, NONE)


def _one_by_one(batches: Iterable[np.ndarray], change, kept: Ids) -> Iterator[Move]:
    """Yields moves that know of one batch more, and at the end evict all."""
    inside, step, ids, unique = set(), -1, NONE, NONE
    for number, batch in enumerate(batches):
        following = np.unique(batch)
        evict, fetch = change(unique, following)
        if number == 0:
            fetch = np.union1d(fetch, kept)
        inside = (inside - {*evict.tolist()}) | {*fetch.tolist()}
        yield Move(step, ids, evict, fetch, number)
        step, ids, unique = number, batch, following
    if step >= 0:
        yield Move(step, ids, np.array(sorted(inside), np.int64), NONE, step)
