"""Endless, shuffled batches, the position in which is one integer."""

import collections
import math
from collections.abc import Iterator
from concurrent import futures
from typing import NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data.augment import example_rng
from hpcjax.data.input_config import Connect, Reader
from hpcjax.data.source import Augment, Batch, Sampler, ShapedSampler, Source

# What an example may hold that its items are weighed by.
_WEIGHTS = frozenset({"weight", "scored", "area"})


def batches(
    source: Source | Sampler,
    batch_size: int,
    seed: int,
    *,
    augment: Augment | None = None,
    shard: tuple[int, int] = (0, 1),
) -> "Batches":
    """Returns the endless, shuffled sequence of batches of `source`.

    Batch i is a pure function of the arguments and i. Access costs the same for every
    i, and returns what an iteration up to it would have. Every epoch is a new
    permutation of all examples. Epochs are concatenated before they are cut into
    batches, so that a batch may hold the end of one and the beginning of the next, and
    no example is dropped.

    Args:
      source: the examples; or what draws batches itself, for which all of the above
        but the order is so too.
      batch_size: number of examples in a global batch.
      seed: chooses order and augmentation, `0 <= seed < 2**32`.
      augment: `augment(batch, rng, source)`, see `augment.example_rng`.
      shard: `(index, count)`: this process gets the index-th of `count` equal parts of
        the rows of each global batch.

    Raises:
      ConfigError: an empty source, a batch size that `count` does not divide, or an
        index or seed out of its range.

    Examples:
      >>> from hpcjax.data import DigitsConfig
      >>> stream = batches(DigitsConfig().load().train, 32, seed=0)
      >>> stream[1000]["x"].shape
      (32, 8, 8, 1)
    """
    return Batches(source, batch_size, seed, augment=augment, shard=shard)


