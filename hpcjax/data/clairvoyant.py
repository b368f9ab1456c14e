"""Prefetching by foresight: what is read most is kept, the rest is fetched in time.

The order of all reads follows from the seed. Each process keeps what it reads most
often, gets what others keep from these, and reads the shared storage least (Dryden et
al., "Clairvoyant Prefetching for Distributed Machine Learning I/O", SC 2021).
"""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from concurrent import futures
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hpcjax.core import checks
from hpcjax.core.config import find_function
from hpcjax.data.access import AccessStream, access_stream
from hpcjax.data.input_config import ClairvoyantConfig, Connect
from hpcjax.data.neighbours import Neighbours
from hpcjax.data.pipeline import Batches, BatchIterator
from hpcjax.data.placement import Placement, Plan, StorageClass, plan
from hpcjax.data.record_source import RecordSource, as_records
from hpcjax.data.source import Batch
from hpcjax.data.staging import Ring
from hpcjax.hostcomm.collectives import barrier
from hpcjax.hostcomm.mailbox import Tag

log = logging.getLogger(__name__)


def read_clairvoyant(
    batches: Batches, steps: int, connect: Connect, **how: Any
) -> "Clairvoyant":
    """Returns a clairvoyant reader of some batches.

    Args:
      batches: of this process.
      steps: of the run.
      connect: called when reading begins, by all processes that share a batch.
      **how: as `ClairvoyantConfig` has it.

    Raises:
      ConfigError: the data set draws its batches itself, less memory than the largest
        record has, or room for less than two batches.
    """
    config, source = ClairvoyantConfig(**how), as_records(batches.source)
    rows = batches.batch_size // batches.workers[1]
    largest = int(source.sizes.max())
    rule = f"input.memory must hold the largest record, of {largest} bytes"
    checks.require(config.memory >= largest, rule, memory=config.memory)
    staging = 4 * rows if config.staging is None else config.staging
    rule = f"input.staging must hold two batches of {rows} examples of a process"
    checks.require(staging >= 2 * rows, rule, staging=staging)
    config = dataclasses.replace(config, staging=staging)
    return Clairvoyant(batches, source, steps, config, connect)


class Counts(NamedTuple):
    """Where a process has got its records from.

    Attributes:
      memory: of its own, or on their way already.
      neighbours: their memory.
      storage: and kept or used once.
      missed: those of the storage that a neighbour was asked for in vain.
    """

    memory: int = 0
    neighbours: int = 0
    storage: int = 0
    missed: int = 0


class Foresight(NamedTuple):
    """What is known before anything is read.

    Attributes:
      start: the first batch.
      stream: what is read from there on, as far as was looked ahead.
      plan: who keeps what.
    """

    start: int
    stream: AccessStream
    plan: Plan


class Clairvoyant:
    """A reader that knows what will be read; made by `read_clairvoyant`."""

    def __init__(
        self,
        batches: Batches,
        source: RecordSource,
        steps: int,
        config: ClairvoyantConfig,
        connect: Connect,
    ) -> None:
        self.batches, self.source, self.steps = batches, source, steps
        self.config, self._connect = config, connect
        self._foreseen: Foresight | None = None

    def foresee(self, start: int = 0) -> "Foresight":
        """Returns what is read from batch `start` on, and who keeps what for that."""
        if self._foreseen is None or self._foreseen.start != start:
            ahead = math.ceil(self.config.look_ahead / self.batches.batch_size)
            steps, workers = min(self.steps, start + ahead), self.batches.workers[1]
            if steps < self.steps:
                log.info("input: planned by steps %d to %d", start, steps)
            stream = access_stream(self.batches, steps, workers, start=start)
            memory = StorageClass("memory", self.config.memory, np.inf)
            placement = self._choose(stream, memory)
            made = plan(stream, self.source.sizes, [memory], placement)
            self._foreseen = Foresight(start, stream, made)
        return self._foreseen

    def _choose(self, stream: AccessStream, memory: StorageClass) -> Placement:
        """Returns who keeps what; all processes say the same."""
        config = self.config
        if config.placement != "auto":
            return config.placement
        network = config.network_rate or np.inf
        system = find_function("hpcjax.cost:InputSystem")(
            storage_rate=config.storage_rate,
            latency=config.latency,
            network_rate=network,
            send_rate=network,
            consume_rate=config.consume_rate,
            classes=(memory,),
            threads=config.threads,
            staging=config.staging,
        )
        choose, sizes = find_function("hpcjax.cost:choose_placement"), self.source.sizes
        chosen = choose(stream, sizes, system, neighbours=config.neighbours)
        log.info("input: placement=%s is simulated to be the fastest", chosen)
        return chosen

    def iterate(self, start: int = 0) -> "StagedIterator":
        """Returns an iterator from batch `start`, whose threads are at work already."""
        return StagedIterator(self, start, self._connect)


