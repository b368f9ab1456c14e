"""Finds a process that stands still, says which one, and ends the run.

In a run of several processes one that is alive but stuck leaves all others waiting in
an exchange, for ever and without a word. So every process writes how far it has come
into a file of its own, and a thread watches them. The one that is behind is the one
that is stuck: the others have handed their step to the devices and wait.
"""

import contextlib
import faulthandler
import math
import os
import pathlib
import statistics
import sys
import threading
import time
from collections import deque
from typing import Literal, final, get_args

from hpcjax.core.errors import ProcessLost

PROGRESS = "progress"  # the folder's name in a run directory
_TICK = 1.0
_LAST_WORDS = 3.0
_KNOWN, _REMEMBERED = 3, 50  # of steps, and of validation batches
_PATIENCE = 20  # times the median
_EARLY, _FIRST = 10, 30  # times what is never too much

Expected = Literal["step", "validation", "checkpoint"]


@final
class Watchdog:
    """Watches this process's steps and validations, and names who is behind in trouble.

    Args:
      folder: where every process of the run keeps a file of its progress.
      index: of this process.
      least: seconds for a step, or a batch of a validation, that are never too many;
        more are too many once they exceed 20 median ones. Ten times as many until a
        median is known, and thirty times as many for the first one, which compiles.
      count: of the processes; files of others are of an earlier attempt.

    Checkpoints are not watched, read or written: nobody knows how long they may take.
    Time in which this process is stopped, as by Ctrl-Z, does not count.
    """

    def __init__(
        self, folder: pathlib.Path, index: int, least: float, count: int = 1
    ) -> None:
        self._folder, self._index, self._least = folder, index, least
        self._count = count
        self._expected: Expected = "checkpoint"  # it may be read before the first step
        self._times: dict[str, deque[float]] = {
            what: deque(maxlen=_REMEMBERED) for what in get_args(Expected)
        }
        self._beaten: float | None = None
        self._waited = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._tell("0")
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

    def _tell(self, place: str) -> None:
        # Not replaced whole: it is one short write, and only read in trouble.
        self._path.write_text(f"{place}\n")

    def expect(self, what: Expected) -> None:
        """Takes note that what comes next are steps, a validation or a checkpoint."""
        self._ended()
        self._beaten, self._expected = None, what

    def beat(self, step: int, batch: int = 0) -> None:
        """Takes note that `step`, or a validation's `batch` after it, begins."""
        self._ended()
        self._beaten = time.monotonic()
        self._tell(f"{step} {batch}" if batch else f"{step}")

    def _ended(self) -> None:
        """Remembers how long that took which the last beat began."""
        if self._beaten is not None:
            self._times[self._expected].append(time.monotonic() - self._beaten)
        self._waited = 0.0

    def limit(self) -> float:
        """Returns how many seconds without a sign of life are too many now."""
        times = self._times[self._expected]
        if self._expected == "checkpoint":
            return math.inf
        if len(times) < _KNOWN:
            return (_EARLY if times else _FIRST) * self._least
        return max(self._least, _PATIENCE * statistics.median(times))

    def _watch(self) -> None:
        while not self._end.wait(_TICK):
            # Ticks are counted, not the clock read: while stopped there are none.
            self._waited += _TICK
            if self._waited > self.limit():
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
        """Says for how long nothing happened, and which processes are behind."""
        step, names = behind(self._folder)
        waited = f"{self._expected} stands still for {self._waited:.0f} s"
        return f"{waited}: process {names} is behind at {step}"


def behind(folder: pathlib.Path) -> tuple[int, str]:
    """Returns the least step that any process is at, and which are: `(7, "1, 3")`.

    Args:
      folder: of the processes' `Watchdog`s.
    """
    told = {}
    for path in folder.glob("*"):
        with contextlib.suppress(ValueError, OSError):
            step, *batch = map(int, path.read_text().split())
            told[int(path.name)] = (step, *batch)
    least = min(told.values(), default=(0,))
    names = sorted(index for index, place in told.items() if place == least)
    return least[0], ", ".join(map(str, names))
