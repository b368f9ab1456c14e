"""Training with a few rows of a table on the devices, and all of them on the host.

The model's parameter is the cache, [C + 1, ...], and its examples hold slots in place
of ids: it cannot tell. What an optimizer keeps for each row travels with it. An update
with a zero gradient leaves rows and their state as they are, to the bit, under the
transforms that `optim.check_rows_apart` admits; so the ordinary step on the cache is
that on the whole table.
"""

import collections
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from typing import Any, Self

import jax
import numpy as np

from hpcjax import data
from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError

Rows = dict[str, Any]
# Ids or slots, and the rows that belong to them.
Pieces = list[tuple[np.ndarray, Rows]]


def list_row_leaves(state: Any, name: str = "table") -> list[str]:
    """Returns the paths of a table in a state: the parameter, and what goes with it.

    Raises:
      ConfigError: there is none, or an optimizer keeps something for it that has not
        its rows.
    """
    leaves = trees.flatten(state)
    paths = [path for path in leaves if path.rpartition("/")[2] == name]
    shapes = {path: leaves[path].shape for path in paths}
    if not paths or len({shape[:1] for shape in shapes.values()}) != 1:
        raise ConfigError(
            f"all that is kept of {name!r} must be by its rows: got {shapes}"
        )
    return paths


def cache_shapes(state: Any, capacity: int, name: str = "table") -> Rows:
    """Returns the shapes of a table's cache by path, with the scratch row."""
    checks.require_count(1, capacity=capacity)
    leaves = trees.flatten(state)
    # Rows that are on the host get the place of what is on devices.
    place = next(x.sharding for x in leaves.values() if hasattr(x, "sharding"))
    return {
        path: jax.ShapeDtypeStruct(
            (capacity + 1, *leaves[path].shape[1:]),
            leaves[path].dtype,
            sharding=getattr(leaves[path], "sharding", place),
        )
        for path in list_row_leaves(state, name)
    }


def split_rows(state: Any, capacity: int, name: str = "table") -> tuple[Rows, Any]:
    """Takes the rows of a table out of a state.

    Args:
      state: of training the whole table.
      capacity: C, rows of the cache.
      name: of the parameter.

    Returns:
      The arrays on the host, by path, for a `data.RowStore`; and the state with an
      empty cache of C + 1 rows, the last of which takes what fills up moves. It shares
      all else with `state`.

    Raises:
      ConfigError: see `list_row_leaves`.
    """
    leaves, shapes = trees.flatten(state), cache_shapes(state, capacity, name)
    caches = {
        path: jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
        for path, like in shapes.items()
    }
    # Copies: the state that they are views of may be donated.
    rows = {path: np.array(leaves[path]) for path in shapes}
    return rows, trees.unflatten(state, leaves | caches)


