"""A snapshot: rows of sampled neighbours in memory, in place of lists in a store.

A row of a vertex holds C = ⌈α·f⌉ of the d edges that it receives, or all, as a set of
K = min(C, d). Who has few edges is read from the store as ever: the threshold decides
where a list is served from, and no edge is lost.

References:
  Liu et al., GraphSnapShot, 2024, section 4. Entries that a row takes are drawn from
  those that it does not hold, and what a row keeps is uniform, so that each neighbour
  is in a list with probability min(f, d)/d at every step.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.graphs.blocks import Blocks
from hpcjax.graphs.csr import Csr
from hpcjax.graphs.sampling import Draw, choose, layerwise_blocks
from hpcjax.graphs.snapshot_policies import FullBatch, FullRefresh, OnTheFly, Policy
from hpcjax.graphs.snapshot_rows import Edges, Rows
from hpcjax.graphs.versions import Lists, VersionedCsr

PAGE = 4096  # bytes that a disk reads at once
_PIECE = 2048  # rows that are renewed at once
# What is drawn for a hop beside its lists: rows at a refresh, what they keep, and what
# comes from the store. Hops are fewer.
_ROWS, _KEPT, _FRESH, _PART = (10_000 * each for each in (1, 2, 3, 4))


class Reads(NamedTuple):
    """What a batch cost.

    Attributes:
      entries: neighbours that were read from lists of the store.
      pages: of 4 KiB of the store's array of neighbours, each once, that these lie in.
      bytes: of these pages.
      hits: neighbours that rows served.
      refreshed: entries among those read that rows hold now.
      moved: bytes of rows that were served.
    """

    entries: int = 0
    pages: int = 0
    bytes: int = 0
    hits: int = 0
    refreshed: int = 0
    moved: int = 0


class Snapshot:
    """Makes blocks of a store, neighbours of vertices with long lists from rows.

    What a batch draws depends on the seed, its number and who asks; with `OnTheFly` on
    the batches before as well, which must be made in order, see `missed`.

    Args:
      store: of the edges.
      fanouts: of each hop, that of the targets first.
      policy: how rows are kept.
      epoch: batches of an epoch, by which batches are numbered.
      shared: whether all hops have rows in common, of the largest width.
      threshold: lists longer than it are served from rows.
      rows: most rows of a hop; None for all such lists. Those used longest ago leave.
      invalidate: whether a deleted edge leaves its row at once, which is shorter until
        it is renewed.

    Raises:
      ConfigError: a fan-out is not positive, a threshold or a number of rows negative.
    """

    def __init__(
        self,
        store: VersionedCsr,
        fanouts: Sequence[int],
        policy: Policy,
        *,
        epoch: int = 1,
        shared: bool = False,
        threshold: int = 30,
        rows: int | None = None,
        invalidate: bool = False,
    ) -> None:
        rule = "a snapshot's fan-outs must be positive, for rows have a width"
        checks.require(all(each > 0 for each in fanouts), rule, fanouts=fanouts)
        checks.require_count(0, threshold=threshold, rows=rows or 0)
        self.store, self.fanouts, self.policy = store, tuple(fanouts), policy
        self._epoch, self._shared, self._threshold = epoch, shared, threshold
        self._most, self._invalidate = rows, invalidate
        edges = store.csr.neighbours
        self._touched = np.zeros(edges.nbytes // PAGE + 1, bool)
        self._forget(0)

    def _forget(self, seed: int) -> None:
        """Begins anew, with a seed."""
        self._seed, self.following = seed, 0
        self._caches: list[Rows] = []
        self._version = self._turn = 0
        self._made, self._sums = 0, np.zeros(len(Reads._fields))

    def missed(self, number: int, seed: int) -> range:
        """Returns the numbers of batches to be made before this one."""
        if not isinstance(self.policy, OnTheFly):
            return range(0)
        again = seed != self._seed or number < self.following
        return range(0 if again else self.following, number)

    def check_shards(self, count: int) -> None:
        """Raises ConfigError if so many processes would have unlike snapshots."""
        rule = (
            "rows of OnTheFly depend on all batches before, of which each process sees "
            "its own: use FullRefresh or FullBatch, or one process"
        )
        good = count == 1 or not isinstance(self.policy, OnTheFly)
        checks.require(good, rule, processes=count)

    def __call__(self, targets: np.ndarray, draw: Draw) -> Blocks:
        """Returns the blocks of targets, see `layerwise_blocks`.

        Raises:
          ConfigError: the store is older than the rows, or batches are `missed`; see
            `layerwise_blocks`.
        """
        number = draw.epoch * self._epoch + draw.position
        missed = self.missed(number, draw.seed)
        rule = f"batches {missed.start} to {number - 1} come before this one"
        checks.require(not missed, rule, batch=number)
        if draw.seed != self._seed or number < self.following:
            self._forget(draw.seed)
        self._count = dict.fromkeys(("entries", "hits", "refreshed"), 0)
        self._touched[:] = False
        self._batch, self.following = number, number + 1
        self._lists = self._update()
        if not isinstance(self.policy, FullBatch):
            self._refresh(self.policy)
        csr = self.store.csr
        made = layerwise_blocks(csr, self.fanouts, targets, draw, sample=self._sample)
        self._made, self._sums = self._made + 1, self._sums + self.reads()
        return made

    def mean_reads(self) -> dict[str, float]:
        """Returns what a batch cost in the mean, since the first rows; NaN of none.

        They are this process's: who goes on where another one ended counts anew.
        """
        means = self._sums / (self._made or math.nan)
        return dict(zip(Reads._fields, means.tolist(), strict=True))

    def reads(self) -> Reads:
        """Returns what the last batch cost."""
        pages, hits = int(self._touched.sum()), self._count["hits"]
        entry = self._caches[0].entry if self._caches else 0
        moved = hits * entry
        return Reads(pages=pages, bytes=pages * PAGE, moved=moved, **self._count)

    def rows(self, hop: int, vertices: np.ndarray) -> np.ndarray:
        """Returns numbers of the edges that rows hold, [vertices, width], −1 for none.

        Args:
          hop: from the targets; 0 if rows are shared.
          vertices: integers [vertices]; those without a row have none.
        """
        cache = self._caches[hop]
        rows = cache.slots[vertices]
        return np.where((rows >= 0)[:, None], cache.numbers[rows], -1)

    def memory_report(self) -> dict[str, int]:
        """Returns bytes: of the rows' entries, of all that a snapshot holds, and below.

        `entries` is 8 bytes times rows times the sum of widths, or the largest if they
        are shared; `store` is of the offsets and the neighbours.
        """
        csr = self.store.csr
        entries = [e.nbytes for c in self._caches for e in (c.senders, c.numbers)]
        return {
            "entries": sum(entries),
            "snapshot": sum(cache.nbytes for cache in self._caches),
            "store": csr.offsets.nbytes + csr.neighbours.nbytes,
        }

    def _update(self) -> Lists:
        """Returns the newest lists; edges deleted since may leave the rows."""
        newest = self.store.version
        rule = "the store is older than its snapshot"
        checks.require(newest >= self._version, rule, store=newest, rows=self._version)
        lists = self.store.snapshot()
        for version in range(self._version + 1, newest + 1):
            shortened = self.store.snapshot(version).shortened
            for cache in self._caches if self._invalidate else ():
                rows = cache.slots[shortened]
                rows = rows[rows >= 0]
                held = cache.get(rows)
                there = lists.find(cache.owners[rows], held.numbers) >= 0
                kept = np.where(there, np.arange(cache.width)[:, None], -1)
                cache.put(rows, held.take(kept))
        self._version = newest
        return lists

    def _refresh(self, policy: FullRefresh | OnTheFly) -> None:
        """Fills rows at first, and renews all at their times."""
        turn = self._batch // policy.period
        new, self._turn = turn != self._turn, turn
        if not self._caches:
            self._make_caches(policy.alpha)
        elif not new:
            return
        for hop, cache in enumerate(self._caches):
            for rows in _pieces(np.flatnonzero(cache.owners >= 0)):
                if cache.turns[rows[0]] < 0 or isinstance(policy, FullRefresh):
                    self._draw_rows(cache, rows, hop)
                elif policy.refresh == "full":
                    self._renew(cache, rows, hop, policy.refresh_rate * cache.width)

    def _make_caches(self, alpha: float) -> None:
        """Gives rows to the longest lists."""
        csr = self.store.csr
        vertices = np.arange(len(csr.offsets) - 1)
        degrees = self._lists.degrees(vertices)
        long = np.flatnonzero(degrees > self._threshold)
        most = len(long) if self._most is None else self._most
        long = np.sort(long[np.argsort(-degrees[long], kind="stable")[:most]])
        widths = [math.ceil(alpha * each) for each in self.fanouts]
        for width in [max(widths)] if self._shared else widths:
            cache = Rows(width, most, len(vertices), len(csr.neighbours))
            cache.make_room(long, np.zeros(0, int))
            self._caches.append(cache)

    def _draw_rows(
        self, cache: Rows, rows: np.ndarray, hop: int, *, asked: bool = False
    ) -> None:
        """Draws rows from the store; lazy ones when they are asked for."""
        policy = self.policy
        full = isinstance(policy, FullRefresh)
        if isinstance(policy, FullRefresh) and policy.lazy and not asked:
            return
        owners = cache.owners[rows]
        sizes = self._lists.degrees(owners)
        # Of full refreshes rows are those of their turn, whenever they are drawn;
        # others that come back must not be the same each time.
        when = self._turn if full else self._batch
        keys = Draw(self._seed, 0, when, _ROWS + hop).keys(owners)
        cache.put(rows, self._read(owners, _pick(keys, sizes, cache.width), kept=True))
        cache.turns[rows] = self._turn

    def _read(
        self, vertices: np.ndarray, positions: np.ndarray, *, kept: bool = False
    ) -> Edges:
        """Returns entries of the store, and counts them."""
        found = Edges(*self._lists.read(vertices, positions))
        numbers = found.numbers[positions >= 0]
        self._count["entries"] += len(numbers)
        self._count["refreshed"] += len(numbers) if kept else 0
        edges = self.store.csr.neighbours
        below = numbers[numbers < len(edges)] if len(self._lists.numbers) else numbers
        self._touched[below // (PAGE // edges.itemsize)] = True
        return found

    def _renew(
        self, cache: Rows, rows: np.ndarray, hop: int, rate: float
    ) -> tuple[Edges, Edges]:
        """Renews some entries of rows; returns those that stay, and the new ones.

        K − r entries stay, chosen uniformly, and others are drawn from what these leave
        of the list. A row does not notice that an edge of it is gone, unless the list
        became shorter than the row is wide.
        """
        owners, held = cache.owners[rows], cache.get(rows)
        sizes = self._lists.degrees(owners)
        full = np.minimum(sizes, cache.width)
        fresh = np.minimum(max(1, math.floor(rate)), full)
        at = self._lists.find(owners, held.numbers)
        may = np.where(sizes < cache.width, at >= 0, held.numbers >= 0)
        order = np.argsort(~may, axis=0, kind="stable")
        there = may.sum(0)
        draw = Draw(self._seed, 0, self._batch, _KEPT + hop)
        chosen = self._keep(draw.keys(owners), there, np.minimum(full - fresh, there))
        chosen = np.where(chosen < 0, -1, np.take_along_axis(order, chosen, 0))
        kept = held.take(chosen)
        more, stream = full - kept.counts, _FRESH + hop
        new = self._draw_others(owners, kept, more, stream, kept=True)
        cache.put(rows, kept.join(new))
        return kept, new

    def _keep(
        self, keys: np.ndarray, sizes: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Returns which entries rows keep, see `choose`."""
        return choose(keys, sizes, counts)

    def _draw_others(
        self,
        vertices: np.ndarray,
        taken: Edges,
        counts: np.ndarray,
        stream: int,
        *,
        kept: bool = False,
    ) -> Edges:
        """Returns entries of the store that are not among those taken."""
        sizes = self._lists.degrees(vertices)
        held = np.sort(self._lists.find(vertices, taken.numbers), axis=0)
        left = sizes - (held >= 0).sum(0)
        draw = Draw(self._seed, 0, self._batch, stream)
        positions = _pick(draw.keys(vertices), left, counts)
        real = positions >= 0
        for each in held:  # ascending: the i-th that is not held
            positions += real & (each >= 0) & (positions >= each)
        return self._read(vertices, positions, kept=kept)

    def _sample(self, _: Csr, vertices: np.ndarray, fanout: int, draw: Draw) -> Csr:
        """Lists neighbours of vertices, as `sample_neighbours` does."""
        degrees = self._lists.degrees(vertices)
        long = np.zeros(len(vertices), bool)
        if not isinstance(self.policy, FullBatch):
            long = degrees > self._threshold
            long &= np.cumsum(long) <= len(self._caches[0].owners)
        short, at = np.flatnonzero(~long), np.flatnonzero(long)
        found = Edges(*(np.full((fanout, len(vertices)), -1) for _ in range(2)))
        sizes, keys = degrees, draw.keys(vertices)
        cache = rows = served = None
        if len(at):
            cache, rows = self._find_rows(vertices[at], draw.hop)
            served = self._serve(cache, rows, fanout, draw, keys[at])
            if served is None:  # lists and rows are drawn from at once
                sizes = degrees.copy()
                sizes[at] = cache.counts[rows]
        slots = _pick(keys, sizes, fanout)
        _fill_in(found, short, self._read(vertices[short], slots[:, short]))
        if cache is not None and rows is not None:
            if served is None:
                served = cache.get(rows, slots[:, at])
                self._count["hits"] += int((served.numbers >= 0).sum())
            _fill_in(found, at, served)
        real = found.numbers.T >= 0
        offsets = np.concatenate([[0], np.cumsum(real.sum(1))])
        return Csr(offsets, *(each.T[real] for each in found))

    def _find_rows(self, vertices: np.ndarray, hop: int) -> tuple[Rows, np.ndarray]:
        """Returns the rows of vertices, some of which get one now."""
        layer = 0 if self._shared else hop
        cache = self._caches[layer]
        rows = cache.slots[vertices].astype(np.int64)
        new = rows < 0
        if new.any():
            rows[new] = cache.make_room(vertices[new], rows[~new])
        if isinstance(self.policy, FullRefresh):
            new = cache.turns[rows] != self._turn
        if new.any():
            self._draw_rows(cache, rows[new], layer, asked=True)
        cache.used[rows] = self._batch
        return cache, rows

    def _serve(
        self, cache: Rows, rows: np.ndarray, fanout: int, draw: Draw, keys: np.ndarray
    ) -> Edges | None:
        """Renews rows, where it is time; returns lists unless rows alone give them."""
        policy, batch = self.policy, self._batch
        if not isinstance(policy, OnTheFly):
            return None
        owners = cache.owners[rows]
        if policy.refresh == "partial":
            if policy.fetch == "full" and (batch == 0 or batch % policy.period):
                return None
            count = policy.refresh_rate * fanout
            kept, new = self._renew(cache, rows, draw.hop, count)
            if policy.fetch == "full":
                return None
            first = _draw(new, keys, fanout)
            more = draw._replace(hop=_PART + draw.hop).keys(owners)
            other = _draw(kept, more, fanout - first.counts)
            self._count["hits"] += int(other.counts.sum())
            return first.join(other)
        if policy.fetch_period is None or (batch + 1) % policy.fetch_period:
            return None
        part = math.floor((policy.fetch_rate or 0) * fanout)
        held = _draw(cache.get(rows), keys, part)
        self._count["hits"] += int(held.counts.sum())
        more = np.minimum(self._lists.degrees(owners), fanout) - held.counts
        return held.join(self._draw_others(owners, held, more, _PART + draw.hop))


