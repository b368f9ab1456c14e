"""A watchdog that finds a hanging process, reports which one it is, and ends the run.

A process that is alive but hangs leaves all others waiting in a collective, without any
message. Therefore every process writes its progress to a file, and a thread in each
watches the time, and touches the file. A process whose file is no longer touched is
stopped altogether. Else the one that is behind hangs: the others have already submitted
their step to the devices, and wait.
"""

import contextlib
import faulthandler
import os
import pathlib
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from typing import Literal, final, get_args

from hpcjax.core.errors import ProcessLost

# Name of the folder of progress files in a run directory.
PROGRESS = "progress"
_TICK = 1.0
_LAST_WORDS = 3.0
# Durations needed for a median, and durations kept, of steps and of validation batches.
_KNOWN, _REMEMBERED = 3, 50
# A process that has been silent for so many seconds more than another is stopped.
_SILENT = 3.0
# Seconds that a checkpoint may always take, however short the steps are.
_CHECKPOINT = 1800.0
# The limit in medians; before there is one, in multiples of `least`, and for the first.
_PATIENCE = 20
_EARLY, _FIRST = 10, 30

Expected = Literal["step", "validation", "checkpoint", "compile"]


@final
class Watchdog:
    """Watches this process's steps and validations, and ends the run if it hangs.

    Args:
      folder: of the progress files of all processes.
      index: of this process.
      least: seconds that a step, or a batch of validation, may always take. The limit
        is 20 times their median if that is more; 10 times `least` until there is a
        median, and 30 times for the first one, which compiles.
      count: number of processes; files of others are from an earlier attempt.

    A checkpoint, compiling for another shape of batches, and what comes before the
    first step, may take half an hour, or 30 times `least` if that is more. Time in
    which this process is stopped, as by Ctrl-Z, does not count.
    """

    def __init__(
        self, folder: pathlib.Path, index: int, least: float, count: int = 1
    ) -> None:
        self._folder, self._index, self._least = folder, index, least
        self._count = count
        # A checkpoint may be read before the first step.
        self._expected: Expected = "checkpoint"
        self._times: dict[str, deque[float]] = {
            what: deque(maxlen=_REMEMBERED) for what in get_args(Expected)
        }
        self._began: float | None = None
        self._waited = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Watchdog":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._write_progress("0")
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

    def _write_progress(self, place: str) -> None:
        # Not written atomically: one short write, which is read only if a process
        # hangs.
        self._path.write_text(f"{place}\n")

    def expect(self, what: Expected) -> None:
        """Is told what comes next."""
        self._end_duration()
        self._began, self._expected = None, what

    def beat(self, step: int, batch: int = 0) -> None:
        """Is places that `step`, or the `batch` of the validation after it, begins."""
        self._end_duration()
        self._began = time.monotonic()
        self._write_progress(f"{step} {batch}" if batch else f"{step}")

    def _end_duration(self) -> None:
        """Records the duration of the step or batch that the last beat began."""
        if self._began is not None:
            self._times[self._expected].append(time.monotonic() - self._began)
        self._waited = 0.0

    def limit(self) -> float:
        """Returns the seconds that the current step or batch may take."""
        times = self._times[self._expected]
        if self._expected in ("checkpoint", "compile"):
            return max(_CHECKPOINT, _FIRST * self._least)
        if len(times) < _KNOWN:
            return (_EARLY if times else _FIRST) * self._least
        return max(self._least, _PATIENCE * statistics.median(times))

    def _watch(self) -> None:
        while not self._end.wait(_TICK):
            # Ticks are counted instead of reading a clock, which also runs while the
            # process is stopped.
            self._waited += _TICK
            with contextlib.suppress(OSError):
                os.utime(self._path)
            if self._waited > self.limit():
                self._abort()
                return

    def _abort(self) -> None:
        # The main thread's apart: faulthandler stops after a hundred threads, of which
        # the oldest comes last.
        main = sys._current_frames()[threading.main_thread().ident or 0]
        print(*traceback.format_stack(main), sep="", end="", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        print(f"error: {self.describe_stall()}", file=sys.stderr, flush=True)
        # The first process that exits ends the others: give them time for their
        # message.
        time.sleep(_LAST_WORDS)
        # The main thread waits in a collective and cannot be interrupted.
        os._exit(ProcessLost.exit_code)

    def describe_stall(self) -> str:
        """Returns for how long nothing happened, and which processes are to blame."""
        waited = f"{self._expected} stands still for {self._waited:.0f} s"
        return f"{waited}: {blame(self._folder)}"


def blame(folder: pathlib.Path) -> str:
    """Returns which processes a run waits for: "process 1, 3 is behind at 7".

    Args:
      folder: of the progress files.
    """
    if stopped := blame_stopped(folder):
        return stopped
    places, _ = _read_progress(folder)
    least = min(places.values(), default=(0,))
    found = [index for index, place in places.items() if place == least]
    return _name(found, "is behind", places)


def blame_stopped(folder: pathlib.Path) -> str:
    """Returns which processes were silent long before the others; "" if none was.

    Args:
      folder: of the progress files.
    """
    places, touched = _read_progress(folder)
    newest = max(touched.values(), default=0.0)
    found = [index for index in places if newest - touched[index] > _SILENT]
    return _name(found, "shows no sign of life, last", places) if found else ""


def _read_progress(
    folder: pathlib.Path,
) -> tuple[dict[int, tuple[int, ...]], dict[int, float]]:
    """Returns where each process is, and when it last touched its file."""
    places: dict[int, tuple[int, ...]] = {}
    touched: dict[int, float] = {}
    for path in folder.glob("*"):
        with contextlib.suppress(ValueError, OSError):
            step, *batch = map(int, path.read_text().split())
            places[int(path.name)] = (step, *batch)
            touched[int(path.name)] = path.stat().st_mtime
    return places, touched


def _name(found: list[int], what: str, places: dict[int, tuple[int, ...]]) -> str:
    names = ", ".join(map(str, sorted(found)))
    return f"process {names} {what} at {min((places[i][0] for i in found), default=0)}"
