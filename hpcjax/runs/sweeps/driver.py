"""Running a sweep: starts workers, replaces dead ones, collects the results."""

import dataclasses
import functools
import logging
import pathlib
import signal
import time
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.core import provenance
from hpcjax.core.errors import (
    ConfigError,
    DiskFull,
    HpcjaxError,
    Interrupted,
    Preempted,
)
from hpcjax.runs import results
from hpcjax.runs.progress import Progress
from hpcjax.runs.signals import StopSignals
from hpcjax.runs.sweeps import launchers
from hpcjax.runs.sweeps.study import ATTEMPTS, Study, create_study
from hpcjax.runs.sweeps.sweep import Sweep, read_sweep

if TYPE_CHECKING:
    import xarray as xr

log = logging.getLogger(__name__)
SEED = "seed"  # the key over whose values points are averaged
_POLL, _GRACE = 0.2, 60.0  # seconds
_KILLED = (Interrupted.exit_code, Preempted.exit_code)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A sweep that has ended.

    Attributes:
      name: by which it can be resumed.
      directory: its folder.
      dataset: its results, see `gather.gather`.
    """

    name: str
    directory: pathlib.Path
    dataset: "xr.Dataset"

    @property
    def successes(self) -> int:
        """Number of trials with a finite value that keep the constraint."""
        return int(np.isfinite(kept_values(self.dataset)).sum())

    @property
    def best(self) -> "xr.Dataset":
        """The point with the least value of those that keep the constraint.

        If the seed is an axis of the grid, it is the point with the least mean over
        seeds, with all of them.

        Raises:
          ConfigError: no point has a value, of every seed.
        """
        value = kept_values(self.dataset)
        if SEED in value.dims:
            value = value.mean(SEED, skipna=False)
        if not np.isfinite(value).any():
            kept = self.dataset.attrs.get("subject_to", "")
            keeps = f" and keeps {kept}" if kept else ""
            raise ConfigError(
                f"no point of sweep {self.name} has a finite value{keeps}"
            )
        return self.dataset.isel(value.argmin(...)) if value.dims else self.dataset


def kept_values(dataset: "xr.Dataset") -> "xr.DataArray":
    """Returns the values of trials, NaN where one breaks the sweep's constraint."""
    value = dataset["value"]
    # Where a grid is not complete, what has not run is not feasible either.
    return value.where(dataset["feasible"] == 1) if "feasible" in dataset else value


def run_sweep(
    sweep: Sweep | str,
    *,
    name: str | None = None,
    root: pathlib.Path | None = None,
    parallel: int = 1,
    launcher: launchers.Launcher | None = None,
    retry_failed: bool = False,
    quiet: bool = False,
) -> SweepResult:
    """Runs the trials of a sweep that have not ended yet.

    A sweep that was interrupted in any way is resumed by running it again: trials that
    have ended are not repeated, and those that were running resume their runs. A trial
    that fails is reported in the result and does not affect others.

    Args:
      sweep: the sweep, or the name of an existing one.
      name: its folder below `sweeps/`; default the config and a digest of the sweep.
      root: folder that holds `sweeps/` and `runs/`; default the working directory.
      parallel: number of workers.
      launcher: starts a worker; default a process of this machine.
      retry_failed: repeat trials that have failed.
      quiet: no progress line.

    Returns:
      The sweep's name and dataset, also written to `result.nc` in its folder.

    Raises:
      ConfigError: an axis that the config does not have, or another sweep of this name.
      DiskFull: a worker found no room.
      Preempted: a signal came (Interrupted for Ctrl-C); the runs have saved.
      HpcjaxError: workers cannot start; the message quotes their log.

    Examples:
      `run_sweep(Sweep(config="jorge/digits", axes=(Axis(key="seed", ...),)))`
    """
    root = (root or pathlib.Path.cwd()).resolve()
    if parallel < 1:
        raise ConfigError(f"parallel must be at least 1: got {parallel}")
    study = _find(sweep, name, root)
    study.trials()  # tells what is damaged before workers start
    if retry_failed:
        study.retry_failed()
    start = launcher or launchers.make_launcher("local")
    with StopSignals() as signals:
        crew = _Crew(study, root, start, min(parallel, study.sweep.total))
        with (
            signals.defer(),
            Progress(study.name, study.sweep.total, quiet=quiet) as progress,
        ):
            crew.watch(signals, progress)
        signals.check()
    return _collect(study, root)


