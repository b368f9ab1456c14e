"""Which process reads which example, and when: known before anything is read.

The order of a run follows from its seed, so that every process can say what all others
will read (Dryden et al., SC 2021). No file is touched for that, and no message sent.
"""

import dataclasses

import numpy as np
from jaxtyping import Int, Int64

from hpcjax.core import checks
from hpcjax.data.pipeline import Batches, shard_rows


@dataclasses.dataclass(frozen=True, eq=False)
class AccessStream:
    """What the workers of a run read.

    Worker w reads the w-th of equal parts of the rows of every batch.

    Attributes:
      order: numbers of the examples, [batches, batch size].
      examples: how many there are.
      workers: that share a batch.

    Raises:
      ConfigError: the workers do not divide a batch.

    Examples:
      >>> stream = AccessStream(np.array([[2, 0], [1, 2]]), examples=3, workers=2)
      >>> stream.worker(0).tolist(), stream.counts(1).tolist()
      ([2, 1], [1, 0, 1])
    """

    order: Int[np.ndarray, "batches rows"]
    examples: int
    workers: int

    def __post_init__(self) -> None:
        shard_rows(self.order.shape[1], (0, self.workers))

    @property
    def rows(self) -> int:
        """How many examples of a batch a worker reads."""
        return self.order.shape[1] // self.workers

    def worker(self, number: int) -> Int[np.ndarray, " reads"]:
        """Returns the examples that a worker reads, in order."""
        rows = shard_rows(self.order.shape[1], (number, self.workers))
        return self.order[:, rows].reshape(-1)

    def counts(self, number: int) -> Int64[np.ndarray, " examples"]:
        """Returns how often a worker reads each example."""
        return np.bincount(self.worker(number), minlength=self.examples)

    def first_use(self, number: int) -> Int64[np.ndarray, " examples"]:
        """Returns the place in a worker's order where it first reads each example.

        It is −1 for what the worker never reads: 0 is a place like any other.
        """
        first = np.full(self.examples, -1)
        read = self.worker(number)
        first[read[::-1]] = np.arange(len(read))[::-1]  # the last assignment stays
        return first


def access_stream(
    batches: Batches, steps: int, workers: int, *, start: int = 0
) -> AccessStream:
    """Returns what is read in batches `start` to `steps - 1` of a training run.

    An index costs some 10 to 100 µs, as Grain's shuffle has no form for many.

    Args:
      batches: of any of the workers.
      steps: of the run.
      workers: that share a batch.
      start: the first batch.
    """
    order = np.empty((max(0, steps - start), batches.batch_size), np.int64)
    for place, number in enumerate(range(start, steps)):
        order[place] = batches.indices(number)
    return AccessStream(order, len(batches.source), workers)


def shuffled_epochs(
    examples: int, epochs: int, seed: int
) -> Int64[np.ndarray, "epochs examples"]:
    """Returns a permutation of the examples for each epoch, for statistics.

    The keys by which an epoch is sorted are raw numbers of Philox at (seed, epoch),
    which are the same in all versions of NumPy. It is not the order of a training run,
    see `access_stream`, but takes 0.3 s for a million examples.
    """
    return np.array([shuffle(examples, seed, epoch) for epoch in range(epochs)])


def shuffle(examples: int, seed: int, epoch: int) -> Int64[np.ndarray, " examples"]:
    """Returns the permutation of one epoch."""
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.argsort(generator.random_raw(examples), kind="stable")


def expected_above(examples: int, workers: int, epochs: int, more_than: int) -> float:
    """Returns how many examples one worker is expected to read more than so often.

    A worker reads an example in an epoch with probability 1/N, so E epochs are a
    binomial draw, F · P(Binomial(E, 1/N) > x): its tail is what makes it worth while to
    keep the examples that are read most often.

    Args:
      examples: F.
      workers: N.
      epochs: E.
      more_than: x; −1 for all.

    Examples:
      >>> round(expected_above(1_281_167, 16, 90, more_than=10))
      31635
    """
    from scipy import stats

    checks.require_count(1, examples=examples, workers=workers, epochs=epochs)
    return float(examples * stats.binom.sf(more_than, epochs, 1 / workers))