class StagedIterator(BatchIterator):
    """Iterates over batches of records that were staged for them.

    Threads of three kinds serve it: those that stage the records of the next batches,
    one that fetches what is to be kept, and one that answers neighbours. It only goes
    forward, to where the run ends.
    """

    def __init__(self, reader: Clairvoyant, start: int, connect: Connect) -> None:
        config, rank = reader.config, reader.batches.workers[0]
        foresight = reader.foresee(start)  # others wait for no one who plans
        with contextlib.ExitStack() as held:
            transport = held.enter_context(connect())
            asks = transport is not None and config.neighbours
            if transport is not None and asks:
                barrier(transport, tag=Tag(transport.new_kind("planned")))
            self._held = held.pop_all()
        self._records = Records(reader.source, foresight.plan, rank)
        staged = _Staged(reader, self._records, foresight)
        self._staged = staged
        work = [staged.stage] * config.threads + [staged.keep]
        if transport is not None and asks:
            own = Neighbours(transport, self._records.kept)
            self._records.neighbours = own
            self._held.callback(own.stop)
            work.append(own.serve)
        self._threads = [threading.Thread(target=each, daemon=True) for each in work]
        for thread in self._threads:
            thread.start()
        # No more than are staged, so that none waits for what is not to come yet.
        batches = (config.staging or 0) // foresight.stream.rows
        super().__init__(staged, start, threads=min(config.threads, batches))

    @property
    def counts(self) -> Counts:
        """Where the records have come from until now."""
        return self._records.counts

    def __next__(self) -> Batch:
        batch = super().__next__()
        self._staged.release(self.position)
        return batch

    def set_state(self, state: dict[str, int]) -> None:
        """Moves forward to a position.

        Raises:
          ConfigError: the position is negative.
          IndexError: it is behind, raised by the next `next`.
        """
        super().set_state(state)
        self._staged.release(self.position)

    def close(self) -> None:
        """Ends all threads and, if they were made for it, the connections."""
        if not self._closed:
            self._staged.close()
            super().close()
            self._held.close()
            for thread in self._threads:
                thread.join()
            log.info("input: %s", self.counts)


class _Staged:
    """Batches, by number, of records that are read before they are asked for."""

    def __init__(
        self, reader: Clairvoyant, records: "Records", foresight: Foresight
    ) -> None:
        self._batches, self._source = reader.batches, reader.source
        self._records = records
        self._start, stream, _ = foresight
        self._rows, rank = stream.rows, reader.batches.workers[0]
        self._known = stream.worker(rank).reshape(-1, self._rows)
        end, room = reader.steps * self._rows, reader.config.staging or 0
        self._ring = Ring(self._start * self._rows, end, room)
        # Batches behind what was looked ahead, each asked for once for every row.
        self._later = functools.lru_cache(room)(reader.batches.own_indices)

    def _indices(self, number: int) -> Int[np.ndarray, " rows"]:
        """Returns the examples of this process in batch `number`."""
        ahead = number - self._start
        return self._known[ahead] if ahead < len(self._known) else self._later(number)

    def __getitem__(self, number: int) -> Batch:
        records = self._ring.take(number * self._rows, (number + 1) * self._rows)
        batch = self._source.decode(records, self._indices(number))
        return self._batches.finish(number, batch)

    def release(self, number: int) -> None:
        """Makes room: the batches before `number` are not wanted any more."""
        self._ring.release(number * self._rows)

    def stage(self) -> None:
        """Reads what is wanted next, until it is closed."""
        while (place := self._ring.claim()) is not None:
            try:
                number, row = divmod(place, self._rows)
                record = self._records.get(int(self._indices(number)[row]))
            except Exception as error:  # raised by who wants the batch
                self._ring.put(place, error)
            else:
                self._ring.put(place, record)

    def keep(self) -> None:
        """Fetches what is to be kept, while no staging thread waits for the storage."""
        try:
            self._records.fetch_kept()
        except Exception as error:  # raised by who wants the next batch
            self._ring.fail(error)

    def close(self) -> None:
        """Ends what its threads do."""
        self._ring.close()
        self._records.close()