def _find(sweep: Sweep | str, name: str | None, root: pathlib.Path) -> Study:
    if isinstance(sweep, str):
        name, sweep = sweep, read_sweep(sweep, root)
    sweep.check(root)
    return create_study(name or sweep.default_name, sweep, root)


def _collect(study: Study, root: pathlib.Path) -> SweepResult:
    from hpcjax.runs.sweeps.gather import gather

    dataset = gather(study, root)
    origin = provenance.collect(seed=study.sweep.seed)
    results.write(dataset, study.folder / "result.nc", origin)
    return SweepResult(name=study.name, directory=study.folder, dataset=dataset)


class _Crew:
    """The workers of a sweep."""

    def __init__(
        self,
        study: Study,
        root: pathlib.Path,
        launcher: launchers.Launcher,
        size: int,
    ) -> None:
        self._study, self._size, self._deaths = study, size, 0
        self._start = functools.partial(launcher, study.name, root)
        self._jobs: dict[int, launchers.Job] = {}
        self._told: list[str] = []

    def watch(self, signals: StopSignals, progress: Progress) -> None:
        """Starts workers, replaces those that die, and returns when all have ended."""
        ended = -1
        try:
            for index in range(self._size):
                self._jobs[index] = self._start(index)
            while (self._jobs or self._needed()) and not signals.received:
                for index in [i for i, job in self._jobs.items() if job.done()]:
                    self._react(index, self._jobs.pop(index))
                done = sum(trial.has_ended for trial in self._study.trials())
                if done != ended:
                    ended = done
                    progress.write({"step": ended})
                time.sleep(_POLL)
        finally:
            self._dismiss()

    def _needed(self) -> bool:
        """Returns whether trials are open although our workers have ended.

        Workers of another driver, which may have been killed, may hold some. Trials
        whose worker has died are taken over.
        """
        if self._study.has_lost():
            self._jobs[0] = self._start(0)
            return True
        hosts = self._study.held_by()
        if hosts and hosts != self._told:
            log.warning("waiting for trials that are running on %s", ", ".join(hosts))
        self._told = hosts
        return bool(hosts)

    def _react(self, index: int, job: launchers.Job) -> None:
        try:
            status = job.result()
        except Exception:
            status = -signal.SIGKILL  # its process, or its node, is gone
        if status == 0:
            return
        if status == DiskFull.exit_code:
            raise DiskFull(f"a worker found no room; see {self._log(index)}")
        if status in _KILLED or status < 0 or self._study.has_lost():
            self._deaths += 1
            log.warning("worker %d ended with %d", index, status)
            if self._deaths <= ATTEMPTS * self._study.sweep.total:
                self._jobs[index] = self._start(index)
                return
        # It died without a trial, so that another worker would die in the same way.
        raise HpcjaxError(f"worker {index} ended with {status}:\n{self._tail(index)}")

    def _dismiss(self) -> None:
        for job in self._jobs.values():
            job.cancel()
        limit = time.monotonic() + _GRACE
        while not all(job.done() for job in self._jobs.values()):
            time.sleep(_POLL)
            if time.monotonic() > limit:
                for job in self._jobs.values():
                    job.cancel()
                return

    def _log(self, index: int) -> pathlib.Path:
        return self._study.folder / "workers" / f"{index}.log"

    def _tail(self, index: int) -> str:
        path = self._log(index)
        lines = path.read_text().splitlines() if path.exists() else []
        return "\n".join(lines[-5:])
