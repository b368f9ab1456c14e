"""How a run's batches are read: parts of kind `input`; imports no JAX."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hpcjax.core import checks
from hpcjax.core.config import Bytes, Config, Size
from hpcjax.data.placement import Placement

if TYPE_CHECKING:
    from hpcjax.data.clairvoyant import Clairvoyant
    from hpcjax.data.pipeline import Batches, BatchIterator
    from hpcjax.hostcomm import Transport

# Connects this process with those that share a batch, where there are any.
Connect = Callable[[], "contextlib.AbstractContextManager[Transport | None]"]


class Reader(Protocol):
    """What reads the batches of a run."""

    def iterate(self, start: int = 0) -> "BatchIterator":
        """Returns an iterator from batch `start`, which is to be closed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadAheadConfig(Config):
    """Threads that make the next batches while the present one is trained on.

    Attributes:
      threads: that make batches, each one at a time.
      ahead: batches that are being made or are ready; no fewer than threads.
    """

    threads: Size = 1
    ahead: Size = 2

    def open(self, batches: "Batches", steps: int, connect: Connect) -> Reader:
        """Returns a reader of some batches; see `ClairvoyantConfig.open`."""
        del steps, connect
        return _ReadAhead(batches, self)


class _ReadAhead:
    def __init__(self, batches: "Batches", config: ReadAheadConfig) -> None:
        self._batches, self._config = batches, config

    def iterate(self, start: int = 0) -> "BatchIterator":
        how = self._config
        return self._batches.iterate(start, threads=how.threads, ahead=how.ahead)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClairvoyantConfig(Config):
    """Records kept in the memory of all processes, by who reads them most often.

    Attributes:
      memory: bytes of records that each process keeps.
      staging: records that each process reads ahead; none for four batches.
      threads: that read, and as many that decode.
      placement: who keeps what; see `placement.plan`.
      neighbours: whether records are asked for that others keep.
      look_ahead: examples by whose reads it is decided who keeps what, those that are
        read first. Each process needs 20 to 50 µs for each, before the first step.
    """

    memory: Bytes = 2**30
    staging: Size | None = None
    threads: Size = 4
    placement: Placement = "frequency"
    neighbours: bool = True
    look_ahead: Size = 2**20

    def open(self, batches: "Batches", steps: int, connect: Connect) -> "Clairvoyant":
        """Returns a reader of some batches.

        Args:
          batches: of this process.
          steps: of the run.
          connect: called when reading begins, by all processes that share a batch.

        Raises:
          ConfigError: the data set draws its batches itself, less memory than the
            largest record has, or room for less than two batches.
        """
        from hpcjax.data import clairvoyant, record_source

        source = record_source.as_records(batches.source)
        rows = batches.batch_size // batches.workers[1]
        largest = int(source.sizes.max())
        rule = f"input.memory must hold the largest record, of {largest} bytes"
        checks.require(self.memory >= largest, rule, memory=self.memory)
        staging = 4 * rows if self.staging is None else self.staging
        rule = f"input.staging must hold two batches of {rows} examples of a process"
        checks.require(staging >= 2 * rows, rule, staging=staging)
        config = dataclasses.replace(self, staging=staging)
        return clairvoyant.Clairvoyant(batches, source, steps, config, connect)