class Records:
    """The records of one process: what it keeps, and where it gets the rest from.

    A record that is on its way is waited for, never read twice at once.
    """

    def __init__(self, source: RecordSource, plan: Plan, rank: int) -> None:
        self.kept: dict[int, bytes] = {}
        self.neighbours: Neighbours | None = None
        self.counts = Counts()
        self._source, (self._order,) = source, plan.held[rank]
        self._keeps = plan.storage_of(rank) >= 0
        self._near = plan.nearest(rank)
        self._coming: dict[int, futures.Future[bytes]] = {}
        self._changed = threading.Condition()
        self._progress = self._urgent = 0
        self._closed = False

    def get(self, index: int, *, urgent: bool = True) -> bytes:
        """Returns a record from the nearest place; keeps it if the plan says so.

        Args:
          index: its number.
          urgent: whether a batch waits for it, so that what is only fetched to be kept
            has to wait.

        Raises:
          Exception: what the source has raised.
        """
        with self._changed:
            if index in self.kept:
                self._count(memory=1)
                return self.kept[index]
            ours = index not in self._coming
            coming = self._coming.setdefault(index, futures.Future())
        if ours:
            self._bring(index, urgent, coming)
        record = coming.result()
        if not ours:
            with self._changed:
                self._count(memory=1)
        return record

    def fetch_kept(self) -> None:
        """Fetches what the plan keeps, in order of first use, when nobody is urgent."""
        for index in self._order.tolist():
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._urgent)
                if self._closed:
                    return
                known = index in self.kept or index in self._coming
            if not known:
                self.get(index, urgent=False)

    def close(self) -> None:
        """Ends `fetch_kept`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _bring(self, index: int, urgent: bool, coming: "futures.Future[bytes]") -> None:
        """Fetches a record, or an error, for all who wait for it."""
        try:
            record = self._fetch(index, urgent)
        except BaseException as error:
            with self._changed:
                del self._coming[index]
            coming.set_exception(error)
            return
        with self._changed:
            if self._keeps[index]:
                self.kept[index] = record
            del self._coming[index]
        coming.set_result(record)

    def _fetch(self, index: int, urgent: bool) -> bytes:
        asked = self._is_near(index)
        if asked and self.neighbours is not None:
            record = self.neighbours.ask(int(self._near.worker[index]), index)
            if record is not None:
                with self._changed:
                    self._count(neighbours=1)
                return record
        with self._changed:
            self._urgent += urgent
        try:
            record = self._source.read(index)
        finally:
            with self._changed:
                self._urgent -= urgent
                self._count(storage=1, missed=int(asked))
                self._changed.notify_all()
        return record

    def _is_near(self, index: int) -> bool:
        """Guesses whether the neighbour that is to keep a record has got it by now.

        All fetch in order of first use and at about the same pace: it has if this
        process has got as far in its own order.
        """
        if self.neighbours is None or self._near.worker[index] < 0:
            return False
        with self._changed:
            order = self._order
            while (
                self._progress < len(order) and int(order[self._progress]) in self.kept
            ):
                self._progress += 1
            done = self._progress == len(order)
        return done or bool(self._near.place[index] < self._progress)

    def _count(self, **more: int) -> None:
        now = self.counts._asdict()
        self.counts = Counts(**{name: now[name] + more.get(name, 0) for name in now})
