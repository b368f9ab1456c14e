"""Look-ahead tried on random streams in whole numbers, in the right order or not.

Trainers with caches of their own, whose gradients are added up as the plan says, some
of them a batch late, against one table. Numbers are integers modulo a prime, so that
what is not equal is wrong.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    from hpcjax import data

PRIME = 1_000_003
ORDERS = ("as planned", "evict first", "no extension")
Order = Literal["as planned", "evict first", "no extension"]
Sums = dict[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Streams that are drawn.

    Attributes:
      streams: how many, each with a look-ahead of 1 to `most` and 1, 2 or 4 trainers.
      steps: batches of a stream.
      examples: of a batch, each of two rows; a multiple of 4.
      rows: of the table.
      most: largest look-ahead.
      seed: of the streams.
    """

    smoke: ClassVar[Mapping[str, str]] = {"streams": "3", "steps": "6"}
    figures: ClassVar[Mapping[str, str]] = {
        "wrong": "order: share of streams whose table is not that of one trainer"
    }

    streams: config.Size = 400
    steps: config.Size = 24
    examples: config.Size = 8
    rows: config.Size = 60
    most: config.Size = 8
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "examples must be a multiple of 4"
        checks.require(self.examples % 4 == 0, rule, examples=self.examples)

    def labels(self) -> "runs.Labels":
        """Returns the orders in which trainers take their steps."""
        return {"order": ORDERS}


@runs.measured
def run(cfg: Config) -> "runs.Figures":
    """Trains on all streams, in each order."""
    rng = np.random.default_rng(cfg.seed)
    wrong = collections.Counter()
    for _ in range(cfg.streams):
        shape = (cfg.steps, cfg.examples, 2)
        stream = (cfg.rows * rng.random(shape) ** 2).astype(np.int64)
        lookahead = int(rng.integers(1, cfg.most + 1))
        every = int(rng.integers(1, max(lookahead - 1, 1) + 1))
        workers = int(rng.choice([1, 2, 4]))
        right = train_whole(stream, cfg.rows)
        for order in ORDERS:
            trainers = Trainers(stream, cfg.rows, lookahead, every, workers, order)
            wrong[order] += trainers.train() != right
    return {"wrong": [wrong[order] / cfg.streams for order in ORDERS]}


def gradients(batch: np.ndarray, step: int, first: int, values: Any) -> Sums:
    """Returns by row the sums of what examples give; each depends on all of its rows.

    Args:
      batch: rows of some examples.
      step: of the batch.
      first: the number of the first example in the batch.
      values: of the rows.
    """
    sums: Sums = collections.Counter()
    for number, rows in enumerate(batch.tolist(), first):
        seen = sum(values[row] for row in rows)
        for row in rows:
            sums[row] += 7 * values[row] + 3 * seen + 101 * step + number
    return sums


def update(value: int, gradient: int) -> int:
    """Returns a row after a gradient; the order of two updates matters."""
    return (value + 5 * gradient + gradient * gradient) % PRIME


def train_whole(stream: np.ndarray, rows: int) -> list[int]:
    """Returns the table that one trainer makes of a stream."""
    table = list(range(1, rows + 1))
    for step, batch in enumerate(stream):
        for row, total in gradients(batch, step, 0, table).items():
            table[row] = update(table[row], total)
    return table


class Trainers:
    """The paper's trainers, step by step; `train` returns the server's table, or None.

    Every trainer has all cached rows, but of those in `no_sync` only the one that has
    the example has their last value.
    """

    def __init__(
        self,
        stream: np.ndarray,
        rows: int,
        lookahead: int,
        every: int,
        workers: int,
        order: Order = "as planned",
    ) -> None:
        from hpcjax import data

        self.stream, self.order = stream, order
        self.lookahead, self.every, self.workers = lookahead, every, workers
        # With L = 1 there is no time for a sum that comes late.
        self.late = 1 if lookahead > 1 else 0
        self.plans = list(data.plan_lookahead(stream, rows, lookahead))
        self.server = list(range(1, rows + 1))
        self.caches: list[Sums] = [{} for _ in range(workers)]
        self.until: dict[int, int] = {}
        self.owner: dict[int, int] = {}
        self.pending: Sums = {}
        self.ready, self.most = -1, 0

    def train(self) -> list[int] | None:
        """Takes all steps; None where a row is wanted that is not in the cache."""
        self.fetch(self.lookahead - 1)
        try:
            for plan in self.plans:
                self.step(plan)
        except KeyError:
            return None
        self.apply(self.pending)
        self.evict(len(self.plans))
        return self.server

    def step(self, plan: "data.BatchPlan") -> None:
        """Takes a step, and cleans up if that is due."""
        if self.ready < plan.step:
            raise RuntimeError(f"batch {plan.step} is never ready")
        parts = np.split(self.stream[plan.step], self.workers)
        found = [
            gradients(part, plan.step, worker * len(part), self.caches[worker])
            for worker, part in enumerate(parts)
        ]
        total: Sums = collections.Counter()
        for each in found:
            total.update(each)
        done = plan.step - self.late
        due = (done + 1) % self.every == 0
        if due and self.order == "evict first":
            self.evict(done)
        late, self.pending = self.pending, {r: total[r] for r in plan.sync_later}
        self.apply(late if self.late else self.pending)
        if not self.late:
            self.pending = {}
        self.apply({row: total[row] for row in plan.sync_now})
        for row in plan.no_sync.tolist():
            worker = next(w for w, each in enumerate(found) if row in each)
            self.owner[row] = worker
            cache = self.caches[worker]
            cache[row] = update(cache[row], total[row])
        self.until.update(zip(plan.keep.tolist(), plan.until.tolist(), strict=True))
        if due:
            if self.order != "evict first":
                self.evict(done)
            self.fetch(done + self.lookahead)

    def apply(self, sums: Sums) -> None:
        """Updates rows in all caches, if they are there."""
        for row, total in sums.items():
            self.owner.pop(row, None)
            for cache in self.caches:
                if row in cache or self.order == "as planned":
                    cache[row] = update(cache[row], total)

    def evict(self, done: int) -> None:
        """Writes rows to the server that are not used after a batch."""
        rows = [row for row in self.caches[0] if self.until[row] <= done]
        for place, row in enumerate(sorted(rows)):
            writer = self.owner.pop(row, place % self.workers)
            self.server[row] = self.caches[writer][row]
            for cache in self.caches:
                del cache[row]

    def fetch(self, limit: int) -> None:
        """Reads the rows that batches up to `limit` need and that are not kept."""
        for plan in self.plans[self.ready + 1 : limit + 1]:
            self.ready = plan.step
            for row in plan.prefetch.tolist():
                for cache in self.caches:
                    cache[row] = self.server[row]
                last = self.until.get(row, -1)
                extended = self.order != "no extension"
                self.until[row] = max(last, plan.step) if extended else last
        self.most = max(self.most, len(self.caches[0]))
