"""How a run's batches are read: parts of kind `input`, which all give the same ones."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from hpcjax.core.config import Config, Size
from hpcjax.data.pipeline import Batches, BatchIterator
from hpcjax.hostcomm.transport import Transport

# Connects this process with those that share a batch, where there are any.
Connect = Callable[[], contextlib.AbstractContextManager[Transport | None]]


class Reader(Protocol):
    """What reads the batches of a run."""

    def iterate(self, start: int = 0) -> BatchIterator:
        """Returns an iterator from batch `start`, which is to be closed."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadAheadConfig(Config):
    """Threads that make the next batches while the present one is trained on.

    Attributes:
      threads: that make batches, each one at a time.
      ahead: batches that are being made or are ready.
    """

    threads: Size = 1
    ahead: Size = 2

    def open(self, batches: Batches, steps: int, connect: Connect) -> Reader:
        """Returns a reader of some batches; see `ClairvoyantConfig.open`."""
        del steps, connect
        return _ReadAhead(batches, {"threads": self.threads, "ahead": self.ahead})


class _ReadAhead:
    def __init__(self, batches: Batches, how: dict[str, Any]) -> None:
        self._batches, self._how = batches, how

    def iterate(self, start: int = 0) -> BatchIterator:
        return self._batches.iterate(start, **self._how)
