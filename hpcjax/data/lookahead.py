"""Which rows of a table a cache fetches, keeps and drops: planned ahead of training.

The order of the data is known before it is trained on. So a planner that reads some
batches ahead knows of every row when it is used again, and training that gets its rows
from a small cache gives the numbers of training the whole table (Agarwal et al., SOSP
2023). No gradient, label or parameter is looked at.
"""

import bisect
import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError

Ids = Int[np.ndarray, " ids"]
NONE = np.empty(0, np.int64)


class BatchPlan(NamedTuple):
    """What is to be done about the rows of one batch; sets are sorted arrays of ids.

    Attributes:
      step: x, the number of the batch.
      ids: the batch, as it was given.
      unique: U(x), the rows that it uses.
      prefetch: of these, those that no earlier batch has left in the cache.
      keep: those that a later batch uses, as far as the planner looks.
      until: for each of `keep`, the last such batch.
      drop: those that are not kept, and go back to the store.
      sync_now: those that batch x + 1 uses: trainers must add up their gradients first.
      no_sync: those that one example alone uses, and nobody in sight after it: of no
        concern to other trainers.
      sync_later: all others, whose sum may come while x + 1 is trained on.
    """

    step: int
    ids: np.ndarray
    unique: Ids
    prefetch: Ids
    keep: Ids
    until: Ids
    drop: Ids
    sync_now: Ids
    no_sync: Ids
    sync_later: Ids


class Move(NamedTuple):
    """What passes between store and cache after a batch.

    Attributes:
      step: the batch, whose update is applied before; −1 before the first.
      ids: the batch; empty before the first.
      evict: rows to be written to the store, sorted.
      fetch: rows to be read from it, after that.
      ready: the last batch whose rows are all in the cache afterwards.
    """

    step: int
    ids: np.ndarray
    evict: Ids
    fetch: Ids
    ready: int


def plan_lookahead(
    batches: Iterable[np.ndarray], rows: int, lookahead: int
) -> Iterator[BatchPlan]:
    """Plans batches one by one, each when the `lookahead` batches after it are known.

    A row is fetched for batch y if y is its first, or the batch that used it before is
    more than L batches back.

    Args:
      batches: numbers of rows, of any shape; as many as there are.
      rows: of the table.
      lookahead: L. With 0 every batch fetches all of its rows.

    Yields:
      A plan for each batch.

    Raises:
      ConfigError: a negative L, or a number that is no row.

    Examples:
      >>> stream = [np.array(ids) for ids in ([1, 2, 2], [2, 3], [1, 3])]
      >>> for plan in plan_lookahead(stream, rows=4, lookahead=1):
      ...   print(plan.prefetch, plan.keep, plan.sync_now, plan.no_sync)
      [1 2] [2] [2] [1]
      [3] [3] [3] [2]
      [1] [] [] [1 3]

    References:
      Agarwal et al., Bagpipe, SOSP 2023, section 3; its code, oraclecacher.py.
    """
    checks.require_count(0, lookahead=lookahead)
    # The last batch in sight that uses a row, and the last that it is cached for.
    last, until = (np.full(rows, -1, np.int32) for _ in range(2))
    entering = enumerate(batches)
    window: collections.deque[tuple[int, np.ndarray, Ids, Ids]] = collections.deque()
    while True:
        for step, ids in itertools.islice(entering, 1 + lookahead - len(window)):
            unique, counts = np.unique(ids, return_counts=True)
            _check_rows(unique, rows, step)
            last[unique] = step
            window.append((step, ids, unique, counts))
        if not window:
            return
        step, ids, unique, counts = window.popleft()
        uses = last[unique]
        kept = uses > step
        now = np.zeros_like(kept)
        if window:
            now = np.isin(unique, window[0][2], assume_unique=True)
        alone = (counts == 1) & ~kept
        cached = until[unique] >= step
        until[unique[kept]] = uses[kept]
        yield BatchPlan(
            step=step,
            ids=ids,
            unique=unique,
            prefetch=unique[~cached],
            keep=unique[kept],
            until=uses[kept],
            drop=unique[~kept],
            sync_now=unique[now],
            no_sync=unique[alone],
            sync_later=unique[~now & ~alone],
        )


def _check_rows(unique: Ids, rows: int, step: int) -> None:
    if unique.size and not 0 <= unique[0] <= unique[-1] < rows:
        raise ConfigError(
            f"batch {step} must use rows in [0, {rows}): got {unique[0]} to "
            f"{unique[-1]}"
        )


