"""How a run's batches are read: parts of kind `input`; imports no JAX."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from hpcjax.core import checks
from hpcjax.core.config import Bytes, Config, NotNegative, Positive, Size
from hpcjax.data.placement import Placement

if TYPE_CHECKING:
    from hpcjax.data.pipeline import BatchIterator
    from hpcjax.hostcomm import Transport

# Connects this process with those that share a batch, where there are any.
Connect = Callable[[], "contextlib.AbstractContextManager[Transport | None]"]


@runtime_checkable
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

    factory: ClassVar[str] = "hpcjax.data.pipeline:read_ahead"

    threads: Size = 1
    ahead: Size = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClairvoyantConfig(Config):
    """Records kept in the memory of all processes, by who reads them most often.

    Attributes:
      memory: bytes of records that each process keeps.
      staging: records that each process reads ahead; none for four batches.
      threads: that read, and as many that decode.
      placement: who keeps what, see `placement.plan`; "auto": by what the simulator
        says to be the fastest, of
      storage_rate: bytes per second of the storage, for all processes together,
      latency: seconds that each of its requests takes besides,
      network_rate: bytes per second into a process, and out of it; none: it takes no
        time, and
      consume_rate: bytes per second that a process trains on.
      neighbours: whether records are asked for that others keep.
      look_ahead: examples by whose reads it is decided who keeps what, those that are
        read first. Each process needs 20 to 50 µs for each, before the first step.
    """

    factory: ClassVar[str] = "hpcjax.data.clairvoyant:read_clairvoyant"
    foresees: ClassVar[bool] = True  # which examples are read

    memory: Bytes = 2**30
    staging: Size | None = None
    threads: Size = 4
    placement: Placement | Literal["auto"] = "frequency"
    storage_rate: Positive | None = None
    latency: NotNegative = 0.0
    network_rate: Positive | None = None
    consume_rate: Positive | None = None
    neighbours: bool = True
    look_ahead: Size = 2**20

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = {"storage_rate": self.storage_rate, "consume_rate": self.consume_rate}
        rule = "placement=auto needs storage_rate and consume_rate"
        known = self.placement != "auto" or None not in rates.values()
        checks.require(known, rule, **rates)
