"""Signals that ask a run to stop: SIGINT (Ctrl-C), SIGTERM, and SIGUSR1 of Slurm.

During training the first one is a request: the loop finishes its step, saves and ends.
A second Ctrl-C exits at once; a second SIGTERM or SIGUSR1 has no effect. Outside of
training there is nothing to save, and the first signal ends the run.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, final

from hpcjax.core.errors import Interrupted, Preempted

# Not every system has the last one.
_NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")


@final
class StopSignals:
    """Installs the handlers while the context is open, if in the main thread.

    Attributes:
      received: number of the first signal, 0 before there is one.
    """

    def __init__(self) -> None:
        self.received = 0
        self._deferred = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            signals = [
                getattr(signal, name) for name in _NAMES if hasattr(signal, name)
            ]
            for each in signals:
                # A signal that is ignored, as `nohup` arranges, stays ignored.
                if signal.getsignal(each) is not signal.SIG_IGN:
                    self._before[each] = signal.signal(each, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Returns a context in which the first signal only sets `received`."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def check(self) -> None:
        """Raises the error of a signal that has been received."""
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