def lookahead_moves(
    batches: Iterable[np.ndarray],
    rows: int,
    lookahead: int,
    *,
    every: int | None = None,
    late: int = 0,
) -> Iterator[Move]:
    """Yields what is moved when, before the first batch and after each.

    Let all gradients of batches up to d be applied. Rows whose last use in sight is not
    after d go back to the store, and then the rows of batches up to d + L are fetched:
    batches d + 1 to d + L have theirs in the cache, and it holds no others. What is
    fetched is in the store, for a row that was dropped after x is used next at
    y > x + L, and y ≤ d + L gives x < d.

    It reads up to 2L + 1 batches more than it has yielded moves for.

    Args:
      batches: see `plan_lookahead`.
      rows: of the table.
      lookahead: L; 0 moves all rows of every batch, in and out.
      every: batches between two moves; by default L / 4, at least 1.
      late: batches after which gradients are applied: d = x − late after batch x. 0
        where they are at once; 1 where sums of `sync_later` come one batch later.

    Raises:
      ConfigError: `every` is more than L − late, so that training would wait for ever.
    """
    ahead = max(lookahead, 1)
    if every is None:
        every = max(1, lookahead // 4)
    rule = "every must be from 1 to lookahead - late, or training would wait for ever"
    good = 1 <= every <= ahead - late and late in (0, 1)
    checks.require(good, rule, every=every, lookahead=lookahead, late=late)
    plans = plan_lookahead(batches, rows, lookahead)
    planned: collections.deque[BatchPlan] = collections.deque()
    dropped: collections.deque[tuple[int, Ids]] = collections.deque()
    ready = -1

    def fetch(limit: int) -> Ids:
        nonlocal ready
        found = list(itertools.islice(plans, max(0, limit - ready)))
        planned.extend(found)
        ready += len(found)
        return join(plan.prefetch for plan in found)

    yield Move(-1, NONE, NONE, fetch(ahead - 1), ready)
    while planned:
        plan = planned.popleft()
        dropped.append((plan.step, plan.drop))
        done, evict, incoming = plan.step - late, NONE, NONE
        if (done + 1) % every == 0:
            evict, incoming = _take(dropped, done), fetch(done + ahead)
        if not planned:  # the end, where nothing is late any more
            evict = join([evict, _take(dropped, plan.step)])
        yield Move(plan.step, plan.ids, evict, incoming, ready)


def _take(dropped: collections.deque[tuple[int, Ids]], done: int) -> Ids:
    """Takes the rows that are dropped up to a batch out of a queue."""
    found = []
    while dropped and dropped[0][0] <= done:
        found.append(dropped.popleft()[1])
    return join(found)


def join(parts: Iterable[Ids]) -> Ids:
    """Returns disjoint sets of rows as one, sorted."""
    return np.sort(np.concatenate([NONE, *parts]))


def rows_needed(batches: Iterable[np.ndarray], lookahead: int) -> int:
    """Returns how many rows `lookahead_moves` has in the cache at most.

    They are those of any L batches in a row, max |U(c) ∪ … ∪ U(c + L − 1)|.

    Args:
      batches: see `plan_lookahead`.
      lookahead: L; 0 and 1 need the same.
    """
    counts: collections.Counter[int] = collections.Counter()
    window: collections.deque[list[int]] = collections.deque()
    most = 0
    for ids in batches:
        window.append(np.unique(ids).tolist())
        counts.update(window[-1])
        if len(window) > max(lookahead, 1):
            counts.subtract(window.popleft())
            counts += collections.Counter()  # drops zeros
        most = max(most, len(counts))
    return most


def largest_lookahead(batches: Sequence[np.ndarray], capacity: int) -> int | None:
    """Returns the largest L whose rows a cache can hold; None if one batch's it cannot.

    Args:
      batches: a stream that is at hand as a whole.
      capacity: rows of the cache.

    Examples:
      >>> stream = [np.array(ids) for ids in ([1, 2, 2], [2, 3], [1, 3])]
      >>> largest_lookahead(stream, 2), largest_lookahead(stream, 3)
      (1, 3)
    """
    if rows_needed(batches, 1) > capacity:
        return None
    return 1 + bisect.bisect_right(
        range(2, len(batches) + 1),
        capacity,
        key=lambda each: rows_needed(batches, each),
    )


def check_capacity(
    batches: Sequence[np.ndarray], lookahead: int, capacity: int
) -> None:
    """Raises ConfigError if a cache cannot hold what look-ahead needs.

    The message says the rows that are needed, and the largest L that goes.
    """
    needed = rows_needed(batches, lookahead)
    if needed <= capacity:
        return
    largest = largest_lookahead(batches, capacity)
    way = f"lookahead={largest} is the most" if largest else "one batch needs more"
    raise ConfigError(
        f"lookahead={lookahead} needs {needed} rows in the cache: got "
        f"capacity={capacity}, where {way}"
    )