class RowCache:
    """Moves rows between a store and the cache in a state, beside training.

    For each `data.Turn`: `enter` before its batch is trained on, then the step, then
    `leave`. A thread writes what is evicted to the store, and then reads what is to be
    fetched; moves follow each other in order. All of them go in pieces of one size, so
    that nothing is compiled after the first.

    Attributes:
      waited: seconds that `enter` has waited for rows.
      moved: rows that have been fetched, and evicted.
    """

    def __init__(self, store: data.RowStore, state: Any, *, piece: int = 1024) -> None:
        """Starts the thread.

        Args:
          store: whose arrays are named as `split_rows` does.
          state: that of the cache.
          piece: rows that are moved at once.
        """
        checks.require_count(1, piece=piece)
        self.waited, self.moved = 0.0, {"fetched": 0, "evicted": 0}
        self._store, self._piece, self._ready = store, piece, -1
        self._places = np.full(len(store), -1)  # of the rows that are in the cache
        leaves = trees.flatten(state)
        self._scratch = len(leaves[next(iter(store.arrays))]) - 1
        placed = {path: leaves[path].sharding for path in store.arrays}
        self._put = jax.jit(_put, donate_argnums=0, out_shardings=placed)
        self._take = jax.jit(_take, out_shardings=placed)
        self._mover = futures.ThreadPoolExecutor(1, "rows")
        self._moves: collections.deque[tuple[data.Turn, futures.Future[Pieces]]] = (
            collections.deque()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def enter(self, state: Any, step: int) -> Any:
        """Returns the state in which the rows of a batch are in their slots.

        Raises:
          RuntimeError: reading or writing has failed.
        """
        while self._ready < step:
            turn, move = self._moves.popleft()
            began = time.perf_counter()
            pieces = _result(move)
            self.waited += time.perf_counter() - began
            leaves = trees.flatten(state)
            rows = self._rows(state)
            for slots, found in pieces:
                rows = self._put(rows, slots, found)
            state = trees.unflatten(state, leaves | rows)
            self._places[turn.fetch] = turn.fetch_slots
            self._ready = max(self._ready, turn.ready)
        return state

    def leave(self, state: Any, turn: data.Turn) -> None:
        """Begins the move after a batch, whose update is in `state`."""
        self.moved["evicted"] += len(turn.evict)
        self.moved["fetched"] += len(turn.fetch)
        self._places[turn.evict] = -1
        # Taken now: the next step may have the memory of this state.
        taken = self._take_out(state, turn.evict, turn.evict_slots)
        self._moves.append((turn, self._mover.submit(self._move, taken, turn)))

    def flush(self, state: Any) -> None:
        """Writes what is in the cache, so that the store has all rows; none leaves it.

        Raises:
          RuntimeError: reading or writing has failed.
        """
        for _, move in self._moves:
            _result(move)
        ids = np.flatnonzero(self._places >= 0)
        self._write(self._take_out(state, ids, self._places[ids]))

    def close(self) -> None:
        """Waits until all moves are made, after which there is nothing to flush.

        Raises:
          RuntimeError: reading or writing has failed.
        """
        self._mover.shutdown()
        self._places[:] = -1
        while self._moves:
            _result(self._moves.popleft()[1])

    def _rows(self, state: Any) -> Rows:
        leaves = trees.flatten(state)
        return {path: leaves[path] for path in self._store.arrays}

    def _take_out(self, state: Any, ids: np.ndarray, slots: np.ndarray) -> Pieces:
        """Returns copies of rows on the devices, with their ids."""
        rows = self._rows(state)
        return [(ids[part], self._take(rows, own)) for part, own in self._pieces(slots)]

    def _write(self, taken: Pieces) -> None:
        for ids, rows in taken:
            back = {path: np.asarray(leaf)[: len(ids)] for path, leaf in rows.items()}
            self._store.write(ids, back)

    def _move(self, taken: Pieces, turn: data.Turn) -> Pieces:
        """Writes what is evicted; returns what is fetched, with its slots."""
        self._write(taken)
        pieces = []
        for part, slots in self._pieces(turn.fetch_slots):
            rows = self._store.read(turn.fetch[part])
            short = self._piece - len(turn.fetch[part])
            filled = {
                path: np.pad(leaf, [(0, short)] + [(0, 0)] * (leaf.ndim - 1))
                for path, leaf in rows.items()
            }
            pieces.append((slots, filled))
        return pieces

    def _pieces(self, slots: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields parts of one size of slots; the last is filled up with the scratch."""
        for start in range(0, len(slots), self._piece):
            part = slice(start, start + self._piece)
            filled = np.full(self._piece, self._scratch, np.int32)
            filled[: len(slots[part])] = slots[part]
            yield part, filled


def _result(move: futures.Future[Pieces]) -> Pieces:
    """Returns what a move has fetched, once it is made."""
    try:
        return move.result()
    except Exception as error:
        raise RuntimeError("rows were not moved") from error


def _take(rows: Rows, slots: jax.Array) -> Rows:
    return {path: leaf[slots] for path, leaf in rows.items()}


def _put(rows: Rows, slots: jax.Array, values: Mapping[str, jax.Array]) -> Rows:
    return {path: leaf.at[slots].set(values[path]) for path, leaf in rows.items()}
