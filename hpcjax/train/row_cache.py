"""Training with a few rows of a table on the devices, and all of them on the host.

The model's parameter is the cache, [C + 1, ...], and its examples hold slots in place
of ids: it cannot tell. What an optimizer keeps for each row travels with it. An update
with a zero gradient leaves rows and their state as they are, to the bit, under the
transforms that `optim.check_rows_apart` admits; so the ordinary step on the cache is
that on the whole table.
"""

import dataclasses
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from hpcjax import data
from hpcjax.core import checks, trees
from hpcjax.core.errors import ConfigError

Rows = dict[str, Any]


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
    checks.require_count(1, capacity=capacity)
    leaves = trees.flatten(state)
    paths = list_row_leaves(state, name)
    # Copies: the state that they are views of may be donated.
    rows = {path: np.array(leaves[path]) for path in paths}
    caches = {
        path: jax.device_put(
            np.zeros((capacity + 1, *rows[path].shape[1:]), rows[path].dtype),
            leaves[path].sharding,
        )
        for path in paths
    }
    return rows, trees.unflatten(state, leaves | caches)


@dataclasses.dataclass(frozen=True)
class _Arrived:
    """Rows for the cache, or, without any, that those of a batch are all here."""

    ready: int
    slots: np.ndarray | None = None
    rows: Rows = dataclasses.field(default_factory=dict)


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
        leaves = trees.flatten(state)
        self._scratch = len(leaves[next(iter(store.arrays))]) - 1
        placed = {path: leaves[path].sharding for path in store.arrays}
        self._put = jax.jit(_put, donate_argnums=0, out_shardings=placed)
        self._take = jax.jit(_take, out_shardings=placed)
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[_Arrived | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def enter(self, state: Any, step: int) -> Any:
        """Returns the state in which the rows of a batch are in their slots.

        Raises:
          RuntimeError: reading or writing has failed.
        """
        began = time.perf_counter()
        while self._ready < step:
            found = self._arrived.get()
            self.waited += time.perf_counter() - began
            if isinstance(found, Exception):
                raise RuntimeError("rows were not moved") from found
            self._ready = max(self._ready, found.ready)
            if found.slots is not None:
                leaves = trees.flatten(state)
                rows = {path: leaves[path] for path in self._store.arrays}
                rows = self._put(rows, found.slots, found.rows)
                state = trees.unflatten(state, leaves | rows)
            began = time.perf_counter()
        return state

    def leave(self, state: Any, turn: data.Turn) -> None:
        """Begins the move after a batch, whose update is in `state`."""
        self.moved["evicted"] += len(turn.evict)
        self.moved["fetched"] += len(turn.fetch)
        leaves = trees.flatten(state)
        rows = {path: leaves[path] for path in self._store.arrays}
        # Taken now: the next step may have the memory of this state.
        taken = [
            (turn.evict[part], self._take(rows, slots))
            for part, slots in self._pieces(turn.evict_slots)
        ]
        self._jobs.put((taken, turn))

    def close(self) -> None:
        """Waits until all moves are made.

        Raises:
          RuntimeError: reading or writing has failed.
        """
        self._jobs.put(None)
        self._thread.join()
        while not self._arrived.empty():
            found = self._arrived.get()
            if isinstance(found, Exception):
                raise RuntimeError("rows were not moved") from found

    def _work(self) -> None:
        """Makes moves one after the other, until there is none or one fails."""
        try:
            while (job := self._jobs.get()) is not None:
                self._move(*job)
        except Exception as error:
            self._arrived.put(error)

    def _move(self, taken: list[tuple[np.ndarray, Rows]], turn: data.Turn) -> None:
        for ids, rows in taken:
            back = {path: np.asarray(leaf)[: len(ids)] for path, leaf in rows.items()}
            self._store.write(ids, back)
        for part, slots in self._pieces(turn.fetch_slots):
            rows = self._store.read(turn.fetch[part])
            short = self._piece - len(turn.fetch[part])
            filled = {
                path: np.pad(leaf, [(0, short)] + [(0, 0)] * (leaf.ndim - 1))
                for path, leaf in rows.items()
            }
            self._arrived.put(_Arrived(-1, slots, filled))
        self._arrived.put(_Arrived(turn.ready))

    def _pieces(self, slots: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Yields parts of one size of slots; the last is filled up with the scratch."""
        for start in range(0, len(slots), self._piece):
            part = slice(start, start + self._piece)
            filled = np.full(self._piece, self._scratch, np.int32)
            filled[: len(slots[part])] = slots[part]
            yield part, filled


def _take(rows: Rows, slots: jax.Array) -> Rows:
    return {path: leaf[slots] for path, leaf in rows.items()}


def _put(rows: Rows, slots: jax.Array, values: Mapping[str, jax.Array]) -> Rows:
    return {path: leaf.at[slots].set(values[path]) for path, leaf in rows.items()}
