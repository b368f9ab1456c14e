"""The state of a sweep: a folder for each trial, held by the process that runs it.

`sweeps/<name>/trials/<cell>/` contains `trial.json`, which is written whole or not at
all, and, while the trial runs, the lock of its process. Any number of processes that
see the folder may work on a sweep, and be killed: a trial that is `running` and that
nobody holds is taken again. Runs are in `runs/`; a trial that is taken again resumes
the run that was interrupted (`execute.ensure`).
"""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterator, Mapping

import filelock

from hpcjax.core import files
from hpcjax.core.errors import DataFormatError
from hpcjax.runs import lock, values
from hpcjax.runs.sweeps.axes import ADAPTIVE, Value
from hpcjax.runs.sweeps.sweep import LOCK, Sweep, Trial, read_sweep, write_sweep

log = logging.getLogger(__name__)

ATTEMPTS = 3
_DIED = f"its process died {ATTEMPTS} times"


class Study:
    """A sweep's folder.

    Attributes:
      folder: `sweeps/<name>`.
      sweep: what it is.
    """

    def __init__(self, folder: pathlib.Path, sweep: Sweep) -> None:
        self.folder, self.sweep = folder, sweep
        self._final: dict[int, Trial] = {}  # has been read, and will not change

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @contextlib.contextmanager
    def take(self) -> Iterator[Trial | None]:
        """Takes a trial for this process; None if there is none to take.

        Others see it as running for as long as the block runs, in which its end is to
        be written.
        """
        with contextlib.ExitStack() as stack:
            with self._lock():
                trial = self._next()
                if trial is not None:
                    self.write(trial)
                    stack.enter_context(lock.hold(self._place(trial.cell)))
            yield trial

    def write(self, trial: Trial) -> None:
        """Writes what is known of a trial."""
        path = self._place(trial.cell) / "trial.json"
        files.write_json(path, values.encode(trial, Trial))

    def trials(self) -> list[Trial]:
        """Returns all trials whose points are known, in order."""
        known = self._read_all()
        points = enumerate(self.sweep.points)
        planned = {cell: Trial(cell=cell, point=point) for cell, point in points}
        return [trial for _, trial in sorted({**planned, **known}.items())]

    def retry_failed(self) -> None:
        """Has the trials that have failed wait, with all attempts."""
        with self._lock():
            for trial in self._read_all().values():
                if trial.status == "failed":
                    self.write(Trial(cell=trial.cell, point=trial.point))

    def has_lost(self) -> bool:
        """Returns whether there is a trial whose process has died."""
        with self._lock():
            return any(map(self._is_lost, self._running()))

    def held_by(self) -> list[str]:
        """Returns the hosts of living processes that hold trials."""
        open_ = [cell for cell, each in self._read_all().items() if not each.has_ended]
        return sorted(set(filter(None, map(self._holder, open_))))

    def _next(self) -> Trial | None:
        """Returns the trial to run now: a new one, or else one that somebody left."""
        known = self._read_all()
        for cell in range(self.sweep.total):
            if cell not in known and not self._holder(cell):
                point = self._choose(cell, known)
                return Trial(cell=cell, point=point, status="running")
        for trial in known.values():
            # Who cannot run it now may hold it for a while yet.
            if trial.status == "waiting" and not self._holder(trial.cell):
                return dataclasses.replace(trial, status="running")
            if trial.status == "running" and self._is_lost(trial):
                log.warning("the process of trial %d died", trial.cell)
                if trial.attempt < ATTEMPTS:
                    return dataclasses.replace(trial, attempt=trial.attempt + 1)
                self.write(dataclasses.replace(trial, status="failed", error=_DIED))
        return None

    def _choose(self, cell: int, known: Mapping[int, Trial]) -> Mapping[str, Value]:
        if self.sweep.sampler not in ADAPTIVE:
            return self.sweep.points[cell]
        from hpcjax.runs.sweeps import adaptive

        return adaptive.choose(self.sweep, cell, list(known.values()))

    def _running(self) -> list[Trial]:
        return [each for each in self._read_all().values() if each.status == "running"]

    def _holder(self, cell: int) -> str:
        return lock.find_holder(self._place(cell))

    def _is_lost(self, trial: Trial) -> bool:
        # Its end may have been written just now, before the trial was let go.
        return (
            not self._holder(trial.cell) and self._read(trial.cell).status == "running"
        )

    def _place(self, cell: int) -> pathlib.Path:
        return self.folder / "trials" / f"{cell:04}"

    def _read_all(self) -> dict[int, Trial]:
        """Returns the trials that have been taken, by number, in order."""
        paths = self.folder.glob("trials/*/trial.json")
        cells = sorted(int(path.parent.name) for path in paths)
        return {cell: self._read(cell) for cell in cells}

    def _read(self, cell: int) -> Trial:
        if cell in self._final:
            return self._final[cell]
        path = self._place(cell) / "trial.json"
        try:
            trial = values.decode(files.read_json(path), Trial)
            if trial.cell != cell or {*trial.point} != {a.key for a in self.sweep.axes}:
                raise DataFormatError(f"it is of trial {trial.cell} at {trial.point}")
        except ValueError as error:
            raise DataFormatError(
                f"{path} is damaged: {error}. Remove it: the trial is taken again, and "
                "its run used if it has ended"
            ) from error
        if trial.status in ("done", "diverged"):
            self._final[cell] = trial
        return trial

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (
            filelock.FileLock(self.folder / LOCK),
            files.disk_errors(self.folder / "trials"),
        ):
            yield


def open_study(name: str, root: pathlib.Path) -> Study:
    """Returns the state of an existing sweep; see `read_sweep` for errors."""
    return Study(files.inside(root, "sweeps", name), read_sweep(name, root))


def create_study(name: str, sweep: Sweep, root: pathlib.Path) -> Study:
    """Returns the state of a sweep, new or there; see `write_sweep` for errors."""
    write_sweep(name, sweep, root)
    return Study(files.inside(root, "sweeps", name), sweep)