class Batches:
    """An endless sequence of batches; made by `batches`."""

    def __init__(
        self,
        source: Source | Sampler,
        batch_size: int,
        seed: int,
        *,
        augment: Augment | None = None,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        sampled = isinstance(source, Sampler)
        if not sampled and len(source) == 0:
            raise ConfigError("source must hold at least one example: got none")
        if not 0 <= seed < 2**32:
            raise ConfigError(f"seed must be in [0, 2**32): got seed={seed}")
        self.source = source
        self.batch_size = batch_size
        self.seed = seed
        self._augment = augment
        self._shard, self._rows = shard, shard_rows(batch_size, shard)
        if not sampled:
            examples = grain.MapDataset.range(len(source)).seed(seed).shuffle()
            self._order = examples.repeat().batch(batch_size)

    def indices(self, number: int) -> Int[np.ndarray, " batch_size"]:
        """Returns the numbers of the examples in global batch `number`, of all shards.

        Raises:
          IndexError: `number` is negative.
        """
        check_number(number)
        return np.asarray(self._order[number])

    def own_indices(self, number: int) -> Int[np.ndarray, " rows"]:
        """Returns the numbers of the examples of this process's shard."""
        return self.indices(number)[self._rows]

    def shapes(self) -> list[Batch]:
        """Returns this process's rows of a batch of zeros of each shape.

        It is empty if the source tells none: then there is one shape, or shapes are
        known when they come.
        """
        source, shard = self.source, self._shard
        if not isinstance(source, ShapedSampler):
            return []
        return [
            {
                name: values[shard_rows(len(values), shard)]
                for name, values in it.items()
            }
            for it in source.shapes(self.batch_size)
        ]

    @property
    def workers(self) -> tuple[int, int]:
        """This process's place among those that share a batch, and their number."""
        return self._shard

    def __getitem__(self, number: int) -> Batch:
        return self.finish(number, self._take(number))

    def finish(self, number: int, batch: Batch) -> Batch:
        """Returns batch `number`, augmented, of what the source gave for it.

        For those who get the examples in another way than by `gather`.

        Raises:
          DataFormatError: a weight of an example is negative or not finite.
        """
        if self._augment is not None:
            first = number * self.batch_size + self._rows.start
            batch = self._augment(batch, example_rng(self.seed, first), self.source)
        self._check_weights(number, batch)
        return batch

    def _check_weights(self, number: int, batch: Batch) -> None:
        """Raises DataFormatError if a weight is negative or not finite."""
        for name in _WEIGHTS & batch.keys():
            weights = np.asarray(batch[name])
            good = (weights >= 0) & np.isfinite(weights)
            if good.all():
                continue
            place = np.argwhere(~good)[0]
            row = f"row {place[0]} of batch {number}"
            if not isinstance(self.source, Sampler):
                row = f"example {self.own_indices(number)[place[0]]}"
            raise DataFormatError(
                f"{name!r} of {row} must be finite and at least 0: got "
                f"{weights[tuple(place)]}"
            )

    def _take(self, number: int) -> Batch:
        if not isinstance(self.source, Sampler):
            return self.source.gather(self.own_indices(number))
        import jax  # what has no sampler needs none

        check_number(number)
        batch = self.source.sample(number, self.batch_size, self.seed, self._shard)
        rows = self._rows
        if isinstance(self.source, ShapedSampler):
            whole = self.source.rows(number, self.batch_size, self.seed)
            rows = shard_rows(whole, self._shard)
        wanted = rows.stop - rows.start
        counts = {len(leaf) for leaf in jax.tree.leaves(batch)}
        if counts != {wanted}:
            raise DataFormatError(
                f"{type(self.source).__name__}.sample: batch {number}, shard "
                f"{self._shard}: expected {wanted} rows in each array, found "
                f"{sorted(counts)}"
            )
        return batch

    def __iter__(self) -> "BatchIterator":
        return self.iterate()

    def iterate(
        self, start: int = 0, *, threads: int = 1, ahead: int = 2
    ) -> "BatchIterator":
        """Returns an iterator from batch `start`, which prefetches in the background.

        Args:
          start: number of the first batch.
          threads: number of threads that make batches; the order does not depend on it.
          ahead: number of batches that are being made or are ready.
        """
        return BatchIterator(self, start, threads=threads, ahead=ahead)


def read_ahead(
    batches: Batches, steps: int, connect: Connect, *, threads: int = 1, ahead: int = 2
) -> Reader:
    """Returns a reader of some batches; see `clairvoyant.read_clairvoyant`.

    Args:
      batches: of this process.
      steps: not used, and nor are connections.
      connect: likewise.
      threads: as of `Batches.iterate`.
      ahead: likewise.
    """
    del steps, connect
    return _ReadAhead(batches, threads, ahead)


class _ReadAhead(NamedTuple):
    batches: Batches
    threads: int
    ahead: int

    def iterate(self, start: int = 0) -> "BatchIterator":
        return self.batches.iterate(start, threads=self.threads, ahead=self.ahead)


def check_number(number: int) -> None:
    """Raises IndexError for a negative number of a batch."""
    if number < 0:
        raise IndexError(f"batch number must be non-negative: got {number}")


@runtime_checkable
class Numbered(Protocol):
    """Batches by their numbers."""

    def __getitem__(self, number: int) -> Batch:
        """Returns a batch."""
        ...


class BatchIterator(Iterator[Batch]):
    """Iterates over batches in order while threads prepare the next ones.

    An exception in a thread is raised by the `next` that should have returned its
    batch. The position does not change, so that another `next` tries the same batch
    again. `close`, or leaving the `with` block, ends the threads.
    """

    def __init__(
        self, stream: Numbered, start: int, *, threads: int = 1, ahead: int = 2
    ) -> None:
        for name, value in (("threads", threads), ("ahead", ahead)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1: got {name}={value}")
        self._stream = stream
        self._ahead = max(ahead, threads)
        self._pool = futures.ThreadPoolExecutor(threads, "hpcjax-batches")
        self._pending: collections.deque[futures.Future[Batch]] = collections.deque()
        self._closed = False
        self.position = 0
        self.set_state({"next_index": start})

    def __next__(self) -> Batch:
        if self._closed:
            raise ValueError("the iterator is closed")
        while len(self._pending) < self._ahead:
            number = self.position + len(self._pending)
            self._pending.append(self._pool.submit(self._stream.__getitem__, number))
        try:
            batch = self._pending[0].result()
        except Exception as error:
            error.add_note(f"while making batch {self.position}")
            self._drop()
            raise
        self._pending.popleft()
        self.position += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """Returns the position: the number of the batch that comes next."""
        return {"next_index": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        """Moves to a position; batches prepared for another one are discarded.

        Raises:
          ConfigError: the position is negative.
        """
        position = state["next_index"]
        if position < 0:
            raise ConfigError(f"next_index must be non-negative: got {position}")
        self._drop()
        self.position = position

    def close(self) -> None:
        """Ends the threads after the batches that they are making."""
        self._closed = True
        self._drop()
        self._pool.shutdown(wait=True)

    def _drop(self) -> None:
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def __enter__(self) -> "BatchIterator":  # noqa: PYI034 (beartype and Self)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EvaluationBatches:
    """One ordered pass over a source; made by `evaluation_batches`."""

    def __init__(
        self, source: Source, batch_size: int, shard: tuple[int, int] = (0, 1)
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self._rows = shard_rows(batch_size, shard)

    def __len__(self) -> int:
        return math.ceil(len(self.source) / self.batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch number must be in [0, {len(self)}): got {number}")
        places = number * self.batch_size + np.arange(self.batch_size)[self._rows]
        # Rows beyond the end are filled with example 0, at weight 0.
        real = places < len(self.source)
        batch = self.source.gather(np.where(real, places, 0))
        weight = real.astype(np.float32) * np.asarray(
            batch.get("weight", 1), np.float32
        )
        return {**batch, "weight": weight}

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))


def evaluation_batches(
    source: Source, batch_size: int, shard: tuple[int, int] = (0, 1)
) -> EvaluationBatches:
    """Returns one pass over `source` in its own order, for evaluation.

    All batches have `batch_size` rows, so that a compiled function sees a single shape;
    the last batch is filled up with example 0. The key "weight", float32 [batch], is 1
    for rows that count and 0 for the filling, times the source's own "weight".

    Args:
      source: the examples.
      batch_size: rows of one global batch.
      shard: `(index, count)`, as in `batches`.

    Raises:
      ConfigError: `count` does not divide the batch size, or an index out of range.

    Examples:
      >>> from hpcjax.data import DigitsConfig
      >>> held_out = DigitsConfig().load().validation
      >>> passes = evaluation_batches(held_out, 50)
      >>> sum(float(batch["weight"].sum()) for batch in passes)
      359.0
    """
    return EvaluationBatches(source, batch_size, shard)


def shard_rows(batch_size: int, shard: tuple[int, int]) -> slice:
    """Returns the rows of a global batch that belong to `shard = (index, count)`.

    Raises:
      ConfigError: `count` does not divide the batch size, or an index out of range.

    Examples:
      >>> shard_rows(32, (1, 4))
      slice(8, 16, None)
    """
    index, count = shard
    if batch_size < 1:
        raise ConfigError(f"batch_size must be at least 1: got batch_size={batch_size}")
    if not 0 <= index < count:
        raise ConfigError(f"shard must be (index, count), index < count: got {shard}")
    if batch_size % count:
        raise ConfigError(
            f"batch_size must be divisible by the number of shards: got "
            f"batch_size={batch_size}, {count} shards"
        )
    rows = batch_size // count
    return slice(index * rows, (index + 1) * rows)
