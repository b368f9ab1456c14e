"""Slow storage that all processes of a machine share, for real: it makes them wait."""

import fcntl
import os
import pathlib
import struct
import threading
import time
from typing import NamedTuple

from hpcjax.core import checks

# Requests of several threads take turns by pieces, as they do at a network's end.
PIECE = 2**15
_STATE = struct.Struct("=dQ")


class Served(NamedTuple):
    """What a storage has done.

    Attributes:
      free: when it has sent all that it was asked for, by `time.monotonic()`.
      bytes: that it has sent.
    """

    free: float
    bytes: int


class SharedRate:
    """The bandwidth and the latency of a storage, as a file that all have in common.

    The file holds when the storage is free again. Who takes bytes moves this moment by
    bytes / rate, and sleeps until then. Requests cost their latency apart from each
    other, and share the bandwidth. The clock is that of the machine since it started,
    so a file is for the processes of one run.

    Examples:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     rate = SharedRate(pathlib.Path(folder) / "rate", 1e9)
      ...     rate.take(1000)
      ...     rate.served().bytes
      1000
    """

    def __init__(self, path: pathlib.Path, rate: float, latency: float = 0.0) -> None:
        """Opens the file, which is made if it is not there.

        Args:
          path: the file.
          rate: bytes per second of all requests together.
          latency: seconds that each request takes before its first byte.

        Raises:
          ConfigError: a rate that is not positive, or a negative latency.
        """
        checks.require_positive(rate=rate)
        checks.require_finite(0.0, latency=latency)
        self.rate, self.latency = rate, latency
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # The file's lock is this object's, so that its threads need one besides.
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Returns when so many bytes would have come."""
        due = time.monotonic() + self.latency
        _sleep_until(due)
        for start in range(0, count, PIECE):
            # From when the last piece was due, not from when we woke: a sleep that is
            # too long does not make the storage slower.
            due = self._move(due, min(PIECE, count - start))
            _sleep_until(due)

    def served(self) -> Served:
        """Returns what all processes together have taken."""
        content = os.pread(self._file, _STATE.size, 0)
        return Served(*_STATE.unpack(content)) if content else Served(0.0, 0)

    def close(self) -> None:
        """Closes the file, which stays."""
        os.close(self._file)

    def _move(self, asked: float, count: int) -> float:
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                free, total = self.served()
                free = max(free, asked) + count / self.rate
                os.pwrite(self._file, _STATE.pack(free, total + count), 0)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        return free


def read_uncached(path: pathlib.Path) -> bytes:
    """Returns a file's content, and leaves none of it in the system's page cache."""
    with path.open("rb", buffering=0) as file:
        content = file.read()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return content


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
