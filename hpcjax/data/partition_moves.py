"""Moves of whole partitions, in the order in which their edges are trained."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from hpcjax.core import checks
from hpcjax.data.lookahead import NONE, Ids, Move


def partition_moves(
    states: Sequence[np.ndarray],
    batches: Iterable[np.ndarray],
    rows: int,
    partition_rows: int,
    ahead: int = 0,
) -> Iterator[Move]:
    """Yields moves by which each batch finds the partitions of its state in the cache.

    A swap is made after the last batch of a state: what the next does not use is
    evicted, what it misses is fetched, and rows on their way back have had their last
    update. In the cache are at most the partitions of a state, and `ahead`.

    Args:
      states: for each batch the partitions that are resident, see `graphs.Ordering`.
      batches: numbers of rows, of any shape; as many as there are states.
      rows: of the table.
      partition_rows: of a partition; the last may have fewer.
      ahead: partitions of the next state that come while this one is trained.

    Yields:
      A move before the first batch, and one after each; the last evicts all.

    Raises:
      ConfigError: there are more batches than states, or fewer.
      ValueError: a batch uses a row that is not resident.

    Examples:
      >>> moves = partition_moves([[0, 1], [2, 1]], [[1], [4]], 5, 2)
      >>> for move in moves:
      ...   print(move.step, move.evict, move.fetch, move.ready)
      -1 [] [0 1 2 3] 0
      0 [0 1] [4] 1
      1 [2 3 4] [] 1

    References:
      Waleffe et al., MariusGNN, EuroSys 2023, section 5.
    """
    checks.require_count(0, ahead=ahead)
    sets = [np.unique(state).astype(np.int64) for state in states]
    # Where a state is another than that of the batch before, and the end.
    pairs = enumerate(zip(sets[1:], sets[:-1], strict=True), 1)
    starts = [n for n, (new, old) in pairs if not np.array_equal(new, old)]
    ends, held = [*starts, len(sets)], sets[0] if sets else NONE

    def of(partitions: np.ndarray) -> Ids:
        every = partitions[:, None] * partition_rows + np.arange(partition_rows)
        return every[every < rows]

    step, place, ready = -1, 0, ends[0] - 1
    yield Move(-1, NONE, NONE, of(held), ready)
    for step, batch in enumerate(batches):
        checks.require(step < len(sets), "each batch must have a state", batch=step)
        ids, evict, new = np.asarray(batch), NONE, NONE
        inside = np.isin(ids.astype(np.int64) // partition_rows, sets[step]).all()
        if not inside or ids.max(initial=0) >= rows:
            raise ValueError(f"batch {step} uses rows that are not resident")
        end = ends[place]
        coming = sets[end] if end < len(sets) else NONE
        missing = np.setdiff1d(coming, held)
        if step + 1 == end:
            evict, new = np.setdiff1d(held, coming), missing
            place = min(place + 1, len(ends) - 1)
        elif step == (ends[place - 1] if place else 0):
            new = missing[:ahead]
        if len(new) == len(missing) and end < len(sets):
            # What is evicted after it need not be waited for.
            ready = ends[min(place + (step + 1 < end), len(ends) - 1)] - 1
        held = np.union1d(np.setdiff1d(held, evict), new)
        yield Move(step, ids, of(evict), of(new), ready)
    given = {"batches": step + 1, "states": len(sets)}
    checks.require(step + 1 == len(sets), "each state must have a batch", **given)
