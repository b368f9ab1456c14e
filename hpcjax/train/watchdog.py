"""Finds a process that stands still, says which one, and ends the run.

In a run of several processes one that is alive but stuck leaves all others waiting in
an exchange, for ever and without a word. So every process writes how far it has come
into a file of its own, and a thread watches them. The one that is behind is the one
that is stuck: the others have handed their step to the devices and wait.
"""

import contextlib
import faulthandler
import os
import pathlib
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import final

from hpcjax.core.errors import ProcessLost

PROGRESS = "progress"  # the folder's name in a run directory
_TICK = 1.0
_LAST_WORDS = 3.0
_KNOWN, _REMEMBERED = 3, 50  # steps
_PATIENCE = 20  # times the median step


@final
class Watchdog:
    """Watches the steps of this process, and names who is behind when they stop.

    Args:
      folder: where every process of the run keeps a file of its progress.
      index: of this process.
      least: seconds without a step that are never too many; more are too many once
        they exceed 20 median steps. Ten times as many until a median is known.
      count: of the processes; files of others are of an earlier attempt.

    Neither validations nor saves are watched: nobody knows how long they may take. Time
    in which this process is stopped, as by Ctrl-Z, does not count.
    """

    def __init__(
        self, folder: pathlib.Path, index: int, least: float, count: int = 1
    ) -> None:
        self._folder, self._index, self._least = folder, index, least
        self._count = count
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)
        self._beaten: float | None = None
        self._waited = 0.0
        self._begun = self._watching = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        for path in self._folder.iterdir() if self._index == 0 else ():
            if not path.name.isdecimal() or int(path.name) >= self._count:
                path.unlink(missing_ok=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> pathlib.Path:
        return self._folder / str(self._index)

    def beat(self, step: int) -> None:
        """Takes note that `step` is being handed to the devices."""
        now = time.monotonic()
        if self._watching and self._beaten is not None:
            self._steps.append(now - self._beaten)
        # The first step compiles, for however long that takes.
        self._watching, self._begun = self._begun, True
        self._beaten, self._waited = now, 0.0
        # Not replaced whole: it is one short write, and only read in trouble.
        self._path.write_text(f"{step}\n")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Returns a context in which nothing is expected, such as a slow save."""
        before, self._watching = self._watching, False
        try:
            yield
        finally:
            self._beaten, self._waited, self._watching = None, 0.0, before

    def limit(self) -> float:
        """Returns how many seconds without a step are too many now."""
        if len(self._steps) < _KNOWN:
            return 10 * self._least
        return max(self._least, _PATIENCE * statistics.median(self._steps))

    def _watch(self) -> None:
        while not self._end.wait(_TICK):
            # Ticks are counted, not the clock read: while stopped there are none.
            self._waited += _TICK
            if self._watching and self._waited > self.limit():
                self._abort()
                return

    def _abort(self) -> None:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        print(f"error: {self.finding()}", file=sys.stderr, flush=True)
        # The first to leave ends the others, who would say nothing any more.
        time.sleep(_LAST_WORDS)
        # The main thread waits in an exchange and cannot be told.
        os._exit(ProcessLost.exit_code)

    def finding(self) -> str:
        """Says for how long there was no step, and which processes are behind."""
        step, names = behind(self._folder)
        return f"no step for {self._waited:.0f} s: process {names} is behind at {step}"


def behind(folder: pathlib.Path) -> tuple[int, str]:
    """Returns the least step that any process is at, and which are: `(7, "1, 3")`.

    Args:
      folder: of the processes' `Watchdog`s.
    """
    told = {}
    for path in folder.glob("*"):
        with contextlib.suppress(ValueError, OSError):
            told[int(path.name)] = int(path.read_text())
    least = min(told.values(), default=0)
    names = sorted(index for index, step in told.items() if step == least)
    return least, ", ".join(map(str, names))