def _pieces(rows: np.ndarray) -> list[np.ndarray]:
    """Returns rows by pieces, whose arrays fit into a processor's cache."""
    return [rows[at : at + _PIECE] for at in range(0, len(rows), _PIECE)]


def _pick(keys: np.ndarray, sizes: np.ndarray, most: int | np.ndarray) -> np.ndarray:
    """Returns at most so many numbers below each size, [slots, sizes], −1 behind."""
    counts = np.minimum(sizes, most)
    cut = np.flatnonzero(counts < sizes)
    chosen = choose(keys[cut], sizes[cut], counts[cut])
    if len(cut) == len(sizes):
        return chosen
    slots = np.arange(counts.max(initial=0))[:, None]
    picked = np.where(slots < counts, slots, -1)
    picked[: len(chosen), cut] = chosen
    return picked


def _draw(held: Edges, keys: np.ndarray, most: int | np.ndarray) -> Edges:
    """Returns at most so many entries, of some that are in the first slots."""
    return held.take(_pick(keys, held.counts, most))


def _fill_in(found: Edges, columns: np.ndarray, part: Edges) -> None:
    """Writes lists of some vertices."""
    if len(part.numbers) > len(found.numbers):
        part = part.pack(len(found.numbers))
    for whole, each in zip(found, part, strict=True):
        whole[: len(each), columns] = each
