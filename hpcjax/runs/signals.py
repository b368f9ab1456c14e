"""Signals that ask a run to stop: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1 of Slurm.

While it trains, the first one is a request: the loop finishes its step, saves and ends.
A second Ctrl-C leaves at once; a second SIGTERM or SIGUSR1 changes nothing. Outside of
training there is nothing to save, and the first one ends the run.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, final

from hpcjax.core.errors import Interrupted, Preempted

_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")  # not every system has the last


@final
class StopSignals:
    """The handlers, while the context is open; without effect outside the main thread.

    Attributes:
      received: number of the first signal, 0 before there is one.
    """

    def __init__(self) -> None:
        self.received = 0
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            found = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
            for each in found:
                # Who started us in the background may have it ignored, as nohup does.
                if signal.getsignal(each) is not signal.SIG_IGN:
                    self._before[each] = signal.signal(each, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Returns a context in which the first signal only sets `received`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def check(self) -> None:
        """Raises the error of a signal that came, and that nothing has answered."""
        if self.received == signal.SIGINT:
            raise Interrupted("interrupted")
        if self.received:
            raise Preempted(f"{signal.Signals(self.received).name}: stopped")

    def _handle(self, number: int, *_: object) -> None:
        again, self.received = self.received, self.received or number
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        if not (self._deferred or again):
            self.check()
